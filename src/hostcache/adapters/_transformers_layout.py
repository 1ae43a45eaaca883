"""Where the KV of a model's tokens lies in a page, and how it is copied there and back.

    page   [layers, 2 (keys, values), kv_heads, page_tokens, head_dim], C order, of the model's
           own KV dtype, no padding

Nothing of this is guessed: `learn_layout` runs the model, looks, and tries.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, DynamicLayer

from hostcache.config import whole_number
from hostcache.errors import BadValue, Unsupported

# Integers of each item size: KV is copied as bits, whatever it means.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Relative. A prompt and its beginning alone may differ by rounding, here with TF32's.
_LEAST_ROUNDING = 2e-3


def cache_argument(model: Any) -> str:
    """How this version's `generate` and `forward` call the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class Layout:
    """Where the KV of a model's tokens lies in a page, and how it is copied there and back."""

    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # of each layer

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim)

    @property
    def fragments(self) -> list[int]:
        """Bytes of each K and V of a layer, in order."""
        size = self.kv_heads * self.page_tokens * self.head_dim * self.dtype.itemsize
        return [size] * (2 * self.layers)

    @property
    def page_bytes(self) -> int:
        return sum(self.fragments)

    def _page(self, view: memoryview) -> npt.NDArray[Any]:
        bits = torch.empty(0, dtype=_BITS[self.dtype.itemsize]).numpy().dtype
        return np.frombuffer(view, dtype=bits).reshape(self.shape)

    def _bits(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The same items as integers: the same memory if the tensor is the CPU's, else a copy."""
        return tensor.detach().cpu().view(_BITS[self.dtype.itemsize]).numpy()

    def write(self, kv: Any, places: Sequence[int], views: Sequence[memoryview]) -> None:
        """Copy pages `places` of the tokens in `kv`, a DynamicCache, to `views`: one each.

        No array of a view outlives the call, so that none holds a page beyond its reservation.
        """
        pages = [self._page(view) for view in views]
        size = self.page_tokens
        first = min(places)
        span = slice(first * size, (max(places) + 1) * size)
        for i, layer in enumerate(kv.layers):
            for half, tensor in enumerate((layer.keys, layer.values)):
                tokens = self._bits(tensor[0, :, span])
                for page, place in zip(pages, places, strict=True):
                    start = (place - first) * size
                    np.copyto(page[i, half], tokens[:, start : start + size])

    def read(self, views: Sequence[memoryview], kv: Any) -> None:
        """Append the tokens of `views`, the pages of a prompt from its start, to `kv`, an empty
        DynamicCache.

        The pages are copied twice, into `staging` and by `update` into the layer, so that no
        tensor is ever a view of shared memory.
        """
        pages = [self._page(view) for view in views]
        size = self.page_tokens
        shape = (2, self.kv_heads, size * len(pages), self.head_dim)
        staging = torch.empty(shape, dtype=self.dtype)
        bits = self._bits(staging)
        for i, device in enumerate(self.devices):
            for place, page in enumerate(pages):
                np.copyto(bits[:, :, place * size : (place + 1) * size], page[i])
            keys, values = staging.to(device)
            kv.update(keys[None], values[None], i)


def learn_layout(model: Any, page_tokens: int) -> Layout:
    """Run the model on one page of tokens, see where their KV lies, and write and read it back.

    Raises `Unsupported` for any cache that is not plain full attention, for a model whose KV of a
    token depends on later ones, and if what is read is not what was written.
    """
    _refuse_page_tokens(model, page_tokens)
    kv = _compute(model, page_tokens)
    layers = kv.layers
    expected = layers[0].keys.shape
    for i, layer in enumerate(layers):
        for what, tensor in (("keys", layer.keys), ("values", layer.values)):
            if tensor.shape != expected or tensor.dtype != layers[0].keys.dtype:
                raise Unsupported(
                    f"layer {i} has {what} {tuple(tensor.shape)} of {tensor.dtype}, layer 0 has "
                    f"{tuple(expected)} of {layers[0].keys.dtype}: only equal layers can be cached"
                )
    if len(expected) != 4 or expected[0] != 1 or expected[2] != page_tokens:
        raise Unsupported(f"KV has shape {tuple(expected)}, not (1, heads, {page_tokens}, dim)")
    layout = Layout(
        layers=len(layers),
        kv_heads=expected[1],
        page_tokens=page_tokens,
        head_dim=expected[3],
        dtype=layers[0].keys.dtype,
        devices=tuple(layer.keys.device for layer in layers),
    )
    _refuse_looking_ahead(model, kv, page_tokens)
    _test_write_and_read(model, layout, kv)
    return layout


def _refuse_page_tokens(model: Any, page_tokens: int) -> None:
    if whole_number(page_tokens, "page_tokens") < 1:
        raise BadValue(f"page_tokens is {page_tokens}, a page has 1 token or more")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and page_tokens >= context:
        raise BadValue(
            f"page_tokens is {page_tokens}, but the model's context has {context} tokens: no "
            "prompt would have a full page before its last token"
        )


def _compute(model: Any, count: int) -> Any:
    """A DynamicCache with the KV of `count` tokens."""
    kv = DynamicCache(config=model.config)
    for i, layer in enumerate(kv.layers):
        if type(layer) is not DynamicLayer:
            raise Unsupported(
                f"layer {i} of {type(model).__name__} keeps its KV in a {type(layer).__name__}; "
                "only full attention (DynamicLayer) can be cached by pages"
            )
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(count) * 7 + 11) % vocabulary
    ids = ids if model.device.type == "meta" else ids.to(model.device)  # offloaded: hooks move it
    with torch.no_grad():
        model(ids[None], use_cache=True, **{cache_argument(model): kv})
    for i, layer in enumerate(kv.layers):
        if not layer.is_initialized:
            raise Unsupported(f"layer {i} of {type(model).__name__} keeps no KV of its own")
    if not kv.layers:
        raise Unsupported(f"{type(model).__name__} does not fill a DynamicCache")
    return kv


def _refuse_looking_ahead(model: Any, kv: Any, count: int) -> None:
    """Compare the deepest keys of half the tokens with those of the same tokens in `kv`."""
    half = max(1, count // 2)
    alone = _compute(model, half).layers[-1].keys.float()
    among = kv.layers[-1].keys[:, :, :half].float()
    rounding = max(_LEAST_ROUNDING, torch.finfo(kv.layers[-1].keys.dtype).eps ** 0.5)
    if not bool(torch.linalg.norm(alone - among) <= rounding * torch.linalg.norm(among)):
        raise Unsupported(
            f"{type(model).__name__} computes another KV for the same tokens when others follow, "
            "so a prefix has no KV of its own (bidirectional attention?)"
        )


def _test_write_and_read(model: Any, layout: Layout, kv: Any) -> None:
    """One page of real KV, through private memory: nothing is shared before this is known."""
    page = memoryview(bytearray(layout.page_bytes))
    layout.write(kv, [0], [page])
    again = DynamicCache(config=model.config)
    layout.read([page], again)
    for i, (layer, copied) in enumerate(zip(kv.layers, again.layers, strict=True)):
        for stored, found in ((layer.keys, copied.keys), (layer.values, copied.values)):
            bits = _BITS[layout.dtype.itemsize]
            if not torch.equal(stored.view(bits), found.view(bits)):
                raise Unsupported(
                    f"layer {i} of {type(model).__name__} does not come back from a page as it "
                    f"was written (shape {tuple(stored.shape)}, strides {stored.stride()})"
                )
