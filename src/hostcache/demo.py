"""`hostcache demo`: a real model stays warm after `kill -9`.

    A   a process answers a question about a long document: cold. It is killed with SIGKILL
    B   a new process answers another question about the same document: warm
    C   that second question again, in a process without the cache

Each time to first token runs from the call of `generate` until the first new token is chosen: the
cache's lookup and copies are in it, loading the model and opening the cache are not. Answers are
greedy, in float32, and have 32 tokens.

    python -m hostcache.demo --prepare     only convert the model, where that is not done yet
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hostcache.config import format_bytes
from hostcache.demo_model import ENVIRONMENT, model_folder, prepare, progress, say
from hostcache.demo_text import QUESTIONS
from hostcache.errors import HostCacheError, NoRoom
from hostcache.kv import KvCache
from hostcache.pages import PageFormat

CACHE = "demo"
PAGE_TOKENS = 64
SHARED_BYTES = 500_000_000  # of pages; with its table the cache stays below 512 MB
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64  # of SmolLM2-135M
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4  # 46,080 bytes of KV a token in float32


def run_demo(as_json: bool, root: str | None) -> int:
    """Run the demo and print what came out; the exit status, 0."""
    say(f"The demo keeps about {SHARED_BYTES // 10**6} MB of shared memory in its cache '{CACHE}'.")
    model_folder()  # says so at once if the model is not installed
    empty_cache(root)
    job = {"model": str(prepare()), "page_tokens": PAGE_TOKENS, "capacity_bytes": SHARED_BYTES}
    cached = job | {"cache": CACHE, "root": root}
    with tempfile.TemporaryDirectory(prefix="hostcache-demo-") as folder:
        with progress(f"A reads the document, cold, and answers: {QUESTIONS[0]}"):
            cold = _answer(cached | {"question": 0, "stay": True}, Path(folder, "a.npy"))
        say(f"A stored {cold['stored_pages']} pages, answered, and was killed with SIGKILL")
        with progress(f"B, a new process, is warm; it answers: {QUESTIONS[1]}"):
            warm = _answer(cached | {"question": 1, "stay": False}, Path(folder, "b.npy"))
        with progress("C answers the same without the cache"):
            plain = _answer(
                job | {"question": 1, "cache": "", "stay": False}, Path(folder, "c.npy")
            )
        figures = compare(cold, warm, plain)
    print(json.dumps(figures, indent=2) if as_json else as_text(figures), flush=True)
    return 0


def page_format() -> PageFormat:
    """The pages of the model as its adapter makes them."""
    fragment = TOKEN_BYTES // (2 * LAYERS) * PAGE_TOKENS
    return PageFormat(TOKEN_BYTES * PAGE_TOKENS, PAGE_TOKENS, [fragment] * (2 * LAYERS))


def empty_cache(root: str | None) -> None:
    """Make the cache, or clear the one that an earlier run left. Too little room is told here."""
    pages = page_format()
    needed = SHARED_BYTES // pages.page_bytes
    with KvCache.open(CACHE, pages, capacity=SHARED_BYTES, root=root) as cache:
        cache.clear(everything=True)
        if cache.page_count < needed:
            raise NoRoom(
                f"the cache '{CACHE}' that is there has {cache.page_count} pages, the demo needs "
                f"{needed} ({format_bytes(SHARED_BYTES)}); remove it: hostcache rm {CACHE}"
            )


def _answer(job: dict[str, Any], scores: Path) -> dict[str, Any]:
    """What a fresh process says to `job`, with its logits; one that stays is killed then."""
    errors = scores.with_suffix(".stderr")
    with _start(job | {"scores": str(scores)}, errors) as child:
        try:
            facts = _last_line(child)
        except BaseException:
            child.kill()
            raise
        if job["stay"]:
            child.send_signal(signal.SIGKILL)
        status = child.wait()
    if "tokens" not in facts or status != (-signal.SIGKILL if job["stay"] else 0):
        last = " / ".join(errors.read_text(errors="replace").splitlines()[-5:])
        raise HostCacheError(f"a process of the demo ended with status {status}: {last}")
    if facts["trouble"]:
        raise HostCacheError(f"a process of the demo ran without its cache: {facts['trouble']}")
    return facts | {"logits": np.load(scores)}


def _start(job: dict[str, Any], errors: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hostcache.demo_child", json.dumps(job)]
    environment = {**os.environ, **ENVIRONMENT}
    pipe = subprocess.PIPE
    with errors.open("wb") as stderr:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment)


def _last_line(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the child says of its answer, or its last word if it ends before."""
    facts: dict[str, Any] = {}
    assert child.stdout is not None
    for line in child.stdout:
        facts = json.loads(line)
        if facts["stage"] == "answered":
            break
    return facts


def compare(cold: dict[str, Any], warm: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The demo's figures: times in seconds, logits as the model gave them.

    `max_logit_difference` is over the steps where both had the same tokens before;
    `smallest_margin` is the least gap between the two best logits of the answer without cache, and
    `margin_at_difference` that gap where the answers first differ.
    """
    pairs = zip(warm["tokens"], plain["tokens"], strict=True)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    same = slice(0, len(plain["tokens"]) if first is None else first + 1)
    ours, theirs = warm["logits"][same], plain["logits"][same]
    finite = np.isfinite(ours) & np.isfinite(theirs)  # an end of the answer that is not allowed yet
    best = np.sort(plain["logits"], axis=1)[:, -2:]
    margins = best[:, 1] - best[:, 0]
    return {
        "cold_s": cold["first_token_s"],
        "warm_s": warm["first_token_s"],
        "uncached_s": plain["first_token_s"],
        "prompt_tokens": warm["prompt_tokens"],
        "reused_tokens": warm["reused_tokens"],
        "identical": first is None,
        "first_difference": first,
        "margin_at_difference": None if first is None else float(margins[first]),
        "max_logit_difference": float(np.abs(ours[finite] - theirs[finite]).max()),
        "smallest_margin": float(margins.min()),
        "answer_tokens": len(plain["tokens"]),
        "cold_answer": cold["answer"],
        "warm_answer": warm["answer"],
        "uncached_answer": plain["answer"],
    }


def as_text(figures: dict[str, Any]) -> str:
    """The same for people."""
    sooner = figures["cold_s"] / figures["warm_s"]
    if figures["identical"]:
        verdict = "yes"
    else:
        verdict = (
            f"no: they differ from token {figures['first_difference']} on, where the two best "
            f"logits are {figures['margin_at_difference']:.2g} apart"
        )
    return f"""\

time to first token (from the call of generate, copies from the cache included)
  A  cold, then killed      {figures["cold_s"]:8.2f} s
  B  warm, a new process    {figures["warm_s"]:8.2f} s   {sooner:.0f} times sooner
  C  without the cache      {figures["uncached_s"]:8.2f} s
reused: {figures["reused_tokens"]} of {figures["prompt_tokens"]} prompt tokens

A  {QUESTIONS[0]}
   {_line(figures["cold_answer"])}
B  {QUESTIONS[1]}
   {_line(figures["warm_answer"])}
C  {_line(figures["uncached_answer"])}

identical: {verdict} ({figures["answer_tokens"]} tokens of B and C)
logits differ by {figures["max_logit_difference"]:.1e} at most; the closest choice among the tokens
of C was by {figures["smallest_margin"]:.1e}

The cache is still there: hostcache ls; hostcache stat {CACHE}; hostcache check {CACHE}"""


def _line(answer: str) -> str:
    return " ".join(answer.split())


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m hostcache.demo`; `hostcache demo` comes in by `run_demo`."""
    parser = argparse.ArgumentParser(
        "python -m hostcache.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--prepare", action="store_true", help="only convert the model, once")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--root", help="the folder of the caches")
    options = parser.parse_args(arguments)
    try:
        if options.prepare:
            say(f"the demo's model is in {prepare()}")
            return 0
        return run_demo(options.json, options.root)
    except HostCacheError as error:
        print(f"hostcache: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
