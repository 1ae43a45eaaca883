"""The fingerprint of weights, and the framing that everything we hash has.

Two lists of fields may never give the same bytes, so each field carries its length. This is a
format: to change it, raise the number in its first field.

    u64(n)     n in 8 bytes, little-endian
    frame(b)   u64(count of bytes in b), then b
    H(...)     SHA-256 of the parts one after another

    weights    "sha256:" and the hex of H("hostcache/weights/1\\0", for each file in order of the
               bytes of its relative name: frame(name) u64(size) H(what is read of it))
               A file up to 64 MiB is read whole. Of a larger one are read: its first MiB, 4 KiB at
               each multiple of 4 MiB up to its last MiB, and its last MiB.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from hashlib import sha256

from hostcache.errors import BadValue

_MIB = 1 << 20
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".gguf", ".ggml", ".pt", ".pth", ".ckpt"),
    *(".npz", ".npy", ".onnx", ".h5", ".msgpack"),
)
_CONFIG_SUFFIXES = (".json", ".py", ".yaml", ".yml")
# These decide what is asked and how an answer is picked from the logits; never what a token id
# computes. A fixed chat template must not cost the cache.
_NOT_COMPUTATION = {
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"),
}


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def frame(data: bytes) -> bytes:
    return u64(len(data)) + data


def weights_fingerprint(folder: str | os.PathLike[str]) -> str:
    """A version of the weights in `folder` for `Namespace.weights`: "sha256:..." of its files.

    Counted, in subfolders too, are the weights, and what decides how they are used: all .json,
    .yaml and .py but the tokenizer's and the generation defaults. Names with a leading dot are
    not. Moving or touching the folder changes nothing: only names, sizes and contents do.

    A file above 64 MiB is sampled (the module's docstring says where), which misses no change
    that covers 4 MiB in a row, as a new training run or quantisation does, but can miss an edit
    of a few values. Where that happens, give `Namespace` a digest of your own or a hub commit.
    """
    try:
        root = os.fsdecode(folder)
        names = _counted_files(root)
        hashed = sha256(b"hostcache/weights/1\0")
        for name in names:
            hashed.update(frame(os.fsencode(name)) + _size_and_digest(os.path.join(root, name)))
    except (OSError, TypeError, ValueError) as error:
        raise BadValue(f"the weights in {folder!r} have no fingerprint: {error}") from error
    if not any(name.lower().endswith(_WEIGHT_SUFFIXES) for name in names):
        raise BadValue(
            f"the weights in {folder!r} have no fingerprint: none of its {len(names)} "
            f"counted files is a weight file ({', '.join(_WEIGHT_SUFFIXES)})"
        )
    return "sha256:" + hashed.hexdigest()


def _counted_files(root: str) -> list[str]:
    """Relative names of the files that decide what is computed, in order of their bytes."""

    def refuse(error: OSError) -> None:
        raise error

    names = []
    seen = set()
    for where, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:  # links may lead in a circle
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [
            os.path.relpath(os.path.join(where, name), root)
            for name in files
            if name.lower().endswith(_WEIGHT_SUFFIXES + _CONFIG_SUFFIXES)
            and not name.startswith(".")
            and name not in _NOT_COMPUTATION
        ]
    return sorted(names, key=os.fsencode)


def _size_and_digest(path: str) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        hashed = sha256()
        for start, count in _pieces(size):
            file.seek(start)
            data = file.read(count)
            if len(data) != count:
                raise ValueError(f"{path} was cut from {size} bytes while it was read")
            hashed.update(data)
    return u64(size) + hashed.digest()


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Position and count of what is read of a file of `size` bytes."""
    if size <= 64 * _MIB:
        yield from ((start, min(_MIB, size - start)) for start in range(0, size, _MIB))
        return
    yield 0, _MIB
    yield from ((start, 4096) for start in range(4 * _MIB, size - _MIB, 4 * _MIB))
    yield size - _MIB, _MIB
