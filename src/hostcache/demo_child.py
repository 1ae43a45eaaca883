"""One process of the demo: answers one question about the document and says what it took.

Started by `demo.py` with a job, in JSON, as its argument. Prints JSON objects, one a line:
`loaded`, then `answered`. A job that says `stay` then waits, its cache attached, until it is killed
or its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

from hostcache.adapters.transformers import CachedModel, FirstToken
from hostcache.demo_text import QUESTIONS, document, prompt

ANSWER_TOKENS = 32


def main() -> None:
    """Answer one question as the job in the first argument says."""
    job = json.loads(sys.argv[1])
    begun = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    content = prompt(document(), QUESTIONS[job["question"]])
    chat = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    tell("loaded", seconds=time.perf_counter() - begun, threads=torch.get_num_threads())
    answer = with_cache if job["cache"] else without_cache
    output, facts = answer(model, ids["input_ids"], job)
    prompt_tokens = ids["input_ids"].shape[1]
    tokens = output.sequences[0, prompt_tokens:].tolist()
    np.save(job["scores"], torch.cat(output.scores).numpy())
    tell(
        "answered",
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        answer=tokenizer.decode(tokens, skip_special_tokens=True),
        **facts,
    )
    if job["stay"]:
        sys.stdin.read()


# To the end of the process: whoever is killed can not close its cache either.
_OPEN: list[CachedModel] = []


def with_cache(model: Any, ids: torch.Tensor, job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The answer through the cache, and what the cache did."""
    cached = CachedModel(
        model,
        job["cache"],
        page_tokens=job["page_tokens"],
        capacity=job["capacity_bytes"],
        root=job["root"],
    )
    _OPEN.append(cached)
    output = cached.generate(ids, **_how())
    call = cached.last
    assert call is not None
    return output, {
        "first_token_s": call.first_token_s,
        "reused_tokens": call.reused_tokens,
        "stored_pages": call.stored_pages,
        "trouble": call.trouble,
    }


def without_cache(model: Any, ids: torch.Tensor, _: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The answer of plain transformers."""
    clock = FirstToken()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        stopping_criteria=StoppingCriteriaList([clock]),
        **_how(),
    )
    return output, {"first_token_s": clock.seconds, "reused_tokens": 0, "trouble": ""}


def _how() -> dict[str, Any]:
    """Greedy, exactly ANSWER_TOKENS tokens, with the logits they were chosen from."""
    return {
        "do_sample": False,
        "min_new_tokens": ANSWER_TOKENS,
        "max_new_tokens": ANSWER_TOKENS,
        "return_dict_in_generate": True,
        "output_scores": True,
    }


def tell(stage: str, **facts: object) -> None:
    """One line for the parent."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


if __name__ == "__main__":
    main()
