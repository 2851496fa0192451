"""The engine schedules requests, ends their choices, and generates the same tokens whatever else runs."""

from dataclasses import replace
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from engine_support import CONFIG, EOS, TINY, Guesses, Letters, fake_engine, output_ids, transcribe

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.model.families import forward
from megakernel.scheduler import passes
from megakernel.serving.engine.engine import Engine, top_logprobs
from megakernel.serving.engine.memory import kv_capacity, pool_bytes, token_bytes, weight_bytes
from megakernel.serving.engine.programs import bucket
from megakernel.serving.server.loop import _some
from megakernel.serving.text.codec import Token, Transcript, single_tokens


def finish(engine: Engine) -> dict[int, list[Token]]:
    found: dict[int, list[Token]] = {}
    for step in engine.run():
        for token in single_tokens(step.tokens):
            found.setdefault(token.choice, []).append(token)
    return found


def test_a_long_prompt_is_cut_to_the_step_budget() -> None:
    engine, backend = fake_engine(step_tokens=8)
    request = engine.add(list(range(20)), SamplingParams(max_tokens=3))
    finish(engine)
    assert [[count for _, count in step] for step in backend.steps()] == [[8], [8], [4], [1], [1]]
    assert [table.dims.bucket.tokens for table in backend.tables] == [8, 8, 4, 1, 1]
    assert output_ids(request.choices[0]) == [19, 20, 21]


def test_decoding_sequences_come_before_prompts() -> None:
    engine, backend = fake_engine(step_tokens=8)
    first = engine.add([1, 2], SamplingParams(max_tokens=6))
    engine.step()  # also starts the second step
    engine.add(list(range(20)), SamplingParams(max_tokens=1))
    finish(engine)
    assert backend.steps() == [[(0, 2)], [(0, 1)], *([[(0, 1), (1, n)] for n in (7, 7, 6)]), [(0, 1)]]
    assert first.choices[0].finish_reason == "length"


def test_a_scored_prompt_does_not_take_the_logit_rows_of_others() -> None:
    engine, backend = fake_engine(step_tokens=100)
    engine.add([1] * 200, SamplingParams(prompt_logprobs=0, max_tokens=1))
    young = engine.add([1], SamplingParams(max_tokens=3))
    for _ in range(3):
        engine.step()
    assert young.done
    assert [sorted(count for _, count in step) for step in backend.steps()] == [*[[1, 63]] * 3, [11]]


def test_seeds_are_drawn_unless_given() -> None:
    engine, _ = fake_engine()
    assert len({engine.add([1], SamplingParams()).seed for _ in range(8)}) == 8
    assert engine.add([1], SamplingParams(seed=2**64 - 1)).seed == 2**64 - 1


@pytest.mark.parametrize(
    "count, most, expected",
    [(1, 512, 1), (3, 512, 3), (5, 512, 6), (65, 512, 96), (97, 512, 128), (385, 400, 400), (7, 7, 7)],
)
def test_buckets(count: int, most: int, expected: int) -> None:
    assert bucket(count, most) == expected


def test_after_warming_up_no_step_compiles() -> None:
    engine, backend = fake_engine(max_seqs=5, step_tokens=20)
    compiling = engine.programs._compile = Mock(side_effect=engine.programs._compile)
    engine.programs.warm(Mock(is_set=lambda: True))
    assert compiling.call_count == 0
    engine.programs.warm(Event())
    compiled = [(call.kwargs["tokens"], call.kwargs["logit_rows"]) for call in compiling.mock_calls]
    assert len(set(compiled)) == (number := len(compiled)) > 20
    for length in range(1, 60):
        engine.add([1] * length, SamplingParams(max_tokens=length % 7 + 1, prompt_logprobs=0 if length % 5 else None))
    finish(engine)
    assert compiling.call_count == number
    assert {table.dims.bucket.tokens for table in backend.tables} > {20, 5 + 1}


def ends(params: SamplingParams, reply: list[int], prompt: int = 1, **kwargs: Any) -> tuple[list[int], str | None, str]:
    """Return the tokens, the end and the text of a choice, which must be the same if the engine verifies proposals."""
    found = []
    for depth in (0, 8):
        guesses = Guesses()
        kwargs["speculate"] = (depth, guesses) if depth else None
        engine, _ = fake_engine(lambda place: [*reply, 0][min(place - prompt + 1, len(reply))], **kwargs)
        request = engine.add([1] * prompt, params)
        guesses.tell(request.choices[0], [1] * prompt + reply)
        transcript = transcribe(engine, request)
        choice = request.choices[0]
        assert engine.stats.pages_used == 0 and (depth or choice.finish_reason == transcript.finish_reason)
        assert params.stop_strings or output_ids(choice) == transcript.token_ids  # a stop string is found later
        found.append((transcript.token_ids, transcript.finish_reason, transcript.text or ""))
    assert found[0] == found[1] and (len(found[1][0]) < 4 or engine.stats.counts.tokens_per_step > 1.5)
    return found[0]


@pytest.mark.parametrize(
    "params, reply, expected",
    [
        (SamplingParams(max_tokens=3), [1, 2, 3, 4], ([1, 2, 3], "length", "ABC")),
        (SamplingParams(), [1, EOS], ([1, EOS], "stop", "A")),
        (SamplingParams(max_tokens=3, ignore_eos=True), [1, EOS, 2], ([1, EOS, 2], "length", "A\x7fB")),
        (SamplingParams(stop_token_ids=[5]), [1, 5], ([1, 5], "stop", "A")),
        (SamplingParams(stop="BC"), [1, 2, 3], ([1, 2, 3], "stop", "A")),
        (SamplingParams(stop=["ZZ", "C"], max_tokens=4), [1, 2, 3], ([1, 2, 3], "stop", "AB")),
        (SamplingParams(stop="BX", max_tokens=3), [1, 2, 3], ([1, 2, 3], "length", "ABC")),
        (SamplingParams(min_tokens=2), [EOS, 4, EOS], ([0, 4, EOS], "stop", "@D")),
        (SamplingParams(min_tokens=2, stop_token_ids=[5]), [5, 1, 5], ([6, 1, 5], "stop", "FA")),
        (SamplingParams(min_tokens=3, stop="A"), [1, 2, 1], ([1, 2, 1], "stop", "AB")),
        (SamplingParams(max_tokens=2), [62, 1], ([62, 1], "length", "é")),
        (SamplingParams(max_tokens=2), [1, 62], ([1, 62], "length", "A\ufffd")),
        (SamplingParams(max_tokens=6), [*range(1, 20)], ([1, 2, 3, 4, 5, 6], "length", "ABCDEF")),
        (SamplingParams(), [1, 2, 3, 4, EOS, 6, 7], ([1, 2, 3, 4, EOS], "stop", "ABCD")),
        (SamplingParams(stop_token_ids=[4]), [*range(1, 20)], ([1, 2, 3, 4], "stop", "ABC")),
        (SamplingParams(stop_token_ids=[4], ignore_eos=True), [EOS, 4, 1], ([EOS, 4], "stop", "\x7f")),
        (SamplingParams(stop="DE", max_tokens=20), [*range(1, 30)], ([1, 2, 3, 4, 5], "stop", "ABC")),
    ],
)
def test_finish(params: SamplingParams, reply: list[int], expected: tuple[list[int], str, str]) -> None:
    assert ends(params, reply) == expected


def test_tokens_after_a_stop_string_are_dropped() -> None:
    engine, _ = fake_engine(lambda position: position + 1)
    params = SamplingParams(stop="B", max_tokens=5)
    engine.add([1], params)
    late = Transcript(params, Letters())  # does not report the stop string to the engine
    shown = "".join(late.add(token) for step in engine.run() for token in single_tokens(step.tokens))
    assert (shown, late.text, late.token_ids, late.finish_reason) == ("A", "A", [1, 2], "stop")


def test_the_context_ends_a_choice() -> None:
    for most, prompt, made in ((None, 10, 22), (30, 31, 1)):
        ids, reason, _ = ends(SamplingParams(max_tokens=most), [1] * 40, prompt=prompt, max_context=32)
        assert (len(ids), reason) == (made, "length")


@pytest.mark.parametrize("vocab", [5, 20, 64, 65, 500, 5000])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_top_logprobs_are_the_largest_of_a_log_softmax_with_ties_by_id(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(10):
        logits = rng.integers(-40, 40, vocab).astype(np.float32)  # many values are equal
        expected = logits.astype(float) - np.logaddexp.reduce(logits.astype(float))
        order = sorted(range(vocab), key=lambda i: (-logits[i], i))
        found = list(top_logprobs(logits, count, 0, float(expected[0])).items())
        assert found == [(token, pytest.approx(expected[token], abs=1e-4)) for token in order[:count]]


@pytest.mark.parametrize("step_tokens", [4, 16, 300])
def test_hidden_states_are_pooled_wherever_the_prompt_is_cut(step_tokens: int) -> None:
    """Pooling works even if the request loses its KV pages and must begin again. The fake hidden state of a token is
    its position, counted from 1."""
    engine, _ = fake_engine(step_tokens=step_tokens, pages=12)
    other = engine.add([1], SamplingParams(max_tokens=100, ignore_eos=True))
    wanted = {engine.add(list(range(50)) * 3, pooled("mean")).first: 75.5}
    wanted |= {engine.add(list(range(50)) * 3, pooled("last")).first: 150.0, engine.add([7], pooled("mean")).first: 1.0}
    begun = [(step.tokens.choice[i], one) for step in engine.run() for i, one in step.tokens.begun.items()]
    found = {number: float(one.pooled[0]) for number, one in begun if one.pooled is not None}
    assert found == wanted and other.choices[0].outputs == 100
    assert engine.stats.preemptions or step_tokens > 4


def test_facts_of_a_first_token_go_to_its_own_frontend() -> None:
    """Each frontend numbers its own choices, so two frontends may use the same number."""
    engine, _ = fake_engine()
    for reader in range(2):
        engine.add([1] * (1 + reader), pooled("last"), first=7, reader=reader)
    step = engine.step()
    assert [[b.pooled for b in _some(step.tokens, step.reader == i).begun.values()] for i in (0, 1)] == [[[1]], [[2]]]


def pooled(how: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, pooling=how)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "prompt is empty"),
        ([1, 64], {}, "token 64 is outside the vocabulary of 64"),
        ([-1], {}, "token -1 is outside"),
        ([1] * 33, {}, "33 tokens, more than the context of 32"),
        ([1], {"stop_token_ids": [64]}, "stop_token_ids: token 64"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias: token 99"),
    ],
)
def test_prompts_that_cannot_run(prompt: list[int], params: dict[str, Any], message: str) -> None:
    engine, _ = fake_engine(max_context=32)
    with pytest.raises(MegakernelError, match=message):
        engine.add(prompt, SamplingParams(**params))
    assert engine.idle


def test_the_kv_pool_gets_what_weights_leave_of_a_gpu() -> None:
    assert pool_bytes(80e9, 16_000_000_000, gpu=True) == pytest.approx(52e9)
    assert pool_bytes(80e9, 80_000_000_000, gpu=True) == 0
    assert pool_bytes(80e9, 16_000_000_000, gpu=False) == 20e9


def test_kv_capacity() -> None:
    from megakernel.isa import Dtype

    per_token = token_bytes(CONFIG, Dtype.F32)
    assert per_token == 2 * 8 * 4  # K and V: 1 layer, 1 KV head of size 8, float32
    for free, context, found in (
        *((1e9, None, (256, 1024)), (4 * 300 * per_token, None, (256, 300))),
        *((4 * 100 * per_token, None, (100, 100)), (4 * 100 * per_token, 200, (200, 200))),
    ):
        assert kv_capacity(256, per_token, free, free / 4, context, 4) == found
    for free, context, message in ((1e9, 257, "limit of 256"), (100 * per_token, 200, "choose a shorter context")):
        with pytest.raises(MegakernelError, match=message):
            kv_capacity(256, per_token, free, free / 4, context, 4)
    with pytest.raises(MegakernelError, match=r"no room for a KV cache in 80\.0 GB of memory: use more ranks"):
        kv_capacity(256, per_token, 80e9, 0, None, 4)


def test_weight_bytes_counts_every_weight_once() -> None:
    engine, _ = fake_engine()
    embed, qkv, o, mlp = 64 * 16, 32 * 16, 16 * 16, 3 * 24 * 16
    vectors = 2 * 4 + 3 * 16  # frequencies and factors of RoPE pairs, and norm weights
    expected = 4 * (embed + qkv + o + mlp + vectors)
    biased = replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True)
    biases = 4 * (32 + 16 + 2 * 24 + 16)
    for config, tied, more in ((CONFIG, True, 0), (CONFIG, False, 4 * embed), (biased, True, biases)):
        split = engine.dims.split
        assert weight_bytes(passes.apply(forward(config), split), split, tied=tied) == expected + more


BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def test_prompts_and_parameters_are_checked_before_anything_runs() -> None:
    with LLM(TINY, backend="reference", max_context=64) as llm:
        for prompts, params, message in (
            ([[1]], [SamplingParams()] * 2, "2 sampling parameters for 1 prompts"),
            ("text", None, "no tokenizer"),
            ([1], SamplingParams(stop="x"), "stop strings need a tokenizer"),
            ([1, [2]], None, "a list mixes token ids with other prompts"),
        ):
            with pytest.raises(MegakernelError, match=message):
                llm.generate(prompts, params)  # type: ignore[arg-type]
        with pytest.raises(MegakernelError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
        assert llm.engine.idle


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 3}, "parallel size 3: it must be 1, 2, 4 or 8"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"backend": "tpu"}, "unknown backend 'tpu'"),
        ({"threads": 0}, "threads=0"),
        *(({"speculate": depth}, f"speculate={depth} must be from 0") for depth in (-1, 64)),
        ({"max_context": 257}, "exceeds the model's limit of 256"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens=8 must be at least max_num_seqs=9"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MegakernelError, match=message):
        LLM(TINY, **options)


@BACKENDS
def test_traced_steps(backend: str) -> None:
    with LLM(TINY, backend=backend, max_context=64, max_num_batched_tokens=8, max_num_seqs=1) as llm:
        prefill, decode = llm.trace_steps(list(range(12)), decode_steps=2)
    assert [step.rows for step in prefill + decode] == [[8], [4], [1], [1]]
    for step in prefill + decode:
        assert step.output.trace is not None and step.output.trace.header.program == step.program.hash
