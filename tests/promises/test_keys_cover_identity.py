"""Whatever the cached bytes depend on is in their key, so no content is found under another's.

A fault here shows as a fluent, wrong answer: pages of other weights, of another tenant, of another
rank, of another prefix. So each test takes two things that differ in one respect and asks for keys
that have nothing in common; and beside it, that the same thing has the same keys.
"""

from __future__ import annotations

import array
import pickle
import sys
from collections import UserList, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostcache as hc
from hostcache.keys import LABEL_BYTES, as_key_array

pytestmark = pytest.mark.portable

PLAIN = hc.Namespace(
    model="smollm2-135m", weights="sha256:" + "a" * 64, dtype="bfloat16", layout="kv-page/1"
)
TOKENS = list(range(1000, 1064))
OTHER = {
    "model": "smollm2-360m",
    "weights": "sha256:" + "a" * 63 + "b",
    "dtype": "float16",
    "layout": "kv-page/2",
    "split": "tp=0/2",
    "adapter": "sha256:" + "c" * 64,
    "salt": "tenant-a",
}

words = st.text(alphabet="\0\x01\x05\x06\x07ab\u00e9", min_size=1, max_size=6)  # framing too
token_lists = st.lists(st.integers(0, 2**63 - 1), max_size=40)


def key_set(
    namespace: hc.Namespace = PLAIN, page_tokens: int = 16, tokens: Any = TOKENS
) -> set[bytes]:
    """All keys that anything has in this namespace: of a prompt's pages, and of a picture."""
    pages = {bytes(key) for key in hc.prefix_keys(tokens, page_tokens, namespace)}
    return pages | {hc.content_key(b"a picture", namespace)}


# --- namespaces


@pytest.mark.parametrize("name", OTHER)
def test_each_field_of_a_namespace_is_in_every_key(name: str) -> None:
    other = replace(PLAIN, **{name: OTHER[name]})
    assert other.digest != PLAIN.digest
    assert key_set(other).isdisjoint(key_set())
    assert key_set(replace(PLAIN)) == key_set()


def test_ranks_tenants_and_adapters_never_share() -> None:
    spaces = [
        replace(PLAIN, split=f"tp={rank}/2,cp={other}/2") for rank in (0, 1) for other in (0, 1)
    ]
    spaces += [replace(PLAIN, salt=salt) for salt in ("", "a", "b", "0", " ", "A", "a ")]
    spaces += [replace(PLAIN, adapter=adapter) for adapter in ("a", "b", "0")]
    every = [key for space in spaces for key in key_set(space)]
    assert len(set(every)) == len(every) == 5 * len(spaces)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"model": "ab", "dtype": "c"}, {"model": "a", "dtype": "bc"}),
        ({"dtype": "ab", "layout": "c"}, {"dtype": "a", "layout": "bc"}),
        ({"layout": "ab", "split": "c"}, {"layout": "a", "split": "bc"}),
        ({"layout": "ab", "split": ""}, {"layout": "a", "split": "b"}),
        ({"split": "x"}, {"adapter": "x"}),
        ({"adapter": "x"}, {"salt": "x"}),
        ({"split": "x", "salt": "y"}, {"split": "xy"}),
        ({"adapter": "a\0", "salt": "b"}, {"adapter": "a", "salt": "\0b"}),
        ({"adapter": "", "salt": "x"}, {"adapter": "\x07\x01" + "\0" * 7 + "x"}),  # looks framed
        ({"split": "\x06", "salt": "x"}, {"adapter": "\x06", "salt": "x"}),  # looks like a tag
        ({"salt": "e\u0301"}, {"salt": "\u00e9"}),  # one letter to the eye, two texts
    ],
)
def test_no_text_moves_from_one_field_to_the_next(one: dict[str, str], two: dict[str, str]) -> None:
    assert key_set(replace(PLAIN, **one)).isdisjoint(key_set(replace(PLAIN, **two)))


@settings(deadline=None, max_examples=50)
@given(st.tuples(words, words, words), st.tuples(words, words, words))
def test_other_fields_have_another_digest(
    one: tuple[str, str, str], two: tuple[str, str, str]
) -> None:
    spaces = [
        replace(PLAIN, split="=" + split, adapter="=" + adapter, salt="=" + salt)
        for split, adapter, salt in (one, two)
    ]
    assert (spaces[0].digest == spaces[1].digest) == (one == two)


def test_a_namespace_is_a_value() -> None:
    same = pickle.loads(pickle.dumps(PLAIN))
    assert (same, hash(same), same.digest) == (PLAIN, hash(PLAIN), PLAIN.digest)
    assert len(PLAIN.digest) == 32
    with pytest.raises(AttributeError):
        PLAIN.salt = "other"  # type: ignore[misc]


def test_a_label_fits_its_place_and_tells_namespaces_apart_without_the_salt() -> None:
    long = replace(PLAIN, model="organisation/" * 9 + "mod\u00e9le one", dtype="d\n" * 40)
    salted = replace(PLAIN, salt="secret-tenant")
    labels = [space.label for space in (PLAIN, long, salted)]
    assert labels[0].startswith("smollm2-135m bfloat16 ")
    assert "organisation/mod?le?one" in labels[1]
    assert all(label.isascii() and label.isprintable() for label in labels)
    assert max(map(len, labels)) == len(labels[1]) == LABEL_BYTES
    assert len(set(labels)) == 3
    assert "secret" not in labels[2] + repr(salted)


# --- prefix keys


@settings(deadline=None, max_examples=50)
@given(token_lists, st.integers(1, 9))
def test_only_full_pages_have_a_key(tokens: list[int], page_tokens: int) -> None:
    keys = hc.prefix_keys(tokens, page_tokens, PLAIN)
    assert keys.shape == (len(tokens) // page_tokens, 32)
    assert keys.dtype == np.uint8
    assert keys.flags.c_contiguous
    assert keys.flags.writeable


@settings(deadline=None, max_examples=50)
@given(token_lists, token_lists, st.integers(1, 5))
def test_keys_agree_as_far_as_the_prompts_do(
    one: list[int], two: list[int], page_tokens: int
) -> None:
    """Also with a beginning in common, which random lists seldom have."""
    for left, right in ((one, two), (one + two, one), (one + two, one + two[::-1])):
        keys = [hc.prefix_keys(ids, page_tokens, PLAIN).tolist() for ids in (left, right)]
        for page in range(min(map(len, keys))):
            end = page_tokens * (page + 1)
            assert (keys[0][page] == keys[1][page]) == (left[:end] == right[:end])


def test_a_page_after_another_prefix_has_another_key() -> None:
    last = list(range(64))
    prompts = ([1] * 64 + last, [2] * 64 + last, last)
    keys = [bytes(key) for ids in prompts for key in hc.prefix_keys(ids, 64, PLAIN)]
    assert len(set(keys)) == len(keys) == 5
    assert len({bytes(key) for key in hc.prefix_keys([7] * 640, 64, PLAIN)}) == 10


def test_the_size_of_a_page_is_in_its_key() -> None:
    """Also where the tokens covered are the same: 64 as one page, as two, as four."""
    every = [bytes(key) for size in (64, 32, 16, 63) for key in hc.prefix_keys(TOKENS, size, PLAIN)]
    assert len(set(every)) == len(every) == 1 + 2 + 4 + 1


def test_every_bit_of_a_token_and_every_bit_of_a_digest_counts() -> None:
    keys = [bytes(hc.prefix_keys([1 << bit], 1, PLAIN)[0]) for bit in range(63)]
    keys += [bytes(key) for key in hc.prefix_keys(range(10_000), 1, PLAIN)]
    for part in (slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)):
        distinct = {key[part] for key in keys}
        assert len(distinct) == len(set(keys)) == 63 + 10_000


def strided(ids: Any) -> Any:
    return np.repeat(np.array(ids, dtype=np.int64), 3)[::3]


def read_only(ids: Any) -> Any:
    frozen = np.array(ids, dtype=np.int64)
    frozen.flags.writeable = False
    return frozen


class Series:
    """An array of another library."""

    def __init__(self, ids: Any) -> None:
        self._ids = ids

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._ids, dtype=dtype)


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "list of NumPy ints": lambda ids: [np.int64(token) for token in ids],
    "mixed list": lambda ids: [np.uint16(ids[0]), *ids[1:]],
    "array.array": lambda ids: array.array("q", ids),
    "array.array, unsigned": lambda ids: array.array("I", ids),
    "objects": lambda ids: np.array(ids, dtype=object),
    "strided": strided,
    "backwards": lambda ids: np.array(ids[::-1])[::-1],
    "read-only": read_only,
    "__array__": Series,
    **{
        f"dtype {code}": partial(np.array, dtype=code)
        for code in ("<i2", "<u2", "<i4", "<u4", "<i8", "<u8", ">i2", ">u4", ">i8", ">u8")
    },
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_container_never_changes_a_key(name: str) -> None:
    ids = [0, 1, 255, 256, 32767, *TOKENS]
    assert (hc.prefix_keys(CONTAINERS[name](ids), 4, PLAIN) == hc.prefix_keys(ids, 4, PLAIN)).all()


def test_ranges_empty_prompts_and_the_largest_id_have_keys_as_lists_do() -> None:
    assert key_set(tokens=range(1000, 1064)) == key_set()
    empties: list[Any] = [[], (), range(0), np.zeros(0, np.int32)]
    for empty in empties:
        assert hc.prefix_keys(empty, 16, PLAIN).shape == (0, 32)
    largest = [2**63 - 1] * 2
    expected = hc.prefix_keys(largest, 2, PLAIN).tolist()
    for dtype in (np.int64, np.uint64, ">u8", object):
        assert hc.prefix_keys(np.array(largest, dtype=dtype), 2, PLAIN).tolist() == expected


@pytest.mark.parametrize("size", [np.int32(16), np.uint64(16)])
def test_the_type_of_page_tokens_does_not_count(size: Any) -> None:
    assert key_set(page_tokens=size) == key_set()


class Tensor:
    """What we use of torch's tensor; like one on a device, it can not be read before `cpu`."""

    def __init__(self, values: Any, *, here: bool = False) -> None:
        self.values, self.here = values, here

    def __array__(self) -> Any:
        raise TypeError("copy the tensor to host memory first")

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return Tensor(self.values, here=True)

    def numpy(self) -> Any:
        if not self.here or self.values.dtype == object:
            raise TypeError("can't convert this tensor to numpy")
        return self.values


def test_torch_tensors_are_read_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = type(sys)("torch")
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert key_set(tokens=Tensor(np.array(TOKENS, np.int32))) == key_set()
    pixels = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert hc.content_key(Tensor(pixels), PLAIN) == hc.content_key(pixels, PLAIN)
    with pytest.raises(hc.BadValue, match="torch tensor"):
        hc.prefix_keys(Tensor(np.array(TOKENS, object)), 16, PLAIN)


def test_tensors_of_the_real_torch_have_the_keys_of_lists() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint64):
        assert key_set(tokens=torch.tensor(TOKENS).to(dtype)) == key_set()
    assert key_set(tokens=torch.tensor(TOKENS).repeat_interleave(2)[::2]) == key_set()
    pixels = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
    assert hc.content_key(pixels, PLAIN) == hc.content_key(pixels.detach().numpy(), PLAIN)
    for refused in (torch.tensor([True]), torch.tensor([1.0]), torch.tensor([1.0]).bfloat16()):
        with pytest.raises(hc.BadValue):
            hc.prefix_keys(refused, 1, PLAIN)
    with pytest.raises(hc.BadValue, match=r"token_ids\[1\] is -3"):
        hc.prefix_keys(torch.tensor([1, -3]), 1, PLAIN)


# --- content keys


def test_equal_bytes_have_one_key_however_they_are_held() -> None:
    data = bytes(range(200))
    expected = hc.content_key(data, PLAIN)
    assert isinstance(expected, bytes)
    assert len(expected) == 32
    doubled = np.repeat(np.frombuffer(data, np.uint8), 2).data
    for same in (bytearray(data), memoryview(data), doubled[::2]):
        assert hc.content_key(same, PLAIN) == expected


def test_equal_arrays_have_one_key_however_they_lie_in_memory() -> None:
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = hc.content_key(pixels, PLAIN)
    wide = np.repeat(pixels, 2, axis=2)
    for same in (
        np.asfortranarray(pixels),
        wide[:, :, ::2],
        pixels.astype(">f4"),
        pixels.data,
        pixels.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    ):
        assert hc.content_key(same, PLAIN) == expected


def test_bytes_shape_and_dtype_all_count() -> None:
    pixels = np.arange(24, dtype=np.uint8)
    contents: list[Any] = [
        pixels.tobytes(),
        pixels,
        pixels.reshape(2, 12),
        pixels.reshape(12, 2),
        pixels.reshape(2, 12).T,
        pixels.reshape(2, 12, 1),
        pixels.view(np.int8),
        pixels.view(np.uint16),
        pixels.view(np.float32),
        pixels.view(np.uint32),
        pixels[:-1],
        pixels.astype(bool),
        np.full((), 7, np.uint8),
        np.full(1, 7, np.uint8),
        b"\7",
        b"",
        np.zeros(0, np.uint8),
        np.zeros((0, 4), np.uint8),
        np.zeros((4, 0), np.uint8),
    ]
    assert len({hc.content_key(content, PLAIN) for content in contents}) == len(contents)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60))
def test_no_bytes_pass_for_an_array_nor_for_a_prompt(data: bytes) -> None:
    pixels = np.frombuffer(data, np.uint8)
    assert hc.content_key(data, PLAIN) != hc.content_key(pixels, PLAIN)
    prompt = hc.prefix_keys(pixels, max(1, len(data)), PLAIN)
    assert hc.content_key(data, PLAIN) not in {bytes(key) for key in prompt}


def test_thousands_of_pictures_have_thousands_of_keys() -> None:
    """And not one of them depends on a few digits of another digest only."""
    keys = [hc.content_key(b"%d" % picture, PLAIN) for picture in range(5_000)]
    assert len({key[:8] for key in keys}) == len({key[-8:] for key in keys}) == 5_000


def test_the_settings_of_the_processor_count() -> None:
    choices: list[Any] = [
        None,
        {"size": 336},
        {"size": 337},
        {"size": 336.0},
        {"size": "336"},
        {"size": True},
        {"size": 1},
        {"size": False},
        {"size": 0},
        {"size": 0.0},
        {"size": -0.0},
        {"size": ""},
        {"size": "None"},
        {"": 336},
        {"siz": "e336"},
        {"size": 336, "crop": 336},
        {"size": "336crop", "a": 1},
        {"a": "b", "c": "d"},
        {"a": "d", "c": "b"},
        {"a": "bcd"},
        {"a": "p\x01\0\0\0\0\0\0\0csq", "c": "r"},  # looks framed
        {"a": "p", "c": "q\x01\0\0\0\0\0\0\0csr"},
    ]
    keys = {hc.content_key(b"a picture", PLAIN, settings=chosen) for chosen in choices}
    assert len(keys) == len(choices)
    assert hc.content_key(b"a picture", PLAIN, settings={}) in keys  # is as without any
    swapped = {"c": "d", "a": "b"}
    assert hc.content_key(b"a picture", PLAIN, settings=swapped) in keys


# --- what takes keys


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_keys_come_through_whole_and_in_order(keys: list[bytes]) -> None:
    taken = as_key_array(keys)
    assert taken.shape == (len(keys), 32)
    assert taken.dtype == np.uint8
    assert taken.flags.c_contiguous
    assert [bytes(key) for key in taken] == keys
    assert as_key_array(taken) is taken
    for sparse in (np.repeat(taken, 2, axis=0)[::2], np.repeat(taken, 2, axis=1)[:, ::2]):
        copied = as_key_array(sparse)
        assert copied.flags.c_contiguous
        assert (copied == taken).all()
    assert [bytes(key) for key in as_key_array(tuple(keys))] == keys
