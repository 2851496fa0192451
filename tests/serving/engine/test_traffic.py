"""Under random traffic, every request gets the tokens that it would get alone, every step table has the parameters of
its requests, and no slot or page is lost or used twice."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from engine_support import Guesses, alone, continuation, digest, fake_engine, output_ids

from megakernel import SamplingParams
from megakernel.isa import StepTable
from megakernel.runtime.steps import FLOATS
from megakernel.serving.engine import mask_time
from megakernel.serving.engine.grammars import Words
from megakernel.serving.engine.request import Request
from megakernel.serving.engine.scheduler import SCORED_ROWS
from megakernel.serving.text.codec import single_tokens

now = 0.0  # the seconds that steps and masks have taken so far


class SlowWords(Words):
    """Allows all tokens. Its masks take 10 ms."""

    def write(self, mask: Any) -> None:
        global now
        now += 0.01
        super().write(mask)


SLOW = SlowWords(64, None, [])


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_time, "perf_counter", lambda: now)


def random_params(rng: random.Random) -> SamplingParams:
    most = rng.randint(1, 60)
    return SamplingParams(
        seed=rng.randrange(2**64),
        temperature=rng.choice([0.0, 0.7]),
        top_k=rng.choice([-1, 0, 5]),
        max_tokens=rng.choice([most, most, None]),
        min_tokens=rng.randint(0, most) if rng.random() < 0.2 else 0,
        n=rng.choice([1, 1, 1, 2, 4]),
        stop_token_ids=[rng.randrange(60) for _ in range(rng.choice([0, 0, 1, 3]))],
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, None, 0, 1]),
        logit_bias={rng.randrange(64): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 0, 1, 4]))},
        repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
        **{name: rng.choice([0.0, 0.25, 0.5]) for name in ("min_p", "presence_penalty", "frequency_penalty")},
        top_p=rng.choice([0.5, 1.0]),
    )


class Traffic:
    """An engine with random limits. `met` counts how often each kind of event has occurred, by its name."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.met = Counter[str]()
        depth, share = rng.choice([0, 4]), rng.choice([0, 20, 100])
        self.guesses = Guesses(lambda place: digest([place, seed]) % 100 < share)
        self.most = {"max_seqs": rng.choice([1, 2, 5, 9, 17]), "step_tokens": rng.choice([9, 16, 50])}
        self.engine, self.backend = fake_engine(
            None,
            pages=rng.choice([17, 24, 40, 120]),
            prefix_cache=rng.random() < 0.8,
            speculate=(depth, self.guesses) if depth else None,
            queues=rng.random() < 0.6,
            **self.most,
        )
        self.prefixes = [[rng.randrange(60) for _ in range(100)] for _ in range(3)]
        self.requests: list[Request] = []
        self.stopped: set[int] = set()
        self.told: dict[int, list[int]] = {}  # the tokens that steps returned, by the number of their choice
        share = rng.choice([0.0, 0.5, 1.0])
        self.backend.early = lambda: rng.random() < share
        begin = self.backend.start
        self.backend.start = lambda program, table, **more: (  # type: ignore[method-assign]
            self.check_table(table),
            begin(program, table, **more),
        )[1]

    def add(self) -> None:
        rng, prefix = self.rng, self.rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, 100)] + [rng.randrange(60) for _ in range(rng.randint(1, 30))]
        params, client = random_params(rng), rng.choice("abc")
        if client == "a":
            params = replace(params, allowed_token_ids=range(64))
        request = self.engine.add(prompt, params, client=client, constraint=SLOW if client == "a" else None)
        self.requests.append(request)
        for choice in request.choices:
            # `text` is what the backend will produce, except where a bias forbids a token.
            text, said = list(prompt), digest(prompt)
            for _ in range(256):
                text.append(continuation(said, request.seed & 0xFFFFFFFF, choice.choice))
                said = digest(text[-1:], said)
            self.guesses.tell(choice, text)

    def stop(self) -> None:
        request = self.rng.choice(self.requests)
        self.stopped.add(request.id)
        if self.rng.random() < 0.5:
            self.engine.stop(request, self.rng.randrange(len(request.choices)))
        else:
            self.engine.abort(request)
            assert request.done and all(choice.slot < 0 for choice in request.choices)
        self.met["aborts"] += 1

    def check_table(self, table: StepTable) -> None:
        """Check that each logit row has the parameters of its request, and that the step keeps to its limits."""
        slots, rows = self.engine._batch.slots, int((table.row_seq >= 0).sum())
        used = int((table.logit_rows >= 0).sum())
        ended, generated = False, Counter[int]()  # any row of an aborted request; generated rows by slot
        assert 0 < rows <= self.most["step_tokens"] and used <= max(self.most["max_seqs"], SCORED_ROWS)
        for i in range(used):
            row = int(table.logit_rows[i])
            slot, position = int(table.row_seq[row]), int(table.positions[row])
            sequence: Any = slots.sequence[slot]
            if sequence is None:  # its request was aborted after the step was planned
                ended = True
                continue
            request, params = sequence.request, sequence.request.params
            generated[slot] += position >= len(request.prompt_ids)
            pairs = range(int(table.bias_begin[i]), int(table.bias_end[i]))
            bias = {int(table.bias_ids[j]): float(table.bias_values[j]) for j in pairs}
            if table.target[i] >= 0:
                assert table.target[i] == request.prompt_ids[position + 1] and table.sample_slot[i] == -1
                self.met["scored rows"] += 1
                continue
            early = position + 1 - len(request.prompt_ids) < params.min_tokens
            wanted = dict(params.logit_bias) | (dict.fromkeys(request.stop_ids, float("-inf")) if early else {})
            assert bias == pytest.approx(wanted) and int(table.sample_position[i]) == position + 1
            for name in FLOATS:
                assert getattr(table, name)[i] == pytest.approx(getattr(params, name))
            seed = (int(table.seed_high[i]) & 0xFFFFFFFF) << 32 | int(table.seed_low[i]) & 0xFFFFFFFF
            told = (table.top_k[i], table.choice[i], table.prompt_length[i], seed)
            assert told == (max(params.top_k, 0), sequence.choice, len(request.prompt_ids), request.seed)
            self.met["biased rows"] += bool(bias)
        proposed = max(generated.values(), default=0) > 1
        assert not (ended and proposed)  # a step with proposals has no rows of aborted requests
        self.met["lengthened steps"] += proposed
        self.met["queued steps"] += len(self.backend.under_way)
        self.met["deferred tokens"] += int((table.token_ids < 0).sum())

    def step(self, failing: float) -> None:
        global now
        engine, backend = self.engine, self.backend
        now += 0.02
        backend.interrupt = self.rng.random() < failing
        try:
            for token in single_tokens(engine.step().tokens):
                self.told.setdefault(token.choice, []).append(token.token_id)
        except KeyboardInterrupt:
            self.met["interrupts"] += 1
            backend.kv.clear()
        backend.tables.clear()
        self.met["resting"] += engine._batch.mask_time.rests("a")
        slots, stats = engine._batch.slots, engine.stats
        pages = {page for at in slots.order for page in slots.pages_of(at)}
        assert stats.pages_used == len(pages) and stats.running == len(slots.order) == len(set(slots.order))
        assert sorted([*slots.order, *engine._batch._slots]) == list(range(self.most["max_seqs"]))
        self.check_answers()

    def check_answers(self) -> None:
        """Check the answers that have ended, except those that were stopped, and forget them."""
        for request in [one for one in self.requests if one.done]:
            self.requests.remove(request)
            if request.id in self.stopped:
                continue
            for choice in request.choices:
                assert (output_ids(choice), choice.finish_reason) == alone(request, choice.choice)
                assert self.told[request.first + choice.choice] == output_ids(choice)
                self.met["generated alone"] += 1
            if request.params.prompt_logprobs is not None:
                prompt = request.prompt_ids
                assert request.prompt_logprobs == [-float(place) for place in range(1, len(prompt))]
                assert [list(top)[:1] for top in request.prompt_top_logprobs] == [[token] for token in prompt[1:]]


def run(seed: int, steps: int) -> Counter[str]:
    """Run `steps` steps under random traffic, and then until all requests are answered."""
    traffic = Traffic(seed)
    rng, engine = traffic.rng, traffic.engine
    busy, failing, stopping = rng.choice([0.05, 0.3, 0.6]), rng.choice([0.0, 0.02]), rng.choice([0.03, 0.3])
    for _ in range(steps):
        while engine.idle or (engine.stats.waiting < 20 and rng.random() < busy):
            traffic.add()
        if traffic.requests and rng.random() < stopping:
            traffic.stop()
        if rng.random() < 0.005:
            engine.reset_prefix_cache()
        if not engine.idle:
            traffic.step(failing)
    while not engine.idle:
        traffic.step(0.0)
    traffic.check_answers()
    assert not traffic.requests and engine.stats.pages_used == 0
    engine.close()
    assert not traffic.backend.under_way
    stats = engine.stats
    return traffic.met + Counter(preemptions=stats.preemptions, hits=stats.prefix_hits, accepted=stats.counts.accepted)


def test_the_traffic_meets_everything() -> None:
    met = sum((run(seed, 50) for seed in (7, 8)), Counter[str]())
    assert len(met) == 12, met  # a sum of counters has no zeros


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_every_request_gets_what_it_would_get_alone(seed: int) -> None:
    run(seed, 60)


def test_slow_masks_delay_only_the_client_that_asked() -> None:
    """A client with slow grammars has taken all slots, but another client's answer soon begins, and takes a quarter of
    its time longer than alone. The slow answers come too, in turn."""
    global now
    engine, _ = fake_engine(None, max_seqs=16)
    params = SamplingParams(max_tokens=100, allowed_token_ids=range(64), ignore_eos=True, seed=1)
    slow = [engine.add([1], params, client="slow", constraint=SLOW) for _ in range(40)]
    for _ in range(3):
        engine.step()
    began = now
    other = engine.add([1], SamplingParams(max_tokens=200, ignore_eos=True, seed=2), client="other")
    while not other.done:
        now += 0.001
        engine.step()
    assert now - began < 0.2 * 1.5 + 0.3
    made = [one.choices[0].outputs for one in slow[:14]]
    assert min(made) > 3 and max(made) - min(made) < 5
    for _ in engine.run():
        pass
    for request in (other, *slow):
        assert (output_ids(request.choices[0]), request.choices[0].finish_reason) == alone(request, 0)
