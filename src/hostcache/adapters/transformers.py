"""hostcache for transformers 5: `generate` that reuses the prefixes which any process computed.

    from hostcache.adapters.transformers import CachedModel

    model = AutoModelForCausalLM.from_pretrained(folder)
    with CachedModel(model, "chat", capacity="4GiB") as cached:
        output = cached.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)
        print(cached.last.reused_tokens, "of", cached.last.prompt_tokens)

A prompt is looked up page by page. The pages that are ready are copied into the model's own
DynamicCache, the rest is computed, and what is new is stored: the prompt's full pages as soon as
its second new token is there, those with answer tokens at the end. The last token of a prompt is
always computed.

Served are causal models whose every layer keeps a plain full-attention KV, one prompt a call,
greedy or sampled. All else is refused with `Unsupported` before anything is stored. Trouble with
the cache is never the caller's: what can not be had from it is computed, and `last.trouble` says
so.

Weights are known by a hub commit or their files, and by a sample of the loaded values. Training
the model while it is wrapped is not seen: make a new CachedModel with another `weights`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from hostcache.adapters._transformers_layout import Layout, cache_argument, learn_layout
from hostcache.adapters._transformers_model import (
    namespace_of,
    refuse_call,
    refuse_model,
    setting,
)
from hostcache.errors import BadValue, FormatMismatch, HostCacheError
from hostcache.keys import KeyArray, Namespace, prefix_keys
from hostcache.kv import KvCache
from hostcache.pages import PageFormat

__all__ = ["CachedModel", "Call", "FirstToken"]

_log = logging.getLogger("hostcache")


@dataclass(frozen=True)
class Call:
    """What one `generate` did.

    prompt_tokens   tokens of the prompt
    reused_tokens   of these, read from the cache
    stored_tokens   of prompt and answer, stored by this call, in `stored_pages` pages
    first_token_s   from the call to `generate` until the first new token was chosen: lookup and
                    copy included, storing not. None if there was none
    trouble         why the cache gave or took less than it could have; empty: nothing
    """

    prompt_tokens: int
    reused_tokens: int
    stored_tokens: int
    stored_pages: int
    first_token_s: float | None
    trouble: str


class FirstToken(StoppingCriteria):
    """Stops nothing: measures when the first new token is there. For one `generate`.

    `generate` asks its criteria once a token, after choosing it and before it is streamed.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.tokens = 0
        self.seconds: float | None = None

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        self.tokens += 1
        if self.seconds is None:
            input_ids[0, -1].item()  # waits for the device
            self.seconds = time.perf_counter() - self.begun
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class CachedModel:
    """A causal language model of transformers whose `generate` goes through a cache.

    model        an AutoModelForCausalLM in eval mode, on any device
    cache        a name, opened (made if need be) with the arguments below, or a `KvCache` with
                 pages of this model, which stays the caller's to close
    page_tokens  tokens of a page: what is reused are whole pages
    capacity     of a cache that is made, in bytes or as "4GiB"
    root         the folder of the caches
    weights      a version of the weights for `Namespace.weights`; by default the recorded hub
                 commit, else the fingerprint of the folder that the model was loaded from
    salt         keeps tenants apart: only calls with the same salt share pages

    Raises `Unsupported` for a model that can not be served, `BadValue` for a wrong argument and
    `FormatMismatch` for a given `KvCache` of other pages. If a named cache can not be opened
    (no room, another format, damage), the model runs without one: that is logged, `cache` is
    None and `trouble` says why.
    """

    def __init__(
        self,
        model: Any,
        cache: str | KvCache,
        *,
        page_tokens: int = 64,
        capacity: int | str = "1GiB",
        root: str | os.PathLike[str] | None = None,
        weights: str | None = None,
        salt: str = "",
    ) -> None:
        if not isinstance(cache, (str, KvCache)):
            raise BadValue(f"cache is {cache!r}, it must be a name or a hostcache.KvCache")
        refuse_model(model)
        self.model = model
        self.layout: Layout = learn_layout(model, page_tokens)
        self.namespace: Namespace = namespace_of(model, self.layout, weights, salt)
        self.page_format = PageFormat(self.layout.page_bytes, page_tokens, self.layout.fragments)
        self.last: Call | None = None
        self.trouble = ""
        self._cache_argument = cache_argument(model)
        self._owned = isinstance(cache, str)
        self.cache = self._open(cache, capacity, root) if isinstance(cache, str) else cache
        if self.cache is not None and self.cache.format != self.page_format:
            given, needed = self.cache.format, self.page_format
            raise FormatMismatch(
                f"cache {self.cache.name!r} has pages of {given.page_bytes} bytes, "
                f"{given.page_tokens} tokens and {len(given.fragments)} fragments; the model needs "
                f"{needed.page_bytes}, {needed.page_tokens} and {len(needed.fragments)}: "
                "open another name, by CachedModel(model, name)"
            )

    def _open(
        self, name: str, capacity: int | str, root: str | os.PathLike[str] | None
    ) -> KvCache | None:
        try:
            return KvCache.open(
                name, self.page_format, capacity=capacity, namespace=self.namespace, root=root
            )
        except BadValue:
            raise
        except HostCacheError as error:
            self.trouble = f"{error.code}: {error}"
            _log.warning("%s runs without cache %r: %s", type(self.model).__name__, name, error)
            return None

    def generate(self, input_ids: Any, *, attention_mask: Any = None, **options: Any) -> Any:
        """`model.generate`, with the prompt's prefix from the cache; see there for `options`.

        input_ids: int64 tensor [1, n]. attention_mask: ones of the same shape, or None. Returns
        what `model.generate` returns. `last` tells what the cache did for it.

        Raises `Unsupported` for what can change the KV of a prompt or needs more than its new
        tokens: batches, padding, beams, assisted decoding, other caches, embeddings, images,
        positions, attention or hidden states as output.
        """
        run = _Run(self, input_ids)
        refuse_call(self.model, input_ids, attention_mask, options)
        options["stopping_criteria"] = StoppingCriteriaList(
            [*(options.get("stopping_criteria") or ()), run]
        )
        if setting(self.model, options, "cache_implementation") is not None:
            options["cache_implementation"] = None  # "dynamic", which is what we pass
        kv = run.load()
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            **{self._cache_argument: kv},
            **options,
        )
        run.store(output if isinstance(output, torch.Tensor) else output.sequences)
        self.last = run.record()
        return output

    def close(self) -> None:
        """Close the cache if this object opened it. The model goes on without; again: nothing."""
        if self._owned and self.cache is not None:
            self.cache.close()
        self.cache = None

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Run(FirstToken):
    """One `generate`: what was reused, and when which pages are stored.

    It is passed as a stopping criterion, which is how `generate` tells that a token is there. The
    prompt is stored at the second, so that a first token that is streamed waits for no copy.
    """

    def __init__(self, owner: CachedModel, input_ids: Any) -> None:
        super().__init__()
        self.owner = owner
        self.cache = owner.cache
        self.layout = owner.layout
        self.input_ids = input_ids
        self.kv: Any = None
        self.epoch: int | None = None
        self.reused_pages = 0
        self.stored_pages = 0
        self.seen_pages = 0  # offered to the cache already
        self.trouble = owner.trouble

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        stop = super().__call__(input_ids, _scores)
        if self.tokens == 2:
            self.store(self.input_ids)
        return stop

    def load(self) -> Any:
        """A DynamicCache with the longest prefix that the cache has: pages before the last token.

        What is given is a whole number of pages, also where the cache fails half way.
        """
        keys = self._keys(self.input_ids)
        usable = keys[: (self.input_ids.shape[1] - 1) // self.layout.page_tokens]
        with self._degrading("read"):
            self.kv = self._read(usable)
        if self.kv is None:
            self.kv, self.reused_pages = self._empty(), 0
        return self.kv

    def _read(self, keys: KeyArray) -> Any:
        kv = self._empty()
        if self.cache is None:
            return kv
        # Of before the lookup: what is computed from here on is void if the cache is cleared.
        self.epoch = self.cache.epoch
        with self.cache.lookup(keys) as lease:
            views = []
            with self._degrading("read"):
                for i in range(len(lease)):
                    views.append(lease.view(i))  # noqa: PERF401 (keep those before a failure)
            if views:
                self.layout.read(views, kv)
            self.reused_pages = len(views)
            views.clear()  # a view would hold its page beyond the lease
        return kv

    def store(self, tokens: torch.Tensor) -> None:
        """Store the full pages of `tokens` [1, n] whose KV is there and which the cache lacks.

        The whole prompt is reserved, so that its beginning comes back where it was evicted
        meanwhile, and pages are linked whatever happened since the lookup.
        """
        if self.cache is None or self.epoch is None:
            return
        computed = min(self.kv.get_seq_length(), tokens.shape[1])
        count = computed // self.layout.page_tokens
        if count <= self.seen_pages:
            return
        self.seen_pages = count
        with self._degrading("store"):
            self._write(self.cache, self._keys(tokens[:, : count * self.layout.page_tokens]))

    def _write(self, cache: KvCache, keys: KeyArray) -> None:
        with cache.reserve(keys, epoch=self.epoch) as pages:
            if pages.refused:
                self.trouble = (
                    f"store: {len(pages.refused)} of {len(keys)} pages were refused: "
                    "all others are in use, or the cache was cleared meanwhile"
                )
            if not len(pages):
                return
            place_of = {key.tobytes(): place for place, key in enumerate(keys)}
            places = [place_of[key.tobytes()] for key in pages.keys]
            self.layout.write(self.kv, places, [pages.view(i) for i in range(len(pages))])
            self.stored_pages += pages.commit()

    def record(self) -> Call:
        size = self.layout.page_tokens
        return Call(
            prompt_tokens=self.input_ids.shape[1],
            reused_tokens=self.reused_pages * size,
            stored_tokens=self.stored_pages * size,
            stored_pages=self.stored_pages,
            first_token_s=self.seconds,
            trouble=self.trouble,
        )

    def _keys(self, tokens: torch.Tensor) -> KeyArray:
        return prefix_keys(tokens[0], self.layout.page_tokens, self.owner.namespace)

    def _empty(self) -> Any:
        return DynamicCache(config=self.owner.model.config)

    @contextmanager
    def _degrading(self, doing: str) -> Iterator[None]:
        """The cache's trouble costs reuse, never the answer."""
        try:
            yield
        except (HostCacheError, OSError, MemoryError) as error:
            self.trouble = f"{doing}: {error}"
            _log.warning("generate goes on without the cache: %s", self.trouble)
