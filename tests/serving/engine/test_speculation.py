"""The engine stops speculating while that does not save time, and gives pages of rejected tokens back. The tests of
test_independence.py and test_engine.py check that all tokens, scores and ends stay the same."""

import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from api_support import serving, until
from engine_support import EvenTimes, Guesses, Known, fake_engine, speculation

from megakernel import LLM, SamplingParams
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.speculation import Draft, Lookup, Speculation, StepTimes


def test_readers_see_the_same_text_and_the_server_counts_what_it_verified(model: str) -> None:
    """Readers of the Python API see no token after a stop string."""
    how: dict[str, Any] = {"backend": "cpu", "max_context": 256, "max_num_seqs": 4, "threads": 1}
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True, "logprobs": 2}
    with LLM(model, **how) as llm:
        whole = llm.generate("hello hello", SamplingParams(**given))[0]
        text = whole.text or ""
        stop = next(c for c in text[20:] if c.isascii() and c not in text[:20])
        ended = llm.generate("hello hello", SamplingParams(**given, stop=stop))[0]
    seen: list[tuple[int, str]] = []
    with LLM(model, **how, speculate=7) as llm, serving(llm, names=["m"]) as live:
        known = [whole.prompt_token_ids + whole.token_ids]
        llm.engine._speculation = speculation(7, lambda _: Known(known, lambda place: place % 7 == 0))
        body = {"model": "m", "prompt": "hello hello", **given}
        choice = live.post("/v1/completions", body)["choices"][0]
        pieces = [event["choices"][0]["text"] for event in live.events("/v1/completions", body)]
        until(live.at_rest)
        counts = llm.engine.stats.counts
        assert live.metric("vllm:spec_decode_num_draft_tokens_total") == counts.proposed > 0
        assert live.metric("vllm:spec_decode_num_accepted_tokens_total") == counts.accepted > 0
        assert counts.tokens_per_step > 2
        params = SamplingParams(**given, stop=stop)
        found = llm.generate("hello hello", params, on_token=lambda token, text: seen.append((token.token_id, text)))[0]
    assert choice["text"] == "".join(pieces) == text
    assert choice["logprobs"]["token_logprobs"] == whole.outputs[0].token_logprobs
    assert found.outputs == ended.outputs and [token for token, _ in seen] == ended.token_ids
    assert found.text == ended.text == "".join(text for _, text in seen)


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
