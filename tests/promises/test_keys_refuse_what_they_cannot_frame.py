"""What has no one meaning gets no key: it is refused, and the error says what, where and what next.

A guess would be worse than an error. A placeholder for two dtypes, a path whose file changes, a
key cut to fit: each ends in bytes served for something else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostcache as hc
from hostcache.keys import as_key_array

pytestmark = pytest.mark.portable

FIELDS = {
    "model": "smollm2-135m",
    "weights": "sha256:" + "a" * 64,
    "dtype": "bfloat16",
    "layout": "kv-page/1",
}
PLAIN = hc.Namespace(**FIELDS)
REQUIRED = tuple(FIELDS)
OPTIONAL = ("split", "adapter", "salt")
KEY = bytes(range(32))


# --- namespaces


@pytest.mark.parametrize("name", REQUIRED + OPTIONAL)
@pytest.mark.parametrize("value", ["auto", "none", "default", "null", "None", "AUTO", " auto\n"])
def test_a_placeholder_is_no_identity(name: str, value: str) -> None:
    with pytest.raises(hc.BadValue, match=f"{name} is .*placeholder"):
        hc.Namespace(**{**FIELDS, name: value})


@pytest.mark.parametrize("name", REQUIRED + OPTIONAL)
@pytest.mark.parametrize("value", [None, b"bytes", 7, 0, (), ("a",), Path("a"), np.float32, False])
def test_a_field_is_text(name: str, value: Any) -> None:
    with pytest.raises(hc.BadValue, match=f"{name} is .*must be text"):
        hc.Namespace(**{**FIELDS, name: value})


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["", " ", "\t\n"])
def test_what_must_be_known_may_not_be_empty(name: str, value: str) -> None:
    with pytest.raises(hc.BadValue, match=f"{name} is empty"):
        hc.Namespace(**{**FIELDS, name: value})


@pytest.mark.parametrize("name", REQUIRED)
def test_what_must_be_known_may_not_be_left_out(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        hc.Namespace(**{field: text for field, text in FIELDS.items() if field != name})


@pytest.mark.parametrize("name", ["model", "salt"])
def test_half_a_surrogate_pair_is_no_text(name: str) -> None:
    with pytest.raises(hc.BadValue, match=f"{name} is no valid text at position 1"):
        hc.Namespace(**{**FIELDS, name: "a\ud800"})


@pytest.mark.parametrize(
    "weights",
    [
        "llama-3-8b",
        "meta-llama/Llama-3-8B",
        "/models/x",
        "C:\\models\\x",
        "https://example.org/x",
        "file:/models/x",
        "llama3.2:8b",
        "main",
        "v1.0",
        "latest",
        "a" * 39,
        "a" * 41,
        "A" * 40,
        "sha256:",
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:" + "A" * 64,
        "sha256:" + "g" * 64,
        "sha256: " + "a" * 64,
        "sha256:" + "a" * 64 + "\n",
        "sha512:" + "a" * 64,
        "sha1:" + "a" * 64,
        "uuid:" + "a" * 31,
        ":" + "a" * 64,
        "a" * 64,
    ],
)
def test_weights_are_a_version_and_no_name(weights: str) -> None:
    with pytest.raises(hc.BadValue, match=r"Namespace\.weights"):
        hc.Namespace(**{**FIELDS, "weights": weights})


@pytest.mark.parametrize(
    "weights",
    [
        "0123456789abcdef" * 2 + "01234567",
        "sha256:" + "0f" * 32,
        "sha1:" + "0f" * 20,
        "sha512:" + "0f" * 64,
        "blake3:" + "0f" * 32,
        "uuid:" + "0f" * 16,
    ],
)
def test_a_version_of_the_content_is_taken(weights: str) -> None:
    assert hc.Namespace(**{**FIELDS, "weights": weights}).weights == weights


@pytest.mark.parametrize("namespace", [None, "", b"", PLAIN.digest, FIELDS])
def test_no_key_is_made_without_a_namespace(namespace: Any) -> None:
    with pytest.raises(hc.BadValue, match=r"must be a hostcache\.Namespace"):
        hc.prefix_keys([1, 2], 1, namespace)
    with pytest.raises(hc.BadValue, match=r"must be a hostcache\.Namespace"):
        hc.content_key(b"a picture", namespace)


def test_a_refusal_is_an_error_of_ours_and_a_value_error() -> None:
    assert issubclass(hc.BadValue, hc.HostCacheError)
    assert issubclass(hc.BadValue, ValueError)


# --- prefix keys

BAD_TOKENS: list[Any] = [
    -1,
    -(2**63),
    -(2**80),
    2**63,
    2**64 - 1,
    2**64,
    2**100,
    1.0,
    0.5,
    True,
    False,
]
BAD_TOKENS += [None, "1", b"1", np.float32(1), np.bool_(True)]
BAD_TOKENS += [np.timedelta64(1, "s"), float("nan"), [1]]


@pytest.mark.parametrize("token", BAD_TOKENS, ids=repr)
def test_the_first_bad_id_is_named_with_its_place(token: Any) -> None:
    expected = rf"token_ids\[3\] is {re.escape(repr(token))}"
    for ids in ([5, 6, 7, token, -9], (5, 6, 7, token), [np.int32(5), 6, 7, token, None]):
        with pytest.raises(hc.BadValue, match=expected):
            hc.prefix_keys(ids, 16, PLAIN)  # also in a last page that gets no key


def test_an_int_of_numpy_in_a_list_is_an_int_like_another() -> None:
    for token in (np.int8(-1), np.uint64(2**63), np.uint64(2**64 - 1)):
        with pytest.raises(hc.BadValue, match=rf"token_ids\[1\] is {int(token)}, a token id is"):
            hc.prefix_keys([1, token], 1, PLAIN)


def test_an_id_too_long_to_print_is_refused_like_another() -> None:
    with pytest.raises(hc.BadValue, match=r"token_ids\[1\] is a huge int"):
        hc.prefix_keys([1, 10**5000], 1, PLAIN)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.array([1, -1, -2], np.int8), r"token_ids\[1\] is -1,"),
        (np.array([1, -(2**31)], ">i4"), r"token_ids\[1\] is -2147483648,"),
        (np.array([0, -1, 0, 0])[::-1], r"token_ids\[2\] is -1,"),
        (np.array([1, 2**63], np.uint64), r"token_ids\[1\] is 9223372036854775808,"),
        (np.array([2**64 - 1], ">u8"), r"token_ids\[0\] is 18446744073709551615,"),
        (np.array([1, 2**64], object), r"token_ids\[1\] is 18446744073709551616,"),
        (np.array([1, None], object), r"token_ids\[1\] is None"),
        (np.array([1.0, 2.0]), r"token_ids\[0\] is 1\.0, float"),
        (np.array([True]), r"token_ids\[0\] is True, bool"),
        (np.array(["1"]), r"token_ids\[0\] is '1', str"),
        (np.array([1], "m8[ns]"), "dtype timedelta64"),
        (np.array([]), "dtype float64"),
        (np.zeros((2, 3), int), r"2 dimensions \(shape \(2, 3\)\)"),
        (np.zeros((1, 0), int), "2 dimensions"),
        (np.array(5), "0 dimensions"),
        (np.int64(5), "0 dimensions"),
        (np.ma.masked_array([1, 2], mask=[False, True]), "masked"),
        (array("d", [1.0]), r"token_ids\[0\] is 1\.0, float"),
        ([[1, 2], [3, 4]], r"token_ids\[0\] is \[1, 2\], list"),
        ("12", "of type str"),
        (b"12", "of type bytes"),
        (bytearray(b"12"), "of type bytearray"),
        (memoryview(b"12"), "of type memoryview"),
        ({1, 2}, "of type set"),
        ({1: 2}, "of type dict"),
        (iter([1]), "of type list_iterator"),
        (5, "of type int"),
        (None, "of type NoneType"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids_is_refused(ids: Any, expected: str) -> None:
    with pytest.raises(hc.BadValue, match=expected):
        hc.prefix_keys(ids, 1, PLAIN)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-(2**64), 2**65), min_size=1, max_size=6), st.booleans())
def test_no_integer_is_wrapped_or_cut(ids: list[int], as_objects: bool) -> None:
    bad = [place for place, token in enumerate(ids) if not 0 <= token < 2**63]
    given_ids: Any = np.array(ids, dtype=object) if as_objects else ids
    if bad:
        with pytest.raises(hc.BadValue, match=rf"token_ids\[{bad[0]}\] is {ids[bad[0]]},"):
            hc.prefix_keys(given_ids, 2, PLAIN)
    else:
        assert len(hc.prefix_keys(given_ids, 2, PLAIN)) == len(ids) // 2


@pytest.mark.parametrize("size", [0, -1, True, np.bool_(True), 1.0, "16", None, 2**32, 2**70])
def test_a_page_has_a_whole_number_of_tokens(size: Any) -> None:
    with pytest.raises(hc.BadValue, match=rf"page_tokens is {re.escape(repr(size))}, .* from 1 to"):
        hc.prefix_keys([1, 2, 3], size, PLAIN)


# --- content keys


@pytest.mark.parametrize(
    "data", ["/tmp/picture.png", "https://example.org/a.png", "", Path("a"), None, 5, [1], object()]
)
def test_a_path_or_url_is_no_content(data: Any) -> None:
    with pytest.raises(hc.BadValue, match="never a path or URL"):
        hc.content_key(data, PLAIN)


def test_new_bytes_under_the_same_path_have_a_new_key(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.png"
    keys = []
    for frame in (b"a dog", b"a cat", b"a dog"):
        path.write_bytes(frame)
        keys.append(hc.content_key(path.read_bytes(), PLAIN))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    "data",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.zeros(2, [("a", "u1"), ("b", "f8")]),
        np.zeros(2, "V4"),
        np.zeros(2, np.longdouble),  # has bytes that nobody sets
        np.zeros(2, np.complex64),
        np.ma.masked_array([1, 2], mask=[False, True]),
    ],
    ids=lambda data: str(data.dtype),
)
def test_an_array_of_other_than_numbers_has_no_key(data: Any) -> None:
    with pytest.raises(hc.BadValue, match=r"no key covers"):
        hc.content_key(data, PLAIN)


@pytest.mark.parametrize(
    "chosen",
    [
        "size",
        [("size", 336)],
        {1: 336},
        {None: 336},
        {"size": None},
        {"size": float("nan")},
        {"size": (336, 336)},
        {"size": {}},
        {"size": b"336"},
        {"size": 2**63},
        {"size": -(2**63) - 1},
        {"size": 10**5000},
        {"size": "\ud800"},
        {"\ud800": 1},
    ],
)
def test_settings_are_names_and_plain_values(chosen: Any) -> None:
    with pytest.raises(hc.BadValue, match="settings"):
        hc.content_key(b"a picture", PLAIN, settings=chosen)


# --- what takes keys


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([KEY, KEY[:31]], r"keys\[1\] has 31 bytes, a key has 32"),
        ([KEY + b"\0"], r"keys\[0\] has 33 bytes, a key has 32"),
        ([b""], r"keys\[0\] has 0 bytes, a key has 32"),
        ([KEY[:16], KEY + KEY[:16]], r"keys\[0\] has 16 bytes"),  # 64 bytes in all
        ([KEY, "a" * 32], r"keys\[1\] is .* of type str"),
        ([KEY, None], r"keys\[1\] is None"),
        ([bytearray(KEY)], "of type bytearray"),
        ([np.frombuffer(KEY, np.uint8)], "of type ndarray"),
        ([list(KEY)], "of type list"),
        (KEY, r"of type bytes.*\[key\]"),
        (KEY * 2, "of type bytes"),
        ("a" * 32, "of type str"),
        (bytearray(KEY), "of type bytearray"),
        (memoryview(KEY), "of type memoryview"),
        ({KEY}, "of type set"),
        (iter([KEY]), "of type list_iterator"),
        (None, "of type NoneType"),
        (np.zeros((2, 31), np.uint8), r"shape \(2, 31\).*\(n, 32\)"),
        (np.zeros((2, 33), np.uint8), r"shape \(2, 33\).*\(n, 32\)"),
        (np.zeros(32, np.uint8), r"shape \(32,\).*\(n, 32\)"),
        (np.zeros((1, 2, 32), np.uint8), r"shape \(1, 2, 32\)"),
        (np.zeros((2, 32), np.int8), "array of int8.*uint8"),
        (np.zeros((2, 32), np.int64), "array of int64.*uint8"),
        (np.zeros((2, 32), bool), "array of bool.*uint8"),
        (np.zeros((2, 4), np.uint64), "array of uint64.*uint8"),
        (np.zeros(0), r"shape \(0,\)"),
        (np.ma.masked_array(np.zeros((1, 32), np.uint8)), "masked"),
    ],
)
def test_a_key_is_never_cut_or_padded(keys: Any, expected: str) -> None:
    with pytest.raises(hc.BadValue, match=expected):
        as_key_array(keys)


# --- the fingerprint of weights


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(hc.BadValue, match="none of its 0 counted files is a weight file"):
        hc.weights_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("weights come later")
    with pytest.raises(hc.BadValue, match="none of its 1 counted files is a weight file"):
        hc.weights_fingerprint(tmp_path)


def test_what_can_not_be_read_has_no_fingerprint(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with pytest.raises(hc.BadValue, match="No such file or directory"):
        hc.weights_fingerprint(tmp_path / "absent")
    for nothing in (None, 5, "", "a\0b"):
        with pytest.raises(hc.BadValue, match="have no fingerprint"):
            hc.weights_fingerprint(nothing)  # type: ignore[arg-type]
    weights.symlink_to(tmp_path / "a blob that is gone")
    with pytest.raises(hc.BadValue, match=r"No such file or directory: .*model\.safetensors"):
        hc.weights_fingerprint(tmp_path)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(hc.BadValue, match=r"model\.safetensors is not a regular file"):
        hc.weights_fingerprint(tmp_path)
    weights.unlink()
    weights.write_bytes(b"weights")
    with pytest.raises(hc.BadValue, match="Not a directory"):
        hc.weights_fingerprint(weights)


ASK_AS_SOMEBODY_ELSE = """
import os, sys
import hostcache as hc
os.chdir(sys.argv[1])
os.chmod(sys.argv[2], 0)
if os.geteuid() == 0:
    os.setuid(65534)
try:
    print(hc.weights_fingerprint("."))
except hc.BadValue as error:
    print(error)
"""


@pytest.mark.parametrize("locked", ["model.safetensors", "more", "."])
def test_what_is_locked_has_no_fingerprint(tmp_path: Path, locked: str) -> None:
    """To root nothing is locked, so a process that is nobody asks."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "more.safetensors").write_bytes(b"weights")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    try:
        printed = subprocess.run(
            [sys.executable, "-c", ASK_AS_SOMEBODY_ELSE, str(tmp_path), locked],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=100,
        ).stdout
    finally:
        (tmp_path / locked).chmod(0o700)
    assert "have no fingerprint" in printed
    assert "Permission denied" in printed
