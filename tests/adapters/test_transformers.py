"""The transformers adapter, on tiny models with random weights: what it reuses, what it stores,
what it refuses, and that the cache's trouble is never the caller's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hostcache as hc

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hostcache.adapters import _transformers_layout as described  # noqa: E402
from hostcache.adapters.transformers import CachedModel, Call  # noqa: E402

PAGE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are faster so, and their rounding does not follow the machine's load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture
def cached(model: Any, root: str) -> Iterator[CachedModel]:
    with wrap(model, root) as one:
        yield one


def load(folder: Path, dtype: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)


def wrap(model: Any, root: str, pages: int = 64, name: str = "llama", **more: Any) -> CachedModel:
    page_bytes = 2 * 2 * 2 * PAGE * 8 * model.dtype.itemsize
    return CachedModel(
        model, name, page_tokens=PAGE, capacity=pages * page_bytes, root=root, **more
    )


def prompt(length: int, seed: int = 0) -> Any:
    """Token ids [1, length], none of them special."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 128, (1, length)))


def plain(model: Any, ids: Any, new: int = 8) -> list[int]:
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    tokens: list[int] = output[0].tolist()
    return tokens


def answer(cached: CachedModel, ids: Any, new: int = 8, **more: Any) -> tuple[list[int], Call]:
    output = cached.generate(ids, max_new_tokens=new, do_sample=False, **more)
    assert cached.last is not None
    return output[0].tolist(), cached.last


def kv_of(output: Any) -> Any:
    """The DynamicCache that `generate` returns, by its name in this version."""
    return output.cache if "cache" in output else output.past_key_values


def kv_bits(kv: Any, tokens: int) -> list[Any]:
    """Bits of the first `tokens` of every K and V, for comparing."""
    bits = {2: torch.int16, 4: torch.int32}[kv.layers[0].keys.dtype.itemsize]
    halves = [half for layer in kv.layers for half in (layer.keys, layer.values)]
    return [half[:, :, :tokens].contiguous().view(bits) for half in halves]


def nothing_is_stored_or_held(cached: CachedModel) -> bool:
    assert cached.cache is not None
    stats = cached.cache.stats()
    return stats.ready == stats.reserved == stats.commits == 0


# ------------------------------------------------------------------ what is reused and stored


def test_a_second_prompt_is_warm_and_its_answer_the_same(cached: CachedModel) -> None:
    ids = prompt(100)
    expected = plain(cached.model, ids)
    cold, first = answer(cached, ids)
    warm, second = answer(cached, ids)
    assert cold == warm == expected
    assert (first.prompt_tokens, first.reused_tokens) == (100, 0)
    assert (first.stored_pages, first.stored_tokens) == (6, 96)
    assert (second.prompt_tokens, second.reused_tokens, second.stored_pages) == (100, 96, 0)
    assert first.trouble == second.trouble == ""
    assert 0 < second.first_token_s < 60  # type: ignore[operator]


def test_prompts_share_their_beginning(cached: CachedModel) -> None:
    shared, one, other = prompt(70), prompt(20, seed=1), prompt(30, seed=2)
    answer(cached, torch.cat([shared, one], dim=1))
    ids = torch.cat([shared, other], dim=1)
    tokens, call = answer(cached, ids)
    assert tokens == plain(cached.model, ids)
    assert call.reused_tokens == 64
    assert call.stored_pages == 2  # of 100 tokens and 8 new ones, 6 pages are full


def test_the_answer_is_stored_too(cached: CachedModel) -> None:
    tokens, first = answer(cached, prompt(20), new=30)
    assert first.stored_pages == 3  # 49 of 50 tokens: the last one's KV was never computed
    _, second = answer(cached, torch.tensor([tokens]))
    assert second.reused_tokens == 48


@pytest.mark.parametrize(
    ("length", "reused"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)]
)
def test_the_last_token_is_always_computed(cached: CachedModel, length: int, reused: int) -> None:
    ids = prompt(length)
    expected, first = answer(cached, ids, new=2)
    tokens, second = answer(cached, ids, new=2)
    assert first.stored_tokens == (length + 1) // PAGE * PAGE
    assert second.reused_tokens == reused
    assert tokens == expected == plain(cached.model, ids, new=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_read_are_bytes_stored(folder: Path, root: str, dtype: str) -> None:
    model = load(folder, getattr(torch, dtype))
    ids = prompt(90)
    how = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    with wrap(model, root) as cached:
        cold, warm = (kv_of(cached.generate(ids, **how)) for _ in range(2))
        assert cached.last is not None
        assert cached.last.reused_tokens == 80
        pairs = zip(kv_bits(cold, 80), kv_bits(warm, 80), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        keys = hc.prefix_keys(ids[0], PAGE, cached.namespace)
        assert cached.cache is not None
        with cached.cache.lookup(keys) as lease:
            page = np.frombuffer(lease.view(3), np.uint8).reshape((*cached.layout.shape[:4], -1))
            for layer in range(2):
                for half, tensor in enumerate(("keys", "values")):
                    stored = getattr(cold.layers[layer], tensor)[0, :, 48:64].contiguous()
                    assert np.array_equal(page[layer, half], stored.view(torch.uint8).numpy())
            del page


def test_calls_are_those_of_generate(cached: CachedModel) -> None:
    ids = prompt(40)
    seen: list[int] = []

    class Streamer:
        def put(self, value: Any) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    mask = torch.ones_like(ids)
    tokens, _ = answer(cached, ids, attention_mask=mask, streamer=Streamer())
    assert seen == [*tokens, -1]
    config = GenerationConfig(max_new_tokens=8, do_sample=False)
    assert cached.generate(ids, generation_config=config)[0].tolist() == tokens
    again = cached.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="dynamic")
    assert again[0].tolist() == tokens
    by_name = cached.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert by_name[0].tolist() == tokens
    torch.manual_seed(5)
    sampled = cached.generate(ids, max_new_tokens=8, do_sample=True)
    torch.manual_seed(5)
    assert cached.generate(ids, max_new_tokens=8, do_sample=True).equal(sampled)
    chunked, _ = answer(cached, prompt(50, seed=9), prefill_chunk_size=7)
    assert chunked == plain(cached.model, prompt(50, seed=9))


def test_nothing_leaks_over_many_calls(model: Any, root: str) -> None:
    stored = 0
    with wrap(model, root, pages=256) as cached:
        for length in range(1, 66):
            stored += answer(cached, prompt(length, seed=length), new=1)[1].stored_pages
        assert cached.cache is not None
        stats = cached.cache.stats()
        assert (stats.ready, stats.reserved, stats.pinned) == (stored, 0, 0)
        assert cached.cache.check() == []


# ------------------------------------------------------------------ who shares

CHILD = """
import os, signal, sys, torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from hostcache.adapters.transformers import CachedModel
folder, root, length, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
import numpy as np
torch.set_num_threads(1)

class Die(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] == length + die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1, dtype=torch.bool)

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
cached = CachedModel(model, "llama", page_tokens=16, capacity=64 * 4096, root=root)
ids = torch.from_numpy(np.random.default_rng(0).integers(3, 128, (1, length)))
tokens = cached.generate(ids, max_new_tokens=8, do_sample=False,
                         stopping_criteria=StoppingCriteriaList([Die()]))
print(tokens[0].tolist(), flush=True)
sys.stdin.read()
"""


def child(folder: Path, root: str, length: int, die_at: int) -> subprocess.Popen[str]:
    arguments = [str(folder), str(root), str(length), str(die_at)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_processes_share_and_a_killed_one_leaves_its_pages(
    folder: Path, cached: CachedModel, root: str
) -> None:
    ids = prompt(100)
    with child(folder, root, 100, die_at=99) as other:
        assert other.stdout is not None
        theirs = json.loads(other.stdout.readline())
        tokens, call = answer(cached, ids)
        assert tokens == theirs == plain(cached.model, ids)
        assert (call.reused_tokens, call.stored_pages) == (96, 0)
        other.send_signal(signal.SIGKILL)
    tokens, call = answer(cached, ids)
    assert (tokens, call.reused_tokens) == (theirs, 96)
    assert cached.cache is not None
    stats = cached.cache.stats()
    assert (stats.sessions, stats.reserved, stats.pinned) == (1, 0, 0)
    assert cached.cache.check() == []


def test_killed_in_the_middle_of_an_answer_the_prompt_is_there(
    folder: Path, cached: CachedModel, root: str
) -> None:
    with child(folder, root, 50, die_at=3) as other:
        assert other.wait() == -signal.SIGKILL
    tokens, call = answer(cached, prompt(50))
    assert call.reused_tokens == 48
    assert tokens == plain(cached.model, prompt(50))


def copy_of(folder: Path, to: Path, file: str, change: Callable[[bytearray], None]) -> Path:
    shutil.copytree(folder, to)
    data = bytearray((to / file).read_bytes())
    change(data)
    (to / file).write_bytes(data)
    return to


def flip_last_byte(data: bytearray) -> None:
    data[-1] ^= 1


def change_epsilon(data: bytearray) -> None:
    place = data.index(b"1e-06")
    data[place + 4 : place + 5] = b"7"


def test_other_weights_or_config_share_nothing(
    folder: Path, cached: CachedModel, root: str, tmp_path: Path
) -> None:
    ids = prompt(50)
    answer(cached, ids)
    changes = {"model.safetensors": flip_last_byte, "config.json": change_epsilon}
    for file, change in changes.items():
        other = copy_of(folder, tmp_path / file, file, change)
        with wrap(load(other), root) as changed:
            assert answer(changed, ids)[1].reused_tokens == 0, file
    same = copy_of(folder, tmp_path / "same" / folder.name, "config.json", lambda _: None)
    with wrap(load(same), root) as unchanged:
        assert answer(unchanged, ids)[1].reused_tokens == 48


def test_other_salts_dtypes_and_merged_adapters_share_nothing(
    folder: Path, cached: CachedModel, root: str
) -> None:
    ids = prompt(50)
    answer(cached, ids)
    merged = load(folder)
    with torch.no_grad():
        merged.model.layers[1].self_attn.v_proj.weight += 0.01
    assert wrap(merged, root).namespace != cached.namespace
    with wrap(cached.model, root, salt="tenant-b") as other:
        assert answer(other, ids)[1].reused_tokens == 0
    half = load(folder, torch.bfloat16)
    assert wrap(half, root, name="half").namespace.dtype == "bfloat16"


# ------------------------------------------------------------------ what is refused


class FirstScores(StoppingCriteria):
    """Calls `then` once, when the first new token is there."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then: Callable[[], None] | None = then

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self.then is not None:
            self.then()
        self.then = None
        return torch.zeros(1, dtype=torch.bool)


CALLS: dict[str, dict[str, Any]] = {
    "batch": {"input_ids": torch.full((2, 40), 5)},
    "no token": {"input_ids": torch.zeros((1, 0), dtype=torch.int64)},
    "list of ids": {"input_ids": [[5, 6, 7]]},
    "padding": {"attention_mask": torch.tensor([[0] * 3 + [1] * 37])},
    "longer mask": {"attention_mask": torch.ones(1, 41)},
    "pad token in the prompt": {"input_ids": torch.tensor([[0, 5, 6, 7]])},
    "beams": {"num_beams": 2},
    "beams of the config": {"generation_config": GenerationConfig(num_beams=3)},
    "several answers": {"num_return_sequences": 2, "do_sample": True},
    "no KV": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "quantized cache": {"cache_implementation": "quantized"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "a cache of the caller's": {"cache": DynamicCache()},
    "by its old name": {"past_key_values": DynamicCache()},
    "assistant": {"assistant_model": "another model"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "embeddings": {"inputs_embeds": torch.zeros(1, 40, 32)},
    "positions": {"position_ids": torch.arange(40)[None]},
    "token types": {"token_type_ids": torch.zeros(1, 40)},
    "image": {"pixel_values": torch.zeros(1, 3, 8, 8)},
    "adapter by name": {"adapter_names": ["a"]},
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "custom loop": {"custom_generate": "somebody/else"},
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_can_not_be_served_are_refused_by_name(cached: CachedModel, case: str) -> None:
    options = {"input_ids": prompt(40), "max_new_tokens": 4} | CALLS[case]
    with pytest.raises(hc.Unsupported) as refused:
        cached.generate(**options)
    changed = set(CALLS[case]) - {"do_sample", "generation_config"}
    words = changed or {"num_beams"}
    assert any(word in str(refused.value) for word in words | {"pad token"})
    assert nothing_is_stored_or_held(cached)


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "sliding window": (
        "DynamicSlidingWindowLayer",
        lambda: tiny("Mistral", sliding_window=32),
    ),
    "hybrid": (
        "LinearAttentionLayer",
        lambda: tiny(
            "Qwen3Next",
            layer_types=["full_attention", "linear_attention"],
            head_dim=8,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    "state space": ("LinearAttentionLayer", lambda: tiny("Mamba", state_size=4)),
    "shared KV": (
        "num_kv_shared_layers",
        lambda: tiny(
            "Gemma3n",
            "TextConfig",
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            head_dim=8,
            layer_types=["full_attention"] * 4,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
            activation_sparsity_pattern=[0.0] * 4,
            laurel_rank=4,
        ),
    ),
    "latent attention": (
        "layer 0 has values .* only equal layers",
        lambda: tiny(
            "DeepseekV3",
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=8,
            qk_nope_head_dim=8,
            first_k_dense_replace=1,
        ),
    ),
    "looks ahead": (
        "bidirectional",
        lambda: tiny(
            "Gemma3",
            "TextConfig",
            head_dim=8,
            layer_types=["full_attention"] * 2,
            use_bidirectional_attention=True,
        ),
    ),
    "positions that move": (
        "'dynamic'",
        lambda: tiny(
            "Llama",
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ),
    "encoder-decoder": (
        "encoder-decoder",
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
            )
        ).eval(),
    ),
    "no language model": (
        "LlamaModel",
        lambda: transformers.LlamaModel(LlamaConfig(**SIZES)).eval(),
    ),
    "training": ("training mode", lambda: tiny("Llama").train()),
    "PEFT adapter": ("PEFT", lambda: with_peft(tiny("Llama"))),
    "no version of the weights": ("weights=", lambda: tiny("Llama")),
}


def tiny(family: str, config: str = "Config", **more: Any) -> Any:
    torch.manual_seed(0)
    configured = getattr(transformers, family + config)(**SIZES | more)
    return AutoModelForCausalLM.from_config(configured).eval()


def with_peft(model: Any) -> Any:
    """As `model.load_adapter` leaves it."""
    model.peft_config = {"tuned": SimpleNamespace(peft_type="LORA")}
    return model


@pytest.mark.parametrize("case", MODELS)
def test_models_that_can_not_be_served_are_refused_by_name(root: str, case: str) -> None:
    words, make = MODELS[case]
    with pytest.raises(hc.Unsupported, match=words):
        CachedModel(make(), "refused", page_tokens=PAGE, root=root)
    assert os.listdir(root) == []


@pytest.mark.parametrize("family", ["GPT2", "Qwen3Moe", "Bloom"])
def test_other_families_with_full_attention_are_served(root: str, family: str) -> None:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    model = tiny(family, **(more if family == "Qwen3Moe" else {}))
    weights = "sha256:" + "5" * 64
    with CachedModel(
        model, "other", page_tokens=PAGE, capacity="4MiB", root=root, weights=weights
    ) as cached:
        ids = prompt(60)
        assert answer(cached, ids)[0] == plain(model, ids)
        tokens, call = answer(cached, ids)
        assert (tokens, call.reused_tokens) == (plain(model, ids), 48)


def test_an_adapter_that_is_loaded_later_is_refused(cached: CachedModel) -> None:
    try:
        with_peft(cached.model)
        with pytest.raises(hc.Unsupported, match="tuned"):
            cached.generate(prompt(40), max_new_tokens=2)
    finally:
        del cached.model.peft_config
    assert nothing_is_stored_or_held(cached)


def test_wrong_arguments_are_told(model: Any, root: str) -> None:
    with pytest.raises(hc.BadValue, match="weights"):
        wrap(model, root, weights="main")
    with pytest.raises(hc.BadValue):
        wrap(model, root, name="a/b")
    with pytest.raises(hc.BadValue, match="context"):
        CachedModel(model, "long", page_tokens=512, root=root)
    with (
        hc.KvCache.open("small", hc.PageFormat(4096, 8), page_count=4, root=root) as other,
        pytest.raises(hc.FormatMismatch, match="8 tokens"),
    ):
        CachedModel(model, other, page_tokens=PAGE)


# ------------------------------------------------------------------ how the bytes are copied


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
@pytest.mark.parametrize("gap", [1, 2])
def test_any_strides_come_back_bit_by_bit(
    model: Any, order: tuple[int, int, int], gap: int
) -> None:
    layout = described.learn_layout(model, PAGE)
    kv = SimpleNamespace(layers=[])
    for seed in range(4):
        shape = [(2, 3 * PAGE, 8 * gap)[axis] for axis in order]
        items = np.random.default_rng(seed).integers(-(2**31), 2**31, shape, dtype=np.int32)
        back = [order.index(axis) for axis in range(3)]
        tensor = torch.from_numpy(items).view(torch.float32).permute(back)[None, ..., ::gap]
        assert tuple(tensor.shape) == (1, 2, 3 * PAGE, 8)
        kv.layers.append(tensor)
    kv.layers = [SimpleNamespace(keys=k, values=v) for k, v in (kv.layers[:2], kv.layers[2:])]
    pages = [memoryview(bytearray(layout.page_bytes)) for _ in range(3)]
    layout.write(kv, [2, 0, 1], [pages[2], pages[0], pages[1]])
    again = DynamicCache(config=model.config)
    layout.read(pages, again)
    pairs = zip(kv_bits(kv, 3 * PAGE), kv_bits(again, 3 * PAGE), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_wrong_copy_is_found_before_anything_is_shared(
    model: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = described.Layout.write

    def one_token_off(self: Any, kv: Any, places: Any, views: Any) -> None:
        rolled = [
            SimpleNamespace(keys=layer.keys.roll(1, dims=2), values=layer.values)
            for layer in kv.layers
        ]
        write(self, SimpleNamespace(layers=rolled), places, views)

    monkeypatch.setattr(described.Layout, "write", one_token_off)
    with pytest.raises(hc.Unsupported, match=r"layer 0 .* does not come back"):
        wrap(model, root)
    assert os.listdir(root) == []


# ------------------------------------------------------------------ the cache's trouble


def test_a_cache_that_is_too_small_stores_what_fits(model: Any, root: str) -> None:
    ids = prompt(100)
    with wrap(model, root, pages=3) as cached:
        cold, first = answer(cached, ids)
        warm, second = answer(cached, ids)
    assert cold == warm == plain(model, ids)
    assert (first.stored_pages, second.reused_tokens) == (3, 48)
    assert "refused" in first.trouble


def test_a_cache_full_of_held_pages_stores_nothing(model: Any, root: str) -> None:
    held, ids = prompt(65, seed=3), prompt(100)
    with wrap(model, root, pages=4) as cached:
        answer(cached, held, new=1)
        assert cached.cache is not None
        with cached.cache.lookup(hc.prefix_keys(held[0], PAGE, cached.namespace)) as lease:
            assert len(lease) == 4
            tokens, call = answer(cached, ids)
            assert (tokens, call.stored_pages) == (plain(model, ids), 0)
            assert "refused" in call.trouble
        assert answer(cached, ids)[1].stored_pages == 4


def test_pages_that_another_is_writing_are_computed(cached: CachedModel) -> None:
    ids = prompt(100)
    keys = hc.prefix_keys(ids[0], PAGE, cached.namespace)
    assert cached.cache is not None
    with cached.cache.reserve(keys):
        tokens, call = answer(cached, ids, new=2)
        assert tokens == plain(cached.model, ids, new=2)
        assert (call.reused_tokens, call.stored_pages, call.trouble) == (0, 0, "")
    assert answer(cached, ids, new=2)[1].stored_pages == 6


def test_a_clear_while_computing_voids_what_was_computed(cached: CachedModel) -> None:
    assert cached.cache is not None
    clear = StoppingCriteriaList([FirstScores(cached.cache.clear)])
    tokens, call = answer(cached, prompt(100), stopping_criteria=clear)
    assert tokens == plain(cached.model, prompt(100))
    assert (call.stored_pages, cached.cache.stats().ready) == (0, 0)
    assert answer(cached, prompt(100))[1].stored_pages == 6


class FailingLease:
    """A lease whose page `fails_at` can not be read."""

    def __init__(self, lease: Any, fails_at: int) -> None:
        self.lease, self.fails_at = lease, fails_at

    def __len__(self) -> int:
        return len(self.lease)

    def __enter__(self) -> FailingLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.release()

    def view(self, i: int) -> memoryview:
        if i == self.fails_at:
            raise hc.LeaseEnded("lost")
        view: memoryview = self.lease.view(i)
        return view


class FailingCache:
    """A cache with one fault: in `lookup`, in a page that it gave, or in `reserve`."""

    def __init__(self, cache: Any, fault: str) -> None:
        self.cache, self.fault, self.epoch = cache, fault, cache.epoch

    def lookup(self, keys: Any) -> Any:
        if self.fault == "lookup":
            raise hc.Busy("no lock")
        lease = self.cache.lookup(keys)
        return FailingLease(lease, 4) if self.fault == "page 4" else lease

    def reserve(self, keys: Any, **how: Any) -> Any:
        if self.fault == "reserve":
            raise hc.NoRoom("no record")
        return self.cache.reserve(keys, **how)


@pytest.mark.parametrize(("fault", "reused"), [("lookup", 0), ("page 4", 64), ("reserve", 96)])
def test_a_failing_cache_costs_reuse_and_not_the_answer(
    cached: CachedModel, fault: str, reused: int
) -> None:
    ids = prompt(100)
    expected, _ = answer(cached, ids)
    whole = cached.cache
    cached.cache = FailingCache(whole, fault)  # type: ignore[assignment]
    tokens, call = answer(cached, ids, new=20)
    cached.cache = whole
    assert tokens[: len(expected)] == expected
    assert tokens == plain(cached.model, ids, new=20)
    assert call.reused_tokens == reused
    assert call.trouble


def test_without_its_cache_the_model_runs_and_says_why(model: Any, root: str) -> None:
    ids = prompt(40)
    with CachedModel(model, "huge", page_tokens=PAGE, capacity="4TiB", root=root) as huge:
        assert huge.cache is None
        tokens, call = answer(huge, ids)
        assert tokens == plain(model, ids)
        assert "no_room" in call.trouble
    with wrap(model, root, name="taken"):
        pass
    with CachedModel(model, "taken", page_tokens=2 * PAGE, capacity="1MiB", root=root) as other:
        assert answer(other, ids)[0] == plain(model, ids)
        assert "format_mismatch" in other.trouble
    with wrap(model, root) as closed:
        pass
    assert answer(closed, ids)[0] == plain(model, ids)
    with pytest.raises(hc.Unsupported):
        closed.generate(ids, num_beams=2)


def test_a_cache_of_the_callers_stays_open(model: Any, root: str) -> None:
    with wrap(model, root) as first:
        pages = first.page_format
    with hc.KvCache.open("mine", pages, page_count=64, root=root) as cache:
        with CachedModel(model, cache, page_tokens=PAGE) as cached:
            assert answer(cached, prompt(40))[1].stored_pages == 2
        assert cache.stats().ready == 2
