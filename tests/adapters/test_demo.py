"""The demo's figures: what it makes of three answers. The demo itself is `make demo`."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import hostcache as hc
from hostcache import demo, demo_text


def answered(tokens: list[int], seconds: float, nudge: float = 0.0) -> dict[str, Any]:
    """An answer whose logits are 1 for the token, 0.75 for the next one, and -inf for token 9."""
    logits = np.zeros((len(tokens), 10), np.float32)
    for step, token in enumerate(tokens):
        logits[step, [token, (token + 1) % 9]] = 1 + nudge, 0.75
    logits[:, 9] = -math.inf
    facts = {"first_token_s": seconds, "prompt_tokens": 5901, "reused_tokens": 5888}
    return {"tokens": tokens, "logits": logits, "answer": f"{tokens}\n", **facts}


def test_equal_answers_are_identical() -> None:
    cold, warm, plain = answered([1], 30.0), answered([1, 2, 3], 1.0, 0.25), answered([1, 2, 3], 29)
    figures = demo.compare(cold, warm, plain)
    assert figures["identical"] is True
    assert figures["first_difference"] is figures["margin_at_difference"] is None
    assert (figures["cold_s"], figures["warm_s"], figures["uncached_s"]) == (30.0, 1.0, 29)
    assert (figures["prompt_tokens"], figures["reused_tokens"]) == (5901, 5888)
    assert (figures["max_logit_difference"], figures["smallest_margin"]) == (0.25, 0.25)
    assert "identical: yes" in demo.as_text(figures)
    assert "30 times sooner" in demo.as_text(figures)
    json.dumps(figures)


def test_a_difference_is_shown_with_its_margin() -> None:
    plain = answered([1, 2, 3], 29.0)
    figures = demo.compare(answered([1], 30.0), answered([1, 5, 7], 1.0), plain)
    assert figures["identical"] is False
    assert (figures["first_difference"], figures["margin_at_difference"]) == (1, 0.25)
    assert figures["max_logit_difference"] == 1.0  # up to there: behind it the prompts differ
    assert "differ from token 1 on" in demo.as_text(figures)


def test_the_document_is_the_same_everywhere() -> None:
    text = demo_text.document()
    assert text == demo_text.document()
    assert text != demo_text.document(seed=2)
    days = [line for line in text.splitlines() if line.startswith("Day ")]
    assert len(days) == len({line.split(".", 1)[1] for line in days}) == demo_text.DAYS
    assert text.isascii()


def test_a_smaller_cache_of_that_name_is_told(root: str) -> None:
    with hc.KvCache.open(demo.CACHE, demo.page_format(), page_count=2, root=root):
        pass
    with pytest.raises(hc.NoRoom, match="has 2 pages, the demo needs 169 .* hostcache rm demo"):
        demo.empty_cache(root)
