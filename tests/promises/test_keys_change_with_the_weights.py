"""Pages are found only by those who run the same weights, whatever folder or name they have.

A checkpoint that is quantised anew keeps its name, its shapes and often its size. Found by name,
its old pages answer fluently and wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hostcache as hc

pytestmark = pytest.mark.portable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def keys(folder: Path) -> set[bytes]:
    """Keys of a prompt and of a picture under the weights in `folder`."""
    namespace = hc.Namespace(
        model="m", weights=hc.weights_fingerprint(folder), dtype="bfloat16", layout="kv-page/1"
    )
    pages = {bytes(key) for key in hc.prefix_keys(range(64), 16, namespace)}
    return pages | {hc.content_key(b"a picture", namespace)}


def test_one_changed_byte_anywhere_gives_other_keys(folder: Path) -> None:
    """And the byte restored, with another time of change, the same keys again."""
    before = keys(folder)
    for name in ("config.json", "model.safetensors"):
        path = folder / name
        data = path.read_bytes()
        for position in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[position] ^= 1
            path.write_bytes(changed)
            assert keys(folder).isdisjoint(before)
        path.write_bytes(data)
        os.utime(path, (1, 1))
    assert keys(folder) == before


def test_names_and_borders_of_files_count(folder: Path) -> None:
    def write(**files: bytes) -> str:
        for path in folder.glob("*.bin"):
            path.unlink()
        for name, data in files.items():
            (folder / f"{name}.bin").write_bytes(data)
        return hc.weights_fingerprint(folder)

    found = [
        write(),
        write(a=b"12", b=b"34"),
        write(a=b"1", b=b"234"),
        write(a=b"34", b=b"12"),
        write(a=b"1234"),
        write(b=b"1234"),
        write(a=b"1234", b=b""),
    ]
    assert len(set(found)) == len(found)


def test_what_computes_nothing_does_not_count(folder: Path, tmp_path: Path) -> None:
    before = hc.weights_fingerprint(folder)
    for name in ("tokenizer.json", "generation_config.json", "README.md", ".cache.json"):
        (folder / name).write_text("anything")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("anything")
    assert hc.weights_fingerprint(folder) == before
    for name in ("preprocessor_config.json", "modeling_new.py", "quant.json", "more.gguf"):
        (folder / name).write_text("anything")
        assert hc.weights_fingerprint(folder) != before
        (folder / name).unlink()
    assert hc.weights_fingerprint(str(folder) + "/") == before


def test_links_count_as_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links; and one may lead in a circle."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(tmp_path / f"blob-of-{name}")
        (snapshot / name).symlink_to(tmp_path / f"blob-of-{name}")
    linked = hc.weights_fingerprint(snapshot)
    (snapshot / "circle").symlink_to(snapshot)
    assert hc.weights_fingerprint(snapshot) == linked
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "more.bin").write_bytes(b"weights")
    (snapshot / "more").symlink_to(folder / "elsewhere")
    assert hc.weights_fingerprint(snapshot) != linked
    (snapshot / "more").unlink()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).unlink()
        (tmp_path / f"blob-of-{name}").rename(snapshot / name)
    assert hc.weights_fingerprint(snapshot) == linked


def test_a_change_of_four_mib_in_a_row_is_seen_in_a_large_file(folder: Path) -> None:
    mib = 1 << 20
    path = folder / "large.safetensors"
    with open(path, "wb") as file:
        file.truncate(72 * mib + 12345)  # a hole: takes no room
    found = [hc.weights_fingerprint(folder)]
    for start in (0, mib, 20 * mib + 1, 62 * mib + 77, 68 * mib + 12345):
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(b"\1" * (4 * mib))
        found.append(hc.weights_fingerprint(folder))
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(bytes(4 * mib))
    assert len(set(found)) == 6
    assert hc.weights_fingerprint(folder) == found[0]
    with open(path, "r+b") as file:
        file.truncate(72 * mib + 12346)
    assert hc.weights_fingerprint(folder) not in found


def test_a_file_that_is_not_large_is_read_to_the_last_byte(folder: Path) -> None:
    path = folder / "large.safetensors"
    found = []
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    for position in (None, (33 << 20) + 4097):
        if position is not None:
            with open(path, "r+b") as file:
                file.seek(position)
                file.write(b"\1")
        found.append(hc.weights_fingerprint(folder))
    assert found[0] != found[1]


def test_a_file_cut_while_it_is_read_has_no_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").write_bytes(b"the size that was seen before the cut")
    seen = os.stat(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"what is left")
    (folder / "config.json").unlink()
    monkeypatch.setattr("hostcache.fingerprint.os.fstat", lambda _: seen)
    with pytest.raises(hc.BadValue, match="was cut from 37 bytes while it was read"):
        hc.weights_fingerprint(folder)
