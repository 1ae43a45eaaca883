"""Which models and which calls the transformers adapter can not serve, and what the bytes of a
model's KV depend on besides tokens.

Whoever finds a reason to refuse raises `Unsupported`, before anything is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from hostcache.adapters._transformers_layout import Layout
from hostcache.errors import Unsupported
from hostcache.keys import Namespace, weights_fingerprint

_FORMAT = "transformers-kv/1"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAMPLED_VALUES = 16

# Not part of what a token computes, or stated apart.
_CONFIG_ASIDE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}

# generate's own parameters that change how a token is picked, never what is computed for it.
_PASSED_ON = {
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("streamer", "tokenizer", "attention_mask"),
}
# Settings of generation under which the cache would not hold the KV of the prompt, in order, once.
_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "cache_config": (None,),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


# ------------------------------------------------------------------ what is refused


def refuse_model(model: Any) -> None:
    """Raise `Unsupported` for what no look at the cache's layers would show."""
    if getattr(model, "peft_config", None):
        raise Unsupported(
            f"{type(model).__name__} has PEFT adapters ({', '.join(map(str, model.peft_config))}), "
            "whose weights no fingerprint covers: merge them and save the model to a folder"
        )
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise Unsupported(
            f"{type(model).__name__} is no transformers model that generates; "
            "give an AutoModelForCausalLM"
        )
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder; only causal models work")
    if model.training:
        raise Unsupported("the model is in training mode (dropout); call model.eval() first")
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise Unsupported(f"the model is split over {model.tp_size} ranks (tensor parallel)")
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", None):
        raise Unsupported(
            f"{text.num_kv_shared_layers} layers of {type(model).__name__} use the KV of others "
            "(num_kv_shared_layers); only models whose every layer has its own can be cached"
        )
    for kind in _rope_kinds(text):
        if "dynamic" in kind or kind == "longrope":
            raise Unsupported(
                f"rope_type {kind!r}: there the KV of a token depends on how long the prompt "
                "becomes, so a prefix has no KV of its own"
            )


def _rope_kinds(config: Any) -> Iterator[str]:
    """Each `rope_type` of a decoder's config, wherever the version and the model keep it."""
    pending = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            kind = value.get("rope_type", value.get("type"))
            if isinstance(kind, str):
                yield kind
            pending += value.values()


def refuse_call(model: Any, input_ids: Any, mask: Any, options: Mapping[str, Any]) -> None:
    """Raise `Unsupported` unless the prompt's KV will be that of its tokens and nothing else.

    input_ids: what `generate` was given, to be integers [1, n]; mask: None or ones of that shape;
    options: all other keywords.
    """
    refuse_model(model)
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
        raise Unsupported("input_ids must be a tensor of token ids [1, n]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"input_ids is of {input_ids.dtype}, token ids are int64 or int32")
    if input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise Unsupported(
            f"input_ids has shape {tuple(input_ids.shape)}: one prompt a call, of 1 token or more"
        )
    own = vars(GenerationConfig())
    for name, value in options.items():
        if value is not None and name not in _PASSED_ON and name not in own:
            raise Unsupported(
                f"generate({name}=) is not served with a prefix cache: "
                "a prompt is token ids, and decoding is greedy or sampled"
            )
    for name, allowed in _SETTINGS.items():
        value = setting(model, options, name)
        if not any(value is one or (value == one and value is not None) for one in allowed):
            raise Unsupported(f"generate with {name}={value!r} is not served with a prefix cache")
    _refuse_padding(model, input_ids, mask, options)


def setting(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """What `generate` will take for `name`: the call's, its config's, or the model's own."""
    if options.get(name) is not None:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _refuse_padding(model: Any, input_ids: Any, mask: Any, options: Mapping[str, Any]) -> None:
    """Padding moves the positions of the tokens behind it, so their KV is another."""
    if mask is not None:
        if tuple(mask.shape) != tuple(input_ids.shape) or not bool((mask == 1).all()):
            raise Unsupported(
                f"attention_mask of shape {tuple(mask.shape)} masks or pads tokens: "
                "give the prompt without padding"
            )
        return
    pad = setting(model, options, "pad_token_id")
    ends = setting(model, options, "eos_token_id")
    ends = ends if isinstance(ends, Sequence) else [ends]
    if pad is not None and pad not in ends and bool((input_ids == pad).any()):
        # generate would guess a mask from it.
        raise Unsupported(
            f"the prompt contains the pad token ({pad}); if it is text, say so: "
            "attention_mask=torch.ones_like(input_ids)"
        )


# ------------------------------------------------------------------ what the bytes depend on


def namespace_of(model: Any, layout: Layout, weights: str | None, salt: str) -> Namespace:
    """The namespace of a model's pages: see `_description` for what makes a layout."""
    name = os.path.basename(os.path.normpath(model.config.name_or_path or "unnamed"))
    return Namespace(
        model=f"{model.config.model_type}/{name}",
        weights=weights or _weights_version(model),
        dtype=str(layout.dtype).removeprefix("torch."),
        layout=_description(model, layout),
        salt=salt,
    )


def _weights_version(model: Any) -> str:
    """The hub commit where transformers recorded one, else the fingerprint of the folder."""
    commit = getattr(model.config, "_commit_hash", None)
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return commit
    folder = model.config.name_or_path
    if folder and os.path.isdir(folder):
        return weights_fingerprint(folder)
    raise Unsupported(
        f"{folder or type(model).__name__!r} is no folder and has no recorded hub commit, so its "
        "weights have no version; give weights=, the commit that was loaded or "
        "hostcache.weights_fingerprint(folder), or load the model from a folder"
    )


def _description(model: Any, layout: Layout) -> str:
    """All that the bytes of a page depend on besides tokens, weights files and dtype.

    The version of transformers is the code that computes them; the sample tells apart what one
    folder can be loaded as (one file of several, adapters merged in memory).
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {name: value for name, value in config.items() if name not in _CONFIG_ASIDE}
    text = json.dumps(kept, sort_keys=True)
    parts = {
        "order": "layer,kv,head,token,dim",
        "shape": "x".join(map(str, layout.shape)),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "sample": _parameter_sample(model),
        "parameters": str(model.dtype).removeprefix("torch."),
        "attention": str(getattr(model.config, "_attn_implementation", "unknown")),
        "transformers": transformers.__version__,
    }
    return " ".join([_FORMAT, *(f"{name}={value}" for name, value in parts.items())])


def _parameter_sample(model: Any) -> str:
    """Digest of the name, shape, dtype and some values of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\0".encode())
        # Packed or offloaded parameters can not be indexed; their shapes must do.
        if type(parameter) is torch.nn.Parameter and not parameter.is_meta and parameter.numel():
            flat = parameter.detach().flatten()
            some = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES]
            digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
