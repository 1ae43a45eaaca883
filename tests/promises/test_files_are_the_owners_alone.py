"""A segment is its owner's alone, and nothing is trusted because it is there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostcache as hc
from helpers import FORMAT, keys_of, store

needs_superuser = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def make(root: str, name: str = "chat") -> Path:
    """A cache in which nobody lives, with four ready pages of prompt "a"."""
    with hc.KvCache.open(name, FORMAT, page_count=8, root=root) as cache:
        store(cache, keys_of("a", 4))
    return Path(root, name)


def refusals(root: str, name: str, error: type[Exception], match: str) -> None:
    """No way in leads past it."""
    ways = (
        lambda: hc.KvCache.open(name, FORMAT, page_count=8, root=root),
        lambda: hc.KvCache.attach(name, root=root),
    )
    for way in ways:
        with pytest.raises(error, match=match):
            way()


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.portable
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_files_are_private_whatever_the_umask(root: str, umask: None, mask: int) -> None:
    inner = root + "/inner"
    os.umask(mask)
    with hc.KvCache.open("chat", FORMAT, page_count=4, root=inner):
        assert mode(inner) == 0o700
        assert {mode(os.path.join(inner, name)) for name in os.listdir(inner)} == {0o600}


@pytest.mark.portable
def test_a_file_that_others_may_open_is_refused(root: str) -> None:
    path = make(root)
    for bits in (0o666, 0o660, 0o640, 0o604):
        path.chmod(bits)
        refusals(root, "chat", hc.NotAllowed, f"{bits:04o}.*0600")
    path.chmod(0o600)
    with hc.KvCache.attach("chat", root=root) as cache:
        assert cache.match(keys_of("a", 4)) == 4


@needs_superuser
def test_another_users_file_is_refused(root: str) -> None:
    path = make(root)
    os.chown(path, 12345, 12345)
    before = path.read_bytes()
    refusals(root, "chat", hc.NotAllowed, "12345.* 0")
    with pytest.raises(hc.NotAllowed):
        hc.remove("chat", root)
    assert path.read_bytes() == before


@needs_superuser
def test_another_users_root_is_refused(root: str) -> None:
    os.chown(root, 12345, 12345)
    with pytest.raises(hc.NotAllowed, match=r"12345.* 0.*HOSTCACHE_ROOT="):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=root)
    for call in (hc.caches, lambda root: hc.remove("chat", root)):
        with pytest.raises(hc.NotAllowed, match="12345"):
            call(root)
    os.chown(root, 0, 0)


@pytest.mark.portable
def test_a_root_that_others_may_write_is_refused(root: str) -> None:
    for bits in (0o777, 0o1777, 0o770, 0o702):
        os.chmod(root, bits)
        with pytest.raises(hc.NotAllowed, match=f"{bits:04o}.*HOSTCACHE_ROOT={root}/hostcache"):
            hc.KvCache.open("chat", FORMAT, page_count=4, root=root)
    os.chmod(root, 0o700)
    assert os.listdir(root) == []


def test_a_root_that_is_no_real_folder_is_refused(root: str) -> None:
    real, link, file = Path(root, "real"), Path(root, "link"), Path(root, "file")
    real.mkdir(0o700)
    link.symlink_to(real)
    file.touch(0o600)
    with pytest.raises(hc.NotAllowed, match=f"link.*{real}"):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=link)
    with pytest.raises(hc.NotAllowed, match="folder"):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=file)
    with pytest.raises(hc.BadValue, match="first make"):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=root + "/a/b")
    assert list(real.iterdir()) == []


@pytest.mark.portable
@pytest.mark.parametrize("content", [b"", b"x", b"not a segment at all" * 500, bytes(1 << 20)])
def test_a_file_that_is_not_ours_is_never_touched(root: str, content: bytes) -> None:
    path = Path(root, "chat")
    path.write_bytes(content)
    path.chmod(0o600)
    refusals(root, "chat", hc.HostCacheError, "chat")
    with pytest.raises(hc.HostCacheError):
        hc.KvCache.create("chat", FORMAT, page_count=8, root=root)
    assert path.read_bytes() == content
    (info,) = hc.caches(root)
    assert info.problem
    hc.remove("chat", root)
    assert not path.exists()
    hc.KvCache.open("chat", FORMAT, page_count=8, root=root).close()


def test_links_folders_and_pipes_are_refused(root: str) -> None:
    target = make(root)
    before = target.read_bytes()
    Path(root, "link").symlink_to(target)
    Path(root, "folder").mkdir()
    os.mkfifo(os.path.join(root, "pipe"), 0o600)
    for name in ("link", "folder", "pipe"):
        refusals(root, name, hc.HostCacheError, name)
        with pytest.raises(hc.HostCacheError):
            hc.remove(name, root)
        assert os.path.lexists(os.path.join(root, name))
    assert target.read_bytes() == before


@pytest.mark.portable
def test_a_truncated_file_is_damaged_with_both_numbers(root: str) -> None:
    path = make(root)
    size = path.stat().st_size
    for short in (size - 1, size - 4096, size // 2, 4096, 200):
        os.truncate(path, short)
        with pytest.raises(hc.Damaged, match=f"{short}"):
            hc.KvCache.attach("chat", root=root)
        (info,) = hc.caches(root)
        assert info.problem
        with hc.KvCache.open("chat", FORMAT, page_count=8, root=root) as anew:
            assert str(short) in anew.info["replaced"]
            assert anew.match(keys_of("a", 4)) == 0
            assert store(anew, keys_of("a", 4)) == 4
        assert path.stat().st_size == size


def test_a_hole_in_a_file_is_damage(root: str) -> None:
    path = make(root)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)
    with pytest.raises(hc.Damaged):
        hc.KvCache.attach("chat", root=root)


def test_a_copy_is_no_other_caches_pages(root: str) -> None:
    """What was swapped while nobody was attached is found, or serves the bytes of its own keys."""
    path = make(root)
    copy = Path(root, "copy")
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    with hc.KvCache.attach("copy", root=root) as cache, cache.lookup(keys_of("a", 4)) as lease:
        assert len(lease) == 4
        assert cache.info["path"] == str(copy)


def test_flips_in_header_and_table_are_found(root: str) -> None:
    """Never a crash and never another key's bytes: an error, or a miss."""
    keys = keys_of("a", 4)
    path = make(root)
    whole = path.read_bytes()
    with hc.KvCache.attach("chat", root=root) as cache:
        table = cache.info["table_bytes"]
    used = [place for place in range(table) if whole[place]]
    for place in [*range(48), *used[:: max(1, len(used) // 300)]]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            with hc.KvCache.attach("chat", root=root) as cache, cache.lookup(keys) as lease:
                for i in range(len(lease)):
                    assert bytes(lease.view(i))[:32] == bytes(keys[i]), place
                store(cache, keys_of("b", 8))
                assert cache.check() == [], place
        except hc.HostCacheError:
            continue
