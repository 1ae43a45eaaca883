"""Keys: the 32-byte names of what is cached, and the namespace that is mixed into each.

Every process on every machine must find the same key for the same content, and no two contents
may share one. So a key is a whole SHA-256 digest over the encoding below, which is a format: to
change it, raise the number in its first field. Nothing in it follows a process, a clock, the
environment or the type of a container.

    u64(n)     n in 8 bytes, little-endian
    frame(b)   u64(count of bytes in b), then b
    text(s)    frame(s in UTF-8), s as given: case and Unicode form are kept
    H(...)     SHA-256 of the parts one after another

    namespace  H("hostcache/namespace/1\\0", 0x01 text(model), 0x02 text(weights), 0x03 text(dtype),
                 0x04 text(layout), 0x05 text(split), 0x06 text(adapter), 0x07 text(salt))
               All seven are always there; "not given" is the empty text, and None is refused.

    prefix     key[-1] = H("hostcache/prefix/1\\0", namespace, u64(page_tokens))
               key[i]  = H(key[i-1], u64(id) for each token id of page i)
               Only full pages have a key, so each one covers its tokens and all before them.

    content    H("hostcache/content/1\\0", namespace, settings, data)
               settings  u64(count), then for each, in order of their names' UTF-8 bytes:
                         text(name) and "s" text(value), "i" and 8 bytes (two's complement), "f" and
                         8 bytes (IEEE double), both little-endian, or "b" and 0x00 or 0x01;
                         without settings the count is 0
               data      "B" frame(bytes), or "A" frame(kind and item size, as in "f4")
                         u64(dimensions) u64(each) frame(items little-endian, in C order)
"""

from __future__ import annotations

import math
import operator
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NoReturn, Protocol, TypeAlias, TypeGuard, final

import numpy as np
import numpy.typing as npt

from hostcache.errors import BadValue
from hostcache.fingerprint import frame, u64, weights_fingerprint

__all__ = [
    "Namespace",
    "as_key_array",
    "content_key",
    "prefix_keys",
    "weights_fingerprint",
]


class _ArrayLike(Protocol):
    """What NumPy can read as an array; torch tensors are."""

    def __array__(self) -> npt.NDArray[Any]: ...


KeyArray: TypeAlias = npt.NDArray[np.uint8]  # [n, 32], C-contiguous
Keys: TypeAlias = KeyArray | Sequence[bytes]
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any] | _ArrayLike
Setting: TypeAlias = str | int | float | bool

KEY_BYTES = 32
LABEL_BYTES = 56

_TOKEN_ID_MAX = 2**63 - 1
_PAGE_TOKENS_MAX = 2**32 - 1
_FIELDS = ("model", "weights", "dtype", "layout", "split", "adapter", "salt")
_REQUIRED = _FIELDS[:4]
_PLACEHOLDERS = {"auto", "default", "none", "null"}
_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"([a-z][a-z0-9._-]*):([0-9a-f]{32,})")
_DIGEST_DIGITS = {"sha1": 40, "sha256": 64, "sha512": 128}


def _shown(value: object) -> str:
    """`value` for an error message: short, whatever it is."""
    try:
        shown = repr(value)
    except ValueError:  # an int of thousands of digits has none
        shown = f"a huge {type(value).__name__}"
    return shown if len(shown) <= 60 else shown[:57] + "..."


@final
@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What the bytes of a page depend on besides its tokens: all of it is mixed into every key.

    model     what people call it
    weights   a version of their content: a hub commit (40 hex digits), or `<scheme>:<hex digits>`
              such as `sha256:...` from `weights_fingerprint`. Other schemes are for digests that
              one has already, and for weights that training changes in memory (a fresh `uuid:...`
              after each update). 32 digits at least, so that no name or tag (`llama:8b`) passes
    dtype     of the cached numbers, as the engine resolved it
    layout    how they are arranged in a page, with a version
    split     coordinates on every parallel axis, as "tp=1/2"; empty when nothing is split
    adapter   the LoRA or the like, by content as well; empty without one
    salt      keeps tenants apart; shown by no repr and no label

    Placeholders ("auto", "default", "none", "null", None) are refused in each field. Where a
    field comes with a request, its adapter answers `BadValue` by not using the cache.
    """

    model: str
    weights: str
    dtype: str
    layout: str
    split: str = ""
    adapter: str = ""
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _namespace_text(name, getattr(self, name)))
        _check_weights(self.weights)

    @cached_property
    def digest(self) -> bytes:
        """The 32 bytes that stand for this namespace."""
        fields = (getattr(self, name).encode() for name in _FIELDS)
        tagged = (bytes([tag]) + frame(data) for tag, data in enumerate(fields, start=1))
        return sha256(b"hostcache/namespace/1\0" + b"".join(tagged)).digest()

    @property
    def label(self) -> str:
        """Model, dtype and the first digits of the digest: at most 56 bytes of printable ASCII."""
        model, dtype = (re.sub(r"[^!-~]", "?", text) for text in (self.model, self.dtype))
        end = f" {dtype[:15]} {self.digest.hex()[:8]}"
        room = LABEL_BYTES - len(end)
        # The end of a model's name tells more than its beginning.
        return (model if len(model) <= room else ".." + model[2 - room :]) + end


def _namespace_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadValue(f"Namespace.{name} is {type(value).__name__}, it must be text")
    text = str.__str__(value)  # without the type of a subclass, such as an enum's
    word = text.strip().casefold()
    if word in _PLACEHOLDERS:
        raise BadValue(
            f"Namespace.{name} is {text!r}, a placeholder: give the value that the engine resolved"
            + ("" if name in _REQUIRED else ", or leave the field out")
        )
    if not word and name in _REQUIRED:
        raise BadValue(f"Namespace.{name} is empty, it must say what the cached bytes depend on")
    _utf8(f"Namespace.{name}", text)
    return text


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise BadValue(f"{what} is no valid text at position {error.start}") from None


def _check_weights(weights: str) -> None:
    if _HUB_COMMIT.fullmatch(weights):
        return
    digest = _DIGEST.fullmatch(weights)
    if digest is None:
        raise BadValue(
            f"Namespace.weights is {_shown(weights)}, not a version of the content: give "
            "'sha256:<64 hex digits>' as weights_fingerprint(folder) returns it, a hub commit of "
            "40 hex digits, or '<scheme>:<at least 32 hex digits>', in lower case"
        )
    scheme, digits = digest.groups()
    expected = _DIGEST_DIGITS.get(scheme, len(digits))
    if len(digits) != expected:
        raise BadValue(
            f"Namespace.weights has {len(digits)} hex digits after '{scheme}:', "
            f"which has {expected}: give the whole digest"
        )


def _digest_of(namespace: object) -> bytes:
    if not isinstance(namespace, Namespace):
        raise BadValue(f"namespace is {_shown(namespace)}, it must be a hostcache.Namespace")
    return namespace.digest


def _without_torch(data: object) -> object:
    """A torch tensor as a NumPy array, anything else as it is; torch is never imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(data, getattr(torch, "Tensor", ())):
        return data
    try:
        array: object = data.detach().cpu().numpy()  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadValue(f"this torch tensor can not be read as a NumPy array: {error}") from error
    return array


def _plain_array(name: str, data: object) -> npt.NDArray[Any]:
    if isinstance(data, np.ma.MaskedArray):
        raise BadValue(f"{name} is a masked array, whose mask no key covers: fill it first")
    try:
        return np.asarray(data)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadValue(f"{name} can not be read as a NumPy array: {error}") from error


def prefix_keys(token_ids: TokenIds, page_tokens: int, namespace: Namespace) -> KeyArray:
    """One key for each full page of a prompt, as an array [n, 32]; a partial last page has none.

    `token_ids` is any sequence of ints or any one-dimensional integer array, strided or foreign to
    this machine's byte order too: the type never changes a key. Ids are from 0 to 2**63 - 1.
    """
    count = _page_tokens(page_tokens)
    key = sha256(b"hostcache/prefix/1\0" + _digest_of(namespace) + u64(count)).digest()
    tokens = _token_array(token_ids)
    whole = tokens[: len(tokens) // count * count].view(np.uint8).data
    keys = []
    for (page,) in struct.iter_unpack(f"{8 * count}s", whole):
        key = sha256(key + page).digest()
        keys.append(key)
    return _key_array(keys)


def _page_tokens(value: object) -> int:
    if not _is_integer(value) or not 1 <= int(value) <= _PAGE_TOKENS_MAX:
        raise BadValue(
            f"page_tokens is {_shown(value)}, it must be an integer from 1 to {_PAGE_TOKENS_MAX}"
        )
    return int(value)


def _is_integer(value: object) -> TypeGuard[int | np.integer[Any]]:
    return _counts(type(value))


def _counts(kind: type) -> bool:
    """Whether objects of this type are whole numbers; a bool or a duration also derives from it."""
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, (bool, np.timedelta64))


def _token_array(token_ids: object) -> npt.NDArray[np.uint64]:
    """The ids, checked, as contiguous little-endian 64-bit integers."""
    ids = _without_torch(token_ids)
    if hasattr(type(ids), "__array__"):
        array = _plain_array("token_ids", ids)
        if array.ndim != 1:
            raise BadValue(
                f"token_ids has {array.ndim} dimensions (shape {array.shape}) and must have 1: "
                "give one prompt at a time"
            )
        if array.dtype.kind == "O":  # ints that no integer dtype holds arrive like this
            array = _integers(tuple(array))
    elif isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview)):
        array = _integers(tuple(ids))
    else:
        # Of raw bytes nobody can tell whether an id has one byte, or four, or eight.
        raise BadValue(
            f"token_ids is {_shown(ids)} of type {type(ids).__name__}, it must be a sequence of "
            "ints or an integer array (for packed ids: numpy.frombuffer with their dtype)"
        )
    if array.dtype.kind not in "iu":
        _refuse_tokens(array.tolist(), f"dtype {array.dtype}")
    tokens = np.ascontiguousarray(array, dtype="<u8")  # what is negative becomes 2**63 or more
    if tokens.size and int(tokens.max()) > _TOKEN_ID_MAX:
        _refuse_tokens(array.tolist(), "ids out of range")
    return tokens


def _integers(ids: tuple[object, ...]) -> npt.NDArray[np.int64]:
    kinds = set(map(type, ids))
    if not all(map(_counts, kinds)):
        _refuse_tokens(ids, "elements that are no integers")
    exact = ids if kinds <= {int} else tuple(map(operator.index, ids))  # type: ignore[arg-type]
    try:
        return np.array(exact, dtype=np.int64)
    except OverflowError:
        _refuse_tokens(exact, "ids out of range")


def _refuse_tokens(ids: Sequence[object], why: str) -> NoReturn:
    """Raise for the first id that can not be taken; the caller knows that there is one."""
    for position, value in enumerate(ids):
        if not _is_integer(value):
            kind = type(value).__name__
            raise BadValue(f"token_ids[{position}] is {_shown(value)}, {kind} and not an integer")
        if not 0 <= int(value) <= _TOKEN_ID_MAX:
            raise BadValue(
                f"token_ids[{position}] is {_shown(int(value))}, "
                f"a token id is from 0 to {_TOKEN_ID_MAX} (2**63 - 1)"
            )
    raise BadValue(f"token_ids has {why} and no integers: give an integer array")


def content_key(
    data: bytes | bytearray | memoryview | npt.NDArray[Any] | _ArrayLike,
    namespace: Namespace,
    *,
    settings: Mapping[str, Setting] | None = None,
) -> bytes:
    """The key of an image, clip or video: of its bytes, or of an array (NumPy's or torch's).

    Values, dtype and shape of an array count, its strides and byte order do not. An array and its
    bare bytes have different keys. A memoryview counts as bytes where it shows single bytes in one
    dimension, else as the array that it shows. `settings` are the processor's, where they change
    what is computed from the data; without any and empty are the same, 1 and 1.0 and True are not.

    A path or URL is refused: what it names may change while the name stays.
    """
    hashed = sha256(b"hostcache/content/1\0" + _digest_of(namespace) + _settings(settings))
    content = _without_torch(data)
    if isinstance(content, memoryview) and (content.ndim, content.format) == (1, "B"):
        content = content.tobytes()
    if isinstance(content, (bytes, bytearray)):
        hashed.update(b"B" + u64(len(content)))
        hashed.update(content)
    elif isinstance(content, (np.ndarray, memoryview)):
        array = _plain_array("data", content)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise BadValue(
                f"data has dtype {array.dtype}, whose bytes no key covers: "
                "give bytes, or a view of it as integers of the same width"
            )
        items = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        hashed.update(b"A" + frame(f"{array.dtype.kind}{array.dtype.itemsize}".encode()))
        hashed.update(b"".join(map(u64, (array.ndim, *array.shape, array.nbytes))))
        hashed.update(items.reshape(-1).view(np.uint8).data)
    else:
        raise BadValue(
            f"data is {_shown(content)} of type {type(content).__name__}, it must be the content "
            "itself (bytes or an array), never a path or URL, whose content may change"
        )
    return hashed.digest()


def _settings(settings: object) -> bytes:
    if settings is None:
        return u64(0)
    if not isinstance(settings, Mapping):
        raise BadValue(f"settings is {_shown(settings)}, it must map names to values")
    framed = []
    for name, value in settings.items():
        if not isinstance(name, str):
            raise BadValue(f"settings has the name {_shown(name)}, a name must be text")
        framed.append((_utf8("a name in settings", name), _setting(name, value)))
    return u64(len(framed)) + b"".join(frame(name) + value for name, value in sorted(framed))


def _setting(name: str, value: object) -> bytes:
    if isinstance(value, bool):
        return b"b" + bytes([value])
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return b"i" + value.to_bytes(8, "little", signed=True)
    if isinstance(value, float) and not math.isnan(value):  # nan has many encodings
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + frame(_utf8(f"settings[{name!r}]", value))
    raise BadValue(
        f"settings[{name!r}] is {_shown(value)} of type {type(value).__name__}, "
        "it must be text, bool, an int of 64 bits or a float other than nan"
    )


def as_key_array(keys: Keys) -> KeyArray:
    """`keys` as an array [n, 32] of uint8, C-contiguous; copied only if it is not one already.

    Takes such an array or a sequence of 32-byte `bytes`. Nothing is ever cut or padded.
    """
    given: object = keys
    if hasattr(type(given), "__array__"):
        array = _plain_array("keys", given)
        if array.ndim != 2 or array.shape[1] != KEY_BYTES or array.dtype != np.uint8:
            raise BadValue(
                f"keys is an array of {array.dtype} with shape {array.shape}, "
                f"it must be one of uint8 with shape (n, {KEY_BYTES})"
            )
        return np.ascontiguousarray(array)
    if isinstance(given, (bytes, bytearray, memoryview, str)) or not isinstance(given, Sequence):
        raise BadValue(
            f"keys is {_shown(given)} of type {type(given).__name__}, it must be an array [n, "
            f"{KEY_BYTES}] of uint8 or a list of {KEY_BYTES}-byte bytes (one key too: [key])"
        )
    items = tuple(given)
    for position, key in enumerate(items):
        if not isinstance(key, bytes):
            kind = type(key).__name__
            raise BadValue(f"keys[{position}] is {_shown(key)} of type {kind}, it must be bytes")
        if len(key) != KEY_BYTES:
            raise BadValue(f"keys[{position}] has {len(key)} bytes, a key has {KEY_BYTES}")
    return _key_array(items)


def _key_array(keys: Sequence[bytes]) -> KeyArray:
    joined = bytearray().join(keys)  # a bytearray, so that the array may be written
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), KEY_BYTES)
