"""The DynamicCache that the transformers adapter gives to `generate`: the same, without copying
all tokens for each new one.

    room     [1, kv_heads, capacity, head_dim], one for keys and one for values of each layer
             |-- tokens that are there: what `keys` and `values` show --|-- free --|
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, DynamicLayer

# Tokens: what a layer that must grow gets beyond them, at least.
_SPARE = 64


class GrowingLayer(DynamicLayer):
    """A layer whose new tokens are written behind those that are there.

    `keys` and `values` are views of the front of a larger tensor each, and those that were given
    out before stay right: an update writes behind them. What `crop` cut off is written over. Where
    they were replaced by other tensors (`reorder_cache` does), the next update moves to new room.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[torch.Tensor | None] = [None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the KV of new tokens, [1, kv_heads, n, head_dim]; returns that of all."""
        if not self.is_initialized:
            self._begin(key_states)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def fill(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        """Take two rooms whose first `tokens` tokens are there, instead of what was."""
        self._begin(keys)
        self._rooms = [keys, values]
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def _begin(self, states: torch.Tensor) -> None:
        """What `lazy_initialization` sets; its arguments differ between versions."""
        self.dtype, self.device = states.dtype, states.device
        self.is_initialized = True
        self._rooms = [None, None]

    def _append(self, half: int, held: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        count = 0 if held is None else held.shape[-2]
        total = count + states.shape[-2]
        room = self._rooms[half]
        front = held is None or (room is not None and _is_front(held, room))
        if room is None or not front or room.shape[-2] < total:
            capacity = total + max(_SPARE, total // 8)
            room = states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))
            if held is not None:
                room[..., :count, :] = held
            self._rooms[half] = room
        room[..., count:total, :] = states
        return room[..., :total, :]


def _is_front(held: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether `held` still is what `update` or `fill` made of this room."""
    return held.data_ptr() == room.data_ptr() and held.stride() == room.stride()


def new_kv(model: Any) -> Any:
    """An empty DynamicCache of the model, whose layers were found to be plain DynamicLayers."""
    kv = DynamicCache(config=model.config)
    kv.layers = [GrowingLayer() for _ in kv.layers]
    return kv
