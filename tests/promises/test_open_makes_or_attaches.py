"""`open` makes a cache or attaches to it, `create` only makes, `attach` only attaches."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_BYTES, holds_right_bytes, keys_of, run_python, store

TESTS = str(Path(__file__).parent.parent)


@pytest.mark.portable
def test_the_makers_size_holds(root: str) -> None:
    with hc.KvCache.open("chat", FORMAT, capacity="64KiB", root=root) as maker:
        assert maker.page_count == 16
        assert maker.info["made"] is True
        with hc.KvCache.open("chat", FORMAT, capacity="1MiB", root=root) as second:
            assert second.page_count == second.stats().page_count == 16
            assert second.info["made"] is False
        with hc.KvCache.attach("chat", root=root) as third:
            assert third.format == FORMAT
            assert third.page_count == 16
            assert third.name == "chat"


@pytest.mark.portable
def test_pages_outlive_all_sessions(root: str) -> None:
    keys = keys_of("a", 4)
    with hc.KvCache.create("chat", FORMAT, page_count=8, root=root) as maker:
        store(maker, keys)
    with hc.KvCache.attach("chat", root=root) as later, later.lookup(keys) as lease:
        assert holds_right_bytes(lease, keys)
        assert later.stats().sessions == 1


@pytest.mark.portable
def test_create_only_makes_and_attach_only_attaches(root: str) -> None:
    with pytest.raises(hc.CacheNotFound, match="chat"):
        hc.KvCache.attach("chat", root=root)
    maker = hc.KvCache.create("chat", FORMAT, page_count=8, root=root)
    with pytest.raises(hc.CacheExists, match="chat"):
        hc.KvCache.create("chat", FORMAT, page_count=8, root=root)
    maker.close()
    with pytest.raises(hc.CacheExists, match="chat"):
        hc.KvCache.create("chat", FORMAT, page_count=8, root=root)
    with pytest.raises(hc.CacheNotFound):
        hc.KvCache.attach("chat", root=root + "/none")
    assert not os.path.exists(root + "/none")


@pytest.mark.portable
@pytest.mark.parametrize("living", [True, False])
def test_another_page_format_is_refused_with_both_numbers(root: str, living: bool) -> None:
    keys = keys_of("a", 4)
    first = hc.KvCache.open("chat", hc.PageFormat(8192, 16, [4096, 4096]), "64KiB", root=root)
    store(first, keys)
    if not living:
        first.close()
    others = [
        (hc.PageFormat(4096, 16), "8192.*4096|4096.*8192"),
        (hc.PageFormat(8192, 32), "16.*32|32.*16"),
        (hc.PageFormat(8192, 16), "fragment"),
        (hc.PageFormat(8192, 16, [1024, 7168]), "fragment"),
    ]
    for page_format, numbers in others:
        with pytest.raises(hc.FormatMismatch, match=numbers):
            hc.KvCache.open("chat", page_format, "64KiB", root=root)
    with hc.KvCache.open("chat", hc.PageFormat(8192, 16, [4096, 4096]), "1MiB", root=root) as same:
        assert same.match(keys) == 4
    first.close()


@pytest.mark.portable
def test_capacity_buys_page_bytes(root: str) -> None:
    sizes: list[tuple[int | str, int]] = [
        (PAGE_BYTES, 1),
        (3 * PAGE_BYTES - 1, 2),
        ("16384", 4),
        ("64KiB", 16),
        ("0.25 MiB", 64),
        ("65kB", 15),
    ]
    for number, (capacity, pages) in enumerate(sizes):
        with hc.KvCache.open(f"c{number}", FORMAT, capacity, root=root) as cache:
            assert cache.page_count == pages
    with pytest.raises(hc.BadValue, match=r"4095.*4096"):
        hc.KvCache.open("chat", FORMAT, 4095, root=root)
    wrong: list[dict[str, object]] = [
        {},
        {"capacity": "1MiB", "page_count": 4},
        {"page_count": 0},
        {"page_count": -1},
        {"page_count": 2**31},
        {"page_count": 4.0},
        {"capacity": -1},
        {"capacity": "4 pages"},
        {"capacity": 4096.0},
        {"capacity": True},
    ]
    for options in wrong:
        with pytest.raises(hc.BadValue):
            hc.KvCache.open("chat", FORMAT, root=root, **options)  # type: ignore[arg-type]
    assert "chat" not in os.listdir(root)


def test_a_small_cache_needs_little_beside_its_pages(root: str) -> None:
    with hc.KvCache.open("chat", FORMAT, page_count=16, root=root) as cache:
        assert cache.info["size_bytes"] - 16 * PAGE_BYTES <= 8 << 20
        assert cache.info["size_bytes"] == os.stat(cache.info["path"]).st_size
        assert cache.info["size_bytes"] - cache.info["table_bytes"] == 16 * PAGE_BYTES
        assert cache.info["table_bytes"] % 4096 == 0


@pytest.mark.portable
def test_pages_touch_and_are_never_padded(root: str) -> None:
    keys = keys_of("a", 5)
    with hc.KvCache.open("odd", hc.PageFormat(1000, 3), page_count=7, root=root) as cache:
        with cache.reserve(keys) as reservation:
            for i in range(5):
                reservation.view(i)[:] = bytes([i + 1]) * 1000
            reservation.commit()
            pages = reservation.pages.tolist()
        data = Path(cache.info["path"]).read_bytes()[cache.info["table_bytes"] :]
        for i, page in enumerate(pages):
            assert data[page * 1000 : (page + 1) * 1000] == bytes([i + 1]) * 1000


@pytest.mark.portable
def test_too_little_room_is_said_at_once_and_leaves_nothing(root: str) -> None:
    with pytest.raises(hc.NoRoom, match=r"(?s)[0-9]{6,}.*[0-9]{6,}"):
        hc.KvCache.open("chat", hc.PageFormat("64MiB", 64), "8TiB", root=root)
    assert [name for name in os.listdir(root) if not name.startswith(".")] == []
    assert hc.caches(root) == []
    with hc.KvCache.open("chat", FORMAT, page_count=4, root=root) as cache:
        assert cache.check() == []


_SMALL = """
import os, subprocess
import hostcache as hc
from helpers import *
root, size = sys.argv[1:]
options = "mode=0700,size=" + size
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", root], check=True)
"""


def mounts_work() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not mounts_work(), reason="file systems can not be mounted here")
@pytest.mark.parametrize(
    ("size", "code"),
    [
        ("64m", "hc.KvCache.open('chat', FORMAT, page_count=16, root=root).close()"),
        (
            "8m",
            """
import re
try:
    hc.KvCache.open("chat", FORMAT, "32MiB", root=root)
except hc.NoRoom as error:
    assert len(re.findall("[0-9]{7,}", str(error))) >= 2, error
else:
    raise SystemExit("it did not fail")
assert [name for name in os.listdir(root) if not name.startswith(".")] == []
free = os.statvfs(root)
assert free.f_bavail * free.f_bsize > 7 << 20
with hc.KvCache.open("chat", FORMAT, page_count=16, root=root) as cache:
    assert store(cache, keys_of("a", 16)) == 16
""",
        ),
    ],
)
def test_on_a_small_tmpfs(root: str, size: str, code: str) -> None:
    program = "import sys; sys.path.insert(0, " + repr(TESTS) + ")" + _SMALL + code
    ended = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", program, root, size],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_root_on_a_disk_is_refused(tmp_path: Path) -> None:
    command = ["stat", "--file-system", "--format=%T", str(tmp_path)]
    if subprocess.run(command, capture_output=True, text=True, check=True).stdout == "tmpfs\n":
        pytest.skip("temporary files lie on a tmpfs here")
    folder = tmp_path / "root"
    with pytest.raises(hc.Unsupported, match=r"tmpfs.*HOSTCACHE_ROOT"):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=folder)
    assert os.listdir(folder) == []


def test_making_shows_progress(root: str) -> None:
    seen: list[tuple[int, int]] = []
    options = {"root": root, "progress": lambda done, total: seen.append((done, total))}
    with hc.KvCache.open("chat", hc.PageFormat("1MiB", 64), "160MiB", **options) as cache:
        assert seen[-1] == (cache.info["size_bytes"], cache.info["size_bytes"])
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert len(seen) > 1


def test_an_error_in_progress_reaches_the_caller(root: str) -> None:
    def fails(done: int, total: int) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        hc.KvCache.open("chat", FORMAT, page_count=4, root=root, progress=fails)
    assert hc.caches(root) == []


@pytest.mark.portable
def test_names_are_no_paths(root: str) -> None:
    long = "n" * 100
    for name in ("a", "A.b_c-9", "-x", "_", long):
        with hc.KvCache.open(name, FORMAT, page_count=1, root=root) as cache:
            assert cache.name == name
    wrong = [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "/abs",
        "../up",
        "a b",
        "a\0b",
        "a\n",
        "\xe9",
        long + "n",
    ]
    for name in wrong:
        for call in (
            lambda name: hc.KvCache.open(name, FORMAT, page_count=1, root=root),
            lambda name: hc.KvCache.create(name, FORMAT, page_count=1, root=root),
            lambda name: hc.KvCache.attach(name, root=root),
            lambda name: hc.remove(name, root),
        ):
            with pytest.raises(hc.BadValue):
                call(name)
    with pytest.raises(hc.BadValue, match="slash"):
        hc.KvCache.attach("a/b", root=root)
    with pytest.raises(hc.BadValue):
        hc.KvCache.attach(None, root=root)  # type: ignore[arg-type]


def test_what_comes_later_is_refused_by_name(root: str) -> None:
    for make in (hc.KvCache.open, hc.KvCache.create):
        with pytest.raises(hc.Unsupported, match="LightLLM"):
            make("chat", FORMAT, page_count=4, root=root, group="new")
        with pytest.raises(hc.Unsupported, match="tiers"):
            make("chat", FORMAT, page_count=4, root=root, tiers=[object()])
        with pytest.raises(hc.BadValue, match="PageFormat"):
            make("chat", 4096, page_count=4, root=root)  # type: ignore[arg-type]
        with pytest.raises(hc.BadValue, match="Namespace"):
            make("chat", FORMAT, page_count=4, root=root, namespace="me")  # type: ignore[arg-type]
    assert hc.caches(root) == []


@pytest.mark.portable
def test_a_removed_cache_goes_on_for_those_inside(
    opened: Callable[..., hc.KvCache], root: str
) -> None:
    keys = keys_of("a", 4)
    inside = opened()
    store(inside, keys)
    lease = inside.lookup(keys)
    assert inside.orphaned is False
    hc.remove("chat", root)
    assert inside.orphaned is True
    assert hc.caches(root) == []
    with pytest.raises(hc.CacheNotFound):
        hc.remove("chat", root)
    assert holds_right_bytes(lease, keys)
    assert store(inside, keys_of("b", 4)) == 4
    anew = opened()
    assert anew.info["made"] is True
    assert anew.match(keys) == 0
    assert inside.match(keys) == 4
    store(anew, keys_of("c", 4))
    lease.release()
    inside.close()
    assert anew.orphaned is False
    assert anew.match(keys_of("c", 4)) == 4
    with pytest.raises(hc.Busy, match="chat"):
        hc.remove("chat", root, force=False)
    anew.close()
    hc.remove("chat", root, force=False)
    assert hc.caches(root) == []


@pytest.mark.portable
def test_caches_are_listed_with_what_is_known(root: str) -> None:
    assert hc.caches(root) == []
    assert hc.caches(root + "/none") == []
    with hc.KvCache.open("b", FORMAT, page_count=4, root=root) as living:
        hc.KvCache.open("a", hc.PageFormat(8192, 32), page_count=2, root=root).close()
        Path(root, "file").write_bytes(b"not ours")
        found = {info.name: info for info in hc.caches(root)}
        assert sorted(found) == list(found)
        assert all(isinstance(info, hc.CacheInfo) for info in found.values())
        assert (found["a"].living, found["b"].living) == (False, True)
        assert (found["a"].page_bytes, found["a"].page_tokens, found["a"].page_count) == (
            8192,
            32,
            2,
        )
        assert found["b"].size_bytes == living.info["size_bytes"]
        assert found["b"].path == living.info["path"] == f"{root}/b"
        assert found["a"].problem == found["b"].problem == ""
        assert "file" not in found or found["file"].problem
        assert living.stats().sessions == 1


def test_the_root_is_an_argument_or_the_environments(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = root + "/named"
    monkeypatch.setenv("HOSTCACHE_ROOT", named)
    with hc.KvCache.open("chat", FORMAT, page_count=1) as cache:
        assert cache.info["path"] == named + "/chat"
        with hc.KvCache.open("chat", FORMAT, page_count=1, root=Path(root)) as elsewhere:
            assert elsewhere.info["path"] == root + "/chat"
    assert [info.name for info in hc.caches()] == ["chat"]
    hc.remove("chat")
    assert hc.caches() == []


def test_what_was_replaced_is_said(root: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of("a", 4)
    with hc.KvCache.open("chat", FORMAT, page_count=8, root=root) as cache:
        store(cache, keys)
        path = Path(cache.info["path"])
    with caplog.at_level(logging.WARNING, "hostcache"):
        hc.KvCache.open("chat", FORMAT, page_count=8, root=root).close()
        assert caplog.records == []
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 8)
        with pytest.raises(hc.Damaged, match="chat"):
            hc.KvCache.attach("chat", root=root)
        with hc.KvCache.open("chat", FORMAT, page_count=8, root=root) as anew:
            assert anew.match(keys) == 0
            assert anew.info["replaced"] != ""
            assert anew.info["made"] is True
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "chat" in record.getMessage()
    assert anew.info["replaced"] in record.getMessage()


@pytest.mark.portable
def test_the_resource_tracker_knows_nothing_of_it(root: str) -> None:
    code = """
import multiprocessing, warnings
warnings.simplefilter("error")
from multiprocessing import resource_tracker
from helpers import *
cache = hc.KvCache.open("chat", FORMAT, page_count=4, root=sys.argv[1])
store(cache, keys_of("a", 2))
resource_tracker.ensure_running()
"""
    for _ in range(2):
        ended = run_python(code, root)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    with hc.KvCache.attach("chat", root=root) as cache:
        assert cache.match(keys_of("a", 2)) == 2
