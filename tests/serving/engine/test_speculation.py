"""Speculative decoding ends choices as decoding one token per step does, and the engine stops speculating while that
does not save time. test_independence.py tests that all tokens and scores stay the same."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from api_support import serving
from engine_support import EOS, EvenTimes, Guesses, Known, fake_engine, output_ids, speculation, transcribe

from megakernel import LLM, SamplingParams
from megakernel.serving.engine.engine import Engine
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.speculation import Draft, Lookup, Speculation, StepTimes
from megakernel.serving.text.codec import Token, single_tokens

# -- the end of a choice


def guessing(reply: list[int], depth: int = 8, **limits: Any) -> tuple[Engine, Guesses]:
    """Return an engine that answers `reply` to a prompt of one token, and its `Guesses`, whose proposals are right."""
    guesses = Guesses()
    engine, _ = fake_engine(lambda place: [*reply, 0][min(place, len(reply))], speculate=(depth, guesses), **limits)
    return engine, guesses


@pytest.mark.parametrize(
    "given, reply, made, reason",
    [
        ({"max_tokens": 6}, range(1, 20), range(1, 7), "length"),
        ({"max_tokens": 2}, range(1, 20), range(1, 3), "length"),
        ({"max_tokens": 15}, [1, 2, 3, 4, EOS, 6, 7], [1, 2, 3, 4, EOS], "stop"),
        ({"max_tokens": 15, "stop_token_ids": [4]}, range(1, 20), range(1, 5), "stop"),
        ({"max_tokens": 15, "stop_token_ids": [4], "ignore_eos": True}, [EOS, 4, 1], [EOS, 4], "stop"),
        ({"max_tokens": None}, range(1, 50), range(1, 32), "length"),
    ],
)
def test_nothing_comes_after_the_end(
    given: dict[str, Any], reply: Sequence[int], made: Sequence[int], reason: str
) -> None:
    engine, guesses = guessing(list(reply), max_context=32)
    request = engine.add([1], SamplingParams(**given))
    guesses.tell(request.choices[0], [1, *reply])
    tokens = [token for step in engine.run() for token in single_tokens(step.tokens)]
    assert [t.token_id for t in tokens] == list(made) == output_ids(request.choices[0])
    assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + [reason]
    assert engine.stats.pages_used == 0 and (len(made) < 3 or engine.stats.counts.tokens_per_step > 1.5)


def test_a_stop_string_inside_an_accepted_run_ends_text_and_choice() -> None:
    reply = list(range(1, 30))
    engine, guesses = guessing(reply)
    request = engine.add([1], SamplingParams(stop="DE", max_tokens=20))
    guesses.tell(request.choices[0], [1, *reply])
    transcript = transcribe(engine, request)
    assert (transcript.text, transcript.token_ids, transcript.finish_reason) == ("ABC", [1, 2, 3, 4, 5], "stop")
    assert engine.idle and engine.stats.pages_used == 0 and request.choices[0].outputs > 5


def test_readers_see_no_token_after_a_stop_string(model: str) -> None:
    how: dict[str, Any] = {"backend": "cpu", "max_context": 256, "max_num_seqs": 4, "threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(model, **how) as llm:
        whole = llm.generate("hello hello", params)[0]
        assert whole.text is not None
        stop = next(c for c in whole.text[20:] if c.isascii() and c not in whole.text[:20])
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=stop)
        expected = llm.generate("hello hello", params)[0]
    texts = [whole.prompt_token_ids + whole.token_ids]
    with LLM(model, **how, speculate=7) as llm:
        llm.engine._speculation = speculation(7, lambda _: Known(texts))
        seen: list[Token] = []
        shown: list[str] = []

        def note(token: Token, text: str) -> None:
            seen.append(token)
            shown.append(text)

        found = llm.generate("hello hello", params, on_token=note)[0]
        assert found.outputs == expected.outputs and found.text == expected.text == "".join(shown)
        assert [token.token_id for token in seen] == expected.token_ids
        assert llm.engine.stats.counts.tokens_per_step > 3


def test_the_server_streams_the_same_text_and_counts_what_it_verified(model: str) -> None:
    how: dict[str, Any] = {"backend": "cpu", "max_context": 256, "max_num_seqs": 4, "threads": 1}
    body = {"model": "m", "prompt": "abcabcabcabc", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    with LLM(model, **how) as llm:
        known = llm.generate("abcabcabcabc", SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))[0]
    texts = [known.prompt_token_ids + known.token_ids]
    answers = []
    for depth in (0, 6):
        with LLM(model, **how, speculate=depth) as llm:
            if depth:
                llm.engine._speculation = speculation(depth, lambda _: Known(texts, lambda place: place % 3 == 0))
            with serving(llm, names=["m"]) as live:
                whole = live.post("/v1/completions", body | {"logprobs": 2})["choices"]
                pieces = [event["choices"][0]["text"] for event in live.events("/v1/completions", body)]
                metrics = live.request("GET", "/metrics")[2].decode().splitlines()
            answers.append((whole, "".join(pieces)))
    assert answers[0] == answers[1]
    values = {line.split("{")[0]: float(line.split()[-1]) for line in metrics if "{" in line}
    counts = llm.engine.stats.counts
    assert values["vllm:spec_decode_num_draft_tokens_total"] == counts.proposed > 0
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == counts.accepted > 0
    assert values["megakernel:tokens_per_step"] == counts.tokens_per_step > 1


# -- KV pages and the step budget


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_pages_with_rejected_tokens_are_not_taken_for_full_ones(share: float) -> None:
    rng = random.Random(0)
    guesses = Guesses(lambda place: rng.random() < share)
    engine, backend = fake_engine(lambda place: place % 60, speculate=(9, guesses))
    for prompt in ([3] * 10, [7] * 21):
        request = engine.add(prompt, SamplingParams(max_tokens=60))
        text = prompt + [place % 60 for place in range(len(prompt) - 1, 100)]
        guesses.tell(request.choices[0], text)
        while not engine.idle:
            engine.step()
            slots = engine._batch.slots
            for slot in slots.order:  # other sequences may share only pages of accepted tokens
                full, pages = slots.known_pages[slot] * 16, slots.pages_of(slot)
                assert full <= slots.known[slot] and all((pages[i // 16], i % 16) in backend.kv for i in range(full))
        assert engine.stats.pages_used == 0
        again = engine.add(request.choices[0].tokens, SamplingParams(max_tokens=1))
        guesses.tell(again.choices[0], text)
        for _ in engine.run():
            pass
        assert again.cached_tokens == (len(request.choices[0].tokens) - 1) // 16 * 16


def test_pages_of_rejected_tokens_are_given_back() -> None:
    guesses = Guesses(lambda place: True)
    engine, _ = fake_engine(lambda place: place % 60, speculate=(4, guesses))
    times = Table(0, *[1.0] * 20)
    engine._speculation = Speculation(4, times, guesses)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    [choice] = request.choices
    guesses.tell(choice, [1, 2, 3, *(place % 60 for place in range(2, 100))])
    held = []
    while not engine.idle:
        engine.step()
        computed = int(engine._batch.slots.computed[choice.slot]) if choice.slot >= 0 else 0
        if computed:
            held.append(len(engine._batch.slots.pages_of(choice.slot)))
            assert held[-1] == -(-computed // 16)
        if computed > 16:
            times.seconds = (0, 1.0, *[9.0] * 20)  # makes verification too slow
    assert any(after < before for before, after in pairwise(held))


# -- proposals


def longest(tokens: list[int], count: int) -> tuple[int, list[list[int]]]:
    """Return the length of the longest suffix that occurs earlier in `tokens`, and what followed each occurrence."""
    for length in range(len(tokens) - 1, 1, -1):
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
        if ends:
            return length, [(tokens[e:] * count)[:count] for e in ends]
    return 0, []


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_lookup_continues_the_longest_suffix(vocab: int) -> None:
    rng = random.Random(vocab)
    tokens = [rng.randrange(vocab)]
    lookup = Lookup()
    lookup.read(tokens)
    exact = 0
    for step in range(120):
        length, follow = longest(tokens, 5)
        found, known = lookup.propose(5)
        assert bool(found) == bool(length >= 2) and known <= length
        exact += found in follow if length else 1
        new = tokens[3 : 3 + rng.randrange(6)] if step % 9 == 0 else [rng.randrange(vocab)]
        lookup.read(new)
        tokens += new
    # Lookup compares only the latest places where a suffix occurred, so it may miss the longest suffix.
    assert exact >= {2: 80, 4: 115, 30: 120}[vocab]


def test_lookup_of_short_texts_and_of_nothing() -> None:
    def propose(tokens: list[int], count: int) -> list[int]:
        lookup = Lookup()
        lookup.read(tokens)
        return lookup.propose(count)[0]

    assert [propose(tokens, 3) for tokens in ([1], [1, 1], [1, 2, 3], [1, 2, 1, 2])] == [[], [], [], [1, 2, 1]]
    assert propose([1, 1, 1], 4) == [1, 1, 1, 1] and propose([1, 1, 1], 0) == []


# -- verification only where it saves time


class Table(EvenTimes):
    """Step times for a test: `seconds[n]` is the time of a step with n token rows."""

    def __init__(self, *seconds: float, late: float = 0.0) -> None:
        self.seconds, self.late_s = seconds, late

    def growing(self, tokens: int, logit_rows: int, most: int) -> list[float]:
        return [self.seconds[tokens + more] for more in range(most + 1)]


def rows_of_steps(times: EvenTimes, wrong: Callable[[int], bool], steps: int) -> list[int]:
    """Return the number of token rows in each decode step of one sequence."""
    guesses = Guesses(wrong)
    engine, backend = fake_engine(lambda place: place % 60, speculate=(4, guesses))
    engine._speculation = Speculation(4, times, guesses)
    request = engine.add([1], SamplingParams(max_tokens=250))
    guesses.tell(request.choices[0], [1, *(place % 60 for place in range(300))])
    while not engine.idle and len(backend.tables) <= steps:
        engine.step()
    return [sum(count for _, count in step) for step in backend.steps()][1:steps]


def test_rows_that_cost_nothing_are_verified_and_rows_that_cost_a_step_are_not() -> None:
    assert rows_of_steps(Table(0, *[1.0] * 5), lambda place: False, 20) == [5] * 19
    assert rows_of_steps(Table(0, 1.0, 2.0, 3.0, 4.0, 5.0), lambda place: False, 15) == [1] * 14
    assert rows_of_steps(Table(0, *[1.0] * 5, late=9.0), lambda place: False, 15) == [1] * 14


def test_it_goes_off_where_proposals_are_wrong_and_comes_back_where_they_become_right() -> None:
    times = Table(0, 1.0, 1.2, 1.4, 1.6, 1.8)
    rows = rows_of_steps(times, lambda place: place < 120, 200)
    first = rows.index(1)
    assert first < 8
    assert rows[first : first + 80].count(1) >= 76 and set(rows[first : first + 80]) == {1, 2}  # 2: one-token probe
    assert rows[-8:-3] == [5] * 5


def test_wrong_proposals_cost_little_and_gains_may_be_lost_again() -> None:
    """Proposals that seem worth their time are wrong from place 60 on."""
    rows = rows_of_steps(Table(0, 1.0, 1.5, 1.6, 1.7, 1.8), lambda place: place >= 60, 200)
    wrong = rows[next(i for i, before in enumerate(accumulate(rows)) if before >= 60) :]
    assert 0.5 < sum(0.4 + 0.1 * n for n in wrong if n > 1) < 2.0 + 0.02 * len(wrong) + 0.8


def test_acceptance_is_that_of_tokens_whose_predecessors_were_right() -> None:
    draft = Draft(Lookup())
    for _ in range(60):
        draft.learn(4, 2)  # 2 tokens right, 1 wrong, 1 not tried
    assert draft.acceptance.rate(0) == pytest.approx(20 / 32, abs=0.01) and draft.acceptance.rate(300) > 0.95


@pytest.mark.parametrize("wrong, first", [(False, 4), (True, 1)])
def test_a_sequence_begins_with_what_others_have_shown(wrong: bool, first: int) -> None:
    guesses = Guesses(lambda place: wrong)
    engine, backend = fake_engine(lambda place: place % 60, speculate=(4, guesses))
    engine._speculation = Speculation(4, Table(0, 1.0, 1.35, 1.7, 2.05, 2.4), guesses)

    def rows() -> list[int]:
        """Return the number of token rows in each step of a new sequence."""
        before = len(backend.tables)
        request = engine.add([1], SamplingParams(max_tokens=100))
        guesses.tell(request.choices[0], [1, *(place % 60 for place in range(120))])
        while not engine.idle:
            engine.step()
        return [sum(count for _, count in step) for step in backend.steps()][before:]

    assert rows()[0] == 2  # at the initial acceptance rate of 1/2, verifying one proposal saves the most time
    assert rows()[0] == first


def test_many_sequences_share_the_rows_that_pay() -> None:
    """A sequence whose proposals are always right gets all rows that save time; one with wrong proposals gets none."""

    def known(choice: Any) -> Known:
        [first] = choice.request.prompt_ids
        return Known([[first, *(place % 60 for place in range(200))]], lambda place: first == 2)

    engine, backend = fake_engine(lambda place: place % 60)
    engine._speculation = Speculation(4, Table(0, 1, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8), known)
    requests = [engine.add([token], SamplingParams(max_tokens=100)) for token in (1, 2)]
    for _ in range(15):
        engine.step()
    assert dict(backend.steps()[-1]) == {requests[0].choices[0].slot: 5, requests[1].choices[0].slot: 1}


def test_times_are_measured_ones_then_lines_between_them_then_predictions() -> None:
    def compile(*, tokens: int, logit_rows: int) -> Any:
        return SimpleNamespace(dims=SimpleNamespace(bucket=SimpleNamespace(tokens=tokens, logit_rows=logit_rows)))

    programs = Programs(compile, 64, 64)
    times = StepTimes(programs, lambda program: 1.0 + program.dims.bucket.tokens)
    assert times.growing(1, 1, 3) == [2.0, 3.0, 4.0, 5.0]
    times.record(programs.get(1, 1), 6.0)
    assert times.growing(1, 1, 3) == [6.0, 9.0, 12.0, 15.0]
    for seconds in (8.0, 5.0, 30.0):
        times.record(programs.get(3, 3), seconds)
    assert times.growing(1, 1, 5) == pytest.approx([6.0, 7.0, 8.0, 10.0, 14.0, 14.0])
    for _ in range(100):
        times.record(programs.get(1, 1), 6.0)
    assert times.growing(1, 1, 2) == [6.0, 9.0, 12.0]
    assert times.late_s == 0.0
    times.record_late(0.5)
    times.record_late(0.25)
    assert times.late_s == 0.25
