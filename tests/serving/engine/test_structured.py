"""Structured outputs: answers match their grammar and do not depend on what else is in the batch."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from schemas import closed, random_root

from megakernel import LLM, MegakernelError, SamplingParams
from megakernel.serving import StructuredOutputsParams
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.grammars import Grammar, Grammars
from megakernel.serving.text.vllm import plain

AGE = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = closed(name={"type": "string", "maxLength": 6}, age=AGE, kind={"enum": ["alpha", "beta"]})


def wants(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def params(seed: int = 0, **more: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 200, "structured_outputs": wants(json=PERSON), **more}
    return SamplingParams(seed=seed, **given)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, backend="cpu", max_context=1024, max_num_seqs=32, threads=1) as found:
        yield found


def test_every_answer_to_random_schemas_validates(llm: LLM) -> None:
    """Answers of a model with random weights are valid for 60 random JSON schemas. benchmarks/correctness/structured.py
    does the same for a thousand schemas."""
    rng = random.Random(1)
    schemas = [random_root(rng) for _ in range(60)]
    each = [params(seed, max_tokens=900, structured_outputs=wants(json=s)) for seed, s in enumerate(schemas)]
    for schema, result in zip(schemas, llm.generate(["abc"] * len(schemas), each), strict=True):
        assert result.finish_reason == "stop" and result.text is not None, (schema, result.text)
        jsonschema.validate(json.loads(result.text), schema)


def test_forced_tokens_take_one_step(llm: LLM) -> None:
    steps: list[Step] = []
    only = {"const": "a long text of which every byte is forced"}
    result = llm.generate("abc", params(structured_outputs=wants(json=only)), on_step=steps.append)[0]
    assert json.loads(result.text or "") == only["const"]
    assert len(result.token_ids) > 40 and len(steps) <= 4
    assert llm.engine.stats.counts.proposed == 0  # forced tokens do not count as speculation


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    result = llm.generate("abc", params(7, logprobs=3))[0]
    again = SamplingParams(max_tokens=1, prompt_logprobs=3, temperature=0.0)
    scored = llm.generate([result.prompt_token_ids + result.token_ids], again)[0]
    tops = [*map(plain, result.outputs[0].logprobs or ())]
    assert scored.prompt_token_logprobs and scored.prompt_logprobs and tops
    made = slice(len(result.prompt_token_ids), None)
    assert [set(top or ()) for top in scored.prompt_logprobs[made]] == [set(top) for top in tops]
    own = scored.prompt_token_logprobs[made]
    assert result.logprobs == pytest.approx([p for p in own if p is not None], abs=1e-4)
    # The reported log-probabilities ignore the grammar, so a forbidden token may have a higher one than the sampled
    # token.
    assert any(max(top.values()) > top[t] for top, t in zip(tops, result.token_ids, strict=True))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": "{"}, "Expecting property name"),
        ({"json": "[1]"}, "a JSON schema must be an object"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= nothing"}, "nothing"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"json": {"type": "integer", "multipleOf": 99999999}}, "takes more than|needs more than"),
        ({"json": {"enum": [f"value {i}" * 5 for i in range(200000)]}}, "more than .* characters"),
        ({"json": {"enum": [f"v{i}" for i in range(150000)]}}, "too big|takes more"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(llm: LLM, given: dict[str, Any], why: str) -> None:
    with pytest.raises(MegakernelError, match=f"structured outputs.*({why})"):
        llm.generate("abc", params(structured_outputs=wants(**given)))
    assert llm.generate("abc", params(1))[0].finish_reason == "stop"


def test_one_thing_is_wanted_and_the_end_is_the_grammars() -> None:
    for given in ({}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": "ab"}, {"regex": ""}, {"grammar": 3}):
        with pytest.raises(MegakernelError, match="structured outputs"):
            wants(**given)
    for more in ({"min_tokens": 1}, {"ignore_eos": True}):
        with pytest.raises(MegakernelError, match=f"{next(iter(more))}=.* structured outputs"):
            params(**more)


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used grammar is dropped first. One above the limit, or a wrong one, is never kept."""
    kept = Grammars(llm.tokenizer, llm.config.vocab, frozenset({257}), 100_000)
    monkeypatch.setattr(kept, "_checked", lambda kind, text: (f"start: /{text}/", [], 40_000))
    made = [params(structured_outputs=wants(regex=f"{'ab'[n]}+")) for n in (0, 1)]
    for wanted in made:
        assert kept.get(wanted) is not None
    assert kept.known(made[0]) and len(kept._known) == 2  # this use makes the second the least recently used
    kept.get(params(structured_outputs=wants(regex="c")))
    assert kept.known(made[0]) and not kept.known(made[1]) and kept._kept_bytes < 100_000
    monkeypatch.setattr(kept, "_checked", lambda kind, text: ("start: nothing", [], 40_000))
    with pytest.raises(MegakernelError, match="structured outputs"):
        kept.get(params(structured_outputs=wants(regex="d")))
    assert len(kept._known) == 2
    monkeypatch.setattr(kept, "_checked", lambda kind, text: (f"start: /{text}/", [], 200_000))
    large = params(structured_outputs=wants(regex="e"))
    assert kept.get(large) is not None and not kept.known(large) and not kept._known and kept._kept_bytes == 0


def test_who_cannot_go_on_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Grammar.follow, 0

    def follow(self: Grammar, output: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 4:
            self.error = "too complex"
            return []
        return real(self, output)

    monkeypatch.setattr(Grammar, "follow", follow)
    with pytest.raises(MegakernelError, match="too complex"):
        llm.generate("abc", params())
    assert llm.engine.idle and llm.engine.stats.pages_used == 0


def test_without_a_tokenizer_there_is_no_text_to_match() -> None:
    how: dict[str, Any] = {"backend": "null", "max_context": 64, "max_num_seqs": 1}
    with LLM("random:smollm2-135m", **how) as ids, pytest.raises(MegakernelError, match="model with a tokenizer"):
        ids.generate([[1]], params())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids="),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids: 260 is outside the vocabulary of 260"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens forbids every id"),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "no token is allowed"),
        ({"bad_words": "word"}, "bad_words="),
        ({"bad_words": [" "]}, "bad_words="),
        ({"bad_words": ["a"], "structured_outputs": StructuredOutputsParams(regex="b")}, "bad_words="),
    ],
)
def test_ids_and_words_are_checked(llm: LLM, given: dict[str, Any], why: str) -> None:
    with pytest.raises(MegakernelError, match=why):
        llm.generate("abc", SamplingParams(**given))
    assert llm.engine.idle and llm.engine.stats.pages_used == 0
