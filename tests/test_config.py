"""Sizes, names and roots given as text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import hostcache as hc
from hostcache.config import check_name, format_bytes, parse_bytes, resolve_root, whole_number


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        (np.int64(7), 7),
        ("0", 0),
        ("4096", 4096),
        (" 4096 B ", 4096),
        ("1KiB", 1 << 10),
        ("2 MiB", 2 << 20),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("1TiB", 1 << 40),
        ("1kB", 1000),
        ("1KB", 1000),
        ("3 MB", 3_000_000),
        ("4GB", 4_000_000_000),
        ("1TB", 10**12),
        ("1.5GiB", 3 << 29),
        ("0.1GiB", 107374182),
        ("1.4kB", 1400),
    ],
)
def test_sizes(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "wrong",
    [
        *(-1, True, False, 1.0, float("nan"), None, b"4GiB", np.float32(4), np.True_),
        *("", "GiB", "-4GiB", "4.5", "4,5GiB", "4 G", "4G", "4GiBs", "1e9", "0x10", "\u0664GiB"),
        *("inf", "4GiB 2MiB", str(2**63), "9000000TiB", "1_000", ".5GiB", "1.GiB"),
    ],
)
def test_what_is_no_size(wrong: object) -> None:
    with pytest.raises(hc.BadValue, match="capacity"):
        parse_bytes(wrong, "capacity")  # type: ignore[arg-type]


def test_a_size_without_its_unit_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'4G'.*GiB.*GB"):
        parse_bytes("4G", "capacity")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1_474_560, "1.4 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (512 << 20, "512 MiB"),
        (4 << 30, "4 GiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_whole_numbers() -> None:
    assert whole_number(np.uint8(3), "n") == 3
    for wrong in (True, 1.0, "1", None, np.float64(1), np.True_):
        with pytest.raises(hc.BadValue, match="n is"):
            whole_number(wrong, "n")  # type: ignore[arg-type]


def test_names() -> None:
    for name in ("a", "A.b_c-9", "-", "_", "9", "n" * 100):
        assert check_name(name) == name
    for wrong, text in (("a/b", "slash"), (".a", "dot"), ("", "0 characters"), ("n" * 101, "101")):
        with pytest.raises(hc.BadValue, match=text):
            check_name(wrong)
    with pytest.raises(hc.BadValue, match="int"):
        check_name(3)  # type: ignore[arg-type]


def test_a_root_is_made_once_and_only_its_last_folder(root: str) -> None:
    path = os.path.join(root, "new")
    with pytest.raises(hc.CacheNotFound):
        resolve_root(path, make=False)
    assert resolve_root(path) == resolve_root(Path(path)) == resolve_root(path + "/") == path
    assert resolve_root(path, make=False) == path
    with pytest.raises(hc.BadValue, match=path):
        resolve_root(path + "/x/y")
    assert os.listdir(path) == []


def test_where_a_root_comes_from(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCACHE_ROOT", root)
    assert resolve_root() == root
    assert resolve_root(root + "/other") == root + "/other"
    monkeypatch.setenv("HOSTCACHE_ROOT", "")
    made = []
    monkeypatch.setattr("hostcache.config._make_folder", made.append)
    with pytest.raises(hc.HostCacheError) if made else pytest.MonkeyPatch.context():
        try:
            resolve_root()
        except hc.CacheNotFound:
            pass
    assert made == [f"/dev/shm/hostcache-{os.geteuid()}"]
    for wrong in ("", b"", 3, "a\0b"):
        with pytest.raises(hc.BadValue, match="root"):
            resolve_root(wrong)  # type: ignore[arg-type]
