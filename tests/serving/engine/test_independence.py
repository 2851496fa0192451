"""The tokens and scores of a request depend, bit for bit, on nothing else that the engine does: not on other requests,
the size of steps, a preemption, the prefix cache or speculation."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_support import Known, speculation
from model_helpers import byte_model
from schemas import closed

from megakernel import LLM, SamplingParams
from megakernel.serving import StructuredOutputsParams
from megakernel.serving.engine.speculation import Lookup
from megakernel.serving.text.vllm import RequestOutput

PERSON = closed(name={"type": "string", "maxLength": 6}, kind={"enum": ["alpha", "beta"]})
FORM = {"structured_outputs": StructuredOutputsParams(json=PERSON), "max_tokens": 200, "ignore_eos": False}
# In a text of random tokens, "~" begins a call, and a bias makes "a" and "~" frequent.
CALL = {"structured_outputs": StructuredOutputsParams(grammar='start: "{" /[0-9]{3}/ "}"', trigger="~")}
CALL |= {"logit_bias": {64: 15.0, 93: 10.0}, "max_tokens": 100, "n": 2}
# Two tokens alternate, whatever the weights are, so that lookup finds all of them.
ALTERNATING = {"temperature": 0.0, "frequency_penalty": 2.0, "max_tokens": 90}
REQUESTS: list[tuple[str | list[int], dict[str, Any]]] = [
    ([5, 6, 7, 8] * 9, {"temperature": 0.0, "max_tokens": 40, "logprobs": 2}),
    ([5, 6, 7, 8] * 9 + [1], {"temperature": 0.0, "max_tokens": 60}),
    ([9, 8] * 10, {"seed": 3, "max_tokens": 30, "logprobs": 0, "n": 3}),
    ([4] * 40, {"seed": 4, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "max_tokens": 25}),
    ([11, 12, 13], {"seed": 5, "repetition_penalty": 1.4, "max_tokens": 40, "logprobs": 3}),
    ([11, 12, 13] * 3, {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 40}),
    ([21, 22], {"seed": 6, "frequency_penalty": -2.0, "temperature": 0.5, "max_tokens": 40}),
    ([31] * 30, {"seed": 7, "stop_token_ids": list(range(0, 98, 5)), "min_tokens": 12, "max_tokens": 40}),
    ([41, 42], {"temperature": 0.0, "logit_bias": {17: 4.0, 3: -100.0}, "max_tokens": 30}),
    ([51, 52, 53] * 4, {"seed": 8, "prompt_logprobs": 2, "max_tokens": 20}),
    *(([first], {**ALTERNATING, "logit_bias": {first: 100.0, first + 1: 99.0}}) for first in (66, 68)),
    ([61] * 5, {"seed": 9, "max_tokens": 300}),  # ends at the limit of the context
    ("def " * 30, {**FORM, "seed": 1, "n": 2, "logprobs": 1}),
    ("def " * 30 + "y", {**FORM, "seed": 2, "presence_penalty": 0.5}),
    ("abab " * 9, {**CALL, "seed": 10}),
    ("abab " * 9 + "y", {**CALL, "seed": 11, "min_tokens": 100}),
]
FREE = SamplingParams(seed=9, max_tokens=60)
LIMITS: dict[str, Any] = {"max_context": 256, "threads": 1}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose attention sees the last 64 tokens only, with a tokenizer whose tokens are single bytes."""
    folder: Path = tmp_path_factory.mktemp("windowed")
    byte_model(folder)
    file = folder / "config.json"
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    file.write_text(json.dumps(json.loads(file.read_text()) | mistral))
    return str(folder)


def params() -> list[SamplingParams]:
    return [SamplingParams(**{"ignore_eos": True} | given) for _, given in REQUESTS]


@pytest.fixture(scope="module")
def one_by_one(windowed: str) -> Callable[..., list[RequestOutput]]:
    """A function from an engine's arguments to its results for REQUESTS, of which only one runs at a time."""

    @cache
    def results(**how: Any) -> list[RequestOutput]:
        with LLM(windowed, **LIMITS, **how, enable_prefix_caching=False) as llm:
            return [llm.generate([prompt], p)[0] for (prompt, _), p in zip(REQUESTS, params(), strict=True)]

    return results


def said(found: Sequence[RequestOutput]) -> list[Any]:
    """Return all tokens and scores of the results, so that `==` compares them exactly."""
    return [(result.prompt_logprobs, result.outputs) for result in found]


Answers = Callable[..., list[RequestOutput]]
WRONG: dict[str, Callable[[int], bool]] = {"right": lambda place: False, "wrong": lambda place: True}
WRONG["half right"] = lambda place: place % 3 == 0
CPU, RANKS = {"backend": "cpu"}, {"backend": "cpu", "tp": 2}
Q8, REFERENCE = {"backend": "cpu", "kv_cache_dtype": "q8_0"}, {"backend": "reference"}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
SEVERAL = {"max_num_seqs": 5, "max_num_batched_tokens": 24}
# What an engine does, its limits, and who proposes tokens: "lookup", a key of WRONG, or "" for the engine's own choice.
CASES: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (CPU, "crowded", {"max_num_seqs": 32}, ""),
    (CPU, "short of pages", SMALL, ""),
    (Q8, "short of pages", SMALL, ""),
    (CPU, "no prefix cache", {"enable_prefix_caching": False}, ""),
    (CPU, "speculating", {"speculate": 8}, ""),
    (CPU, "speculating, short of pages", {"speculate": 6}, "lookup"),
    (CPU, "speculating", {"max_num_seqs": 2, "max_num_batched_tokens": 3, "speculate": 63}, "lookup"),
    *((CPU, "speculating", {**SEVERAL, "speculate": 4}, guesses) for guesses in ("lookup", *WRONG)),
    *((how, "speculating", {**SEVERAL, "speculate": 4}, "half right") for how in (RANKS, REFERENCE)),
]


@pytest.mark.parametrize(
    ("how", "condition", "limits", "guesses"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[3] in WRONG)) for case in CASES],
)
def test_answers_depend_on_nothing_else(
    one_by_one: Answers, windowed: str, how: dict[str, Any], condition: str, limits: dict[str, Any], guesses: str
) -> None:
    results = one_by_one(**how)
    more = 24 * (condition == "crowded")
    texts: list[Sequence[int]] = [r.prompt_token_ids + c.token_ids for r in results for c in r.outputs]
    with LLM(windowed, **LIMITS, **how, **limits) as llm:
        if guesses:
            proposer = Lookup if guesses == "lookup" else lambda: Known(texts, WRONG[guesses])
            llm.engine._speculation = speculation(limits["speculate"], lambda _: proposer())
        if "short of pages" in condition:
            pool = llm.engine._batch.pool
            held = pool.take(pool.free - 20)
        for _ in range(2):  # the second time, prefixes are cached
            found = llm.generate([*(prompt for prompt, _ in REQUESTS), *["free"] * more], [*params(), *[FREE] * more])
            assert said(found[: len(REQUESTS)]) == said(results)
        stats, counts = llm.engine.stats, llm.engine.stats.counts
        assert (stats.preemptions > 0) == ("short of pages" in condition)
        assert (stats.prefix_hits > 0) == (condition != "no prefix cache")
        if guesses or "speculating" not in condition:  # otherwise, measured times decide whether anything is proposed
            assert (counts.proposed > 0) == ("speculating" in condition)
        if "short of pages" in condition:
            pool.give(held)
        assert llm.engine.stats.pages_used == 0
    if guesses == "wrong":
        assert counts.proposed > 100 and counts.accepted == 0
    elif guesses:
        assert counts.accepted > 100
    if guesses == "right":
        assert counts.accepted > 0.95 * counts.proposed and counts.tokens_per_step > 2.5
