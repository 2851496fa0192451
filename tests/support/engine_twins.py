"""Compares the engine with `SlowEngine`, a simple implementation of the same rules, under the same random traffic, and
the tokens of each request with those that it would get alone. To run at least STEPS steps:
`python tests/support/engine_twins.py STEPS SEED`."""

import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_support import EOS, FakeBackend, Guesses, alone, continuation, digest, fake_engine, output_ids, speculation
from msgspec.structs import replace
from slow_engine import SlowEngine, SlowSpeculation, SlowStep

from megakernel import SamplingParams
from megakernel.isa import STEP_FIELDS, StepTable, ceil_div
from megakernel.serving.engine.engine import Engine, Step
from megakernel.serving.engine.request import Request


@dataclass
class Twins:
    """The two engines and their backends. `met` counts how often each kind of event has occurred, by its name."""

    fast: Engine
    slow: SlowEngine
    backends: tuple[FakeBackend, FakeBackend]
    met: Counter[str]

    def add(
        self, prompt: list[int], params: SamplingParams, guesses: tuple[Guesses, Guesses]
    ) -> tuple[Request, Request]:
        requests = self.fast.add(prompt, params), self.slow.add(list(prompt), params)
        for request, told in zip(requests, guesses, strict=True):
            for choice in request.choices:
                text, said = list(prompt), digest(prompt)
                # Make `text` the tokens that the backend will produce, except where a bias forbids a token.
                for _ in range(256):
                    text.append(continuation(said, request.seed & 0xFFFFFFFF, choice.choice))
                    said = digest(text[-1:], said)
                told.tell(choice, text)
        return requests

    def step(self) -> None:
        """Run one step of each engine, and assert that their step tables, tokens, statistics and states are equal."""
        steps: list[Step | SlowStep | None] = []
        for engine in (self.fast, self.slow):
            try:
                steps.append(engine.step())
            except KeyboardInterrupt:
                steps.append(None)
        fast, slow = steps
        assert (fast is None) == (slow is None)
        if fast and slow:
            assert (fast.rows, fast.contexts, fast.logit_rows) == (slow.rows, slow.contexts, slow.logit_rows)
            assert [replace(token, at=0.0) for token in fast.tokens] == slow.tokens
            self.met["tokens"] += len(slow.tokens)
        tables = [backend.tables for backend in self.backends]
        assert len(tables[0]) == len(tables[1])
        for one, other in zip(*tables, strict=True):
            assert_same_table(one, other)
            self.met["scored rows"] += int((one.target >= 0).sum())
            self.met["biased rows"] += int((one.bias_end > one.bias_begin).sum())
            self.met["deferred tokens"] += int((one.token_ids < 0).sum())
        for made in tables:
            made.clear()
        assert held(self.fast) == held(self.slow)
        assert self.fast.stats == self.slow.stats
        self.met["steps"] += 1


def held(engine: Engine | SlowEngine) -> Any:
    """Return an engine's waiting sequences, its running sequences with their slots and pages, and its free slots."""
    running: list[Any]
    if isinstance(engine, Engine):
        slots, free, waiting = engine._batch.slots, engine._batch._slots, list(engine._batch.waiting)
        running = [
            (s.request.id, s.choice, at, slots.pages_of(at), slots.computed[at], slots.known_pages[at])
            for at in slots.order
            for s in [slots.sequence[at]]
        ]
    else:
        batch: Any = engine.batch
        free, waiting = batch.slots, batch.waiting
        running = [(s.request.id, s.choice, s.slot, s.pages, s.computed, s.known_pages) for s in batch.running]
    return [(s.request.id, s.choice, len(s.tokens)) for s in waiting], running, list(free)


def assert_same_table(one: StepTable, other: StepTable) -> None:
    """Assert that two step tables agree in everything that an interpreter reads, except the assignment of attention.
    The fields with `per_rank` assign attention work to slots. Several assignments are valid, so these fields are not
    compared; `FakeBackend` checks them."""
    pairs, rows = int(other.bias_end.max()), int((other.row_seq >= 0).sum())
    for field in STEP_FIELDS:
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name == "block_tables":
            for slot, position in zip(other.row_seq[:rows], other.positions[:rows], strict=True):
                needed = ceil_div(int(position) + 1, other.dims.bucket.kv_page)
                np.testing.assert_array_equal(mine[slot, :needed], theirs[slot, :needed])
        elif not field.per_rank:
            end = pairs if field.name in ("bias_ids", "bias_values") else len(theirs)
            np.testing.assert_array_equal(mine[:end], theirs[:end], err_msg=field.name)


def twins(depth: int, **limits: Any) -> tuple[Twins, tuple[Guesses, Guesses]]:
    wrong = limits.pop("wrong")
    guesses = Guesses(wrong), Guesses(wrong)
    fast, backend = fake_engine(None, speculate=(depth, guesses[0]) if depth else None, **limits)
    other = FakeBackend(None)
    slow = SlowEngine(
        other,
        fast.programs,
        fast.dims,
        pages=limits["pages"],
        step_tokens=limits["step_tokens"],
        eos_ids=frozenset([EOS]),
        prefix_cache=limits["prefix_cache"],
        speculation=speculation(depth, guesses[1], SlowSpeculation) if depth else None,
    )
    return Twins(fast, slow, (backend, other), Counter()), guesses


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
    )


def compare(seed: int, steps: int) -> Counter[str]:
    """Run both engines for `steps` steps with random limits and random traffic. Return how often each event occurred.
    Raises AssertionError at the first difference."""
    rng = random.Random(seed)
    depth, share = rng.choice([0, 0, 0, 4]), rng.choice([0, 20, 100])
    both, guesses = twins(
        depth,
        max_seqs=rng.choice([1, 2, 5, 9, 17]),
        pages=rng.choice([17, 24, 40, 120]),
        step_tokens=rng.choice([9, 16, 50]),
        prefix_cache=rng.random() < 0.8,
        wrong=lambda place: digest([place, seed]) % 100 < share,
    )
    prefixes = [[rng.randrange(60) for _ in range(100)] for _ in range(3)]
    busy, failing = rng.choice([0.05, 0.3, 0.6]), rng.choice([0.0, 0.0, 0.01])
    added: list[tuple[Request, Request]] = []
    stopped: set[int] = set()
    while both.met["steps"] < steps:
        while both.fast.idle or (both.fast.stats.waiting < 20 and rng.random() < busy):
            prompt = rng.choice(prefixes)[: rng.randint(0, 100)] + [
                rng.randrange(60) for _ in range(rng.randint(1, 30))
            ]
            added.append(both.add(prompt, random_params(rng), guesses))
        for requests in rng.sample(added, 1) if rng.random() < 0.03 else []:
            choice = rng.randrange(len(requests[0].choices)) if rng.random() < 0.5 else -1
            stopped.add(requests[0].id)
            for engine, request in zip((both.fast, both.slow), requests, strict=True):
                if choice < 0:
                    engine.abort(request)
                else:
                    engine.stop(request, choice)
            both.met["aborts"] += 1
        if rng.random() < 0.005:
            both.fast.reset_prefix_cache()
            both.slow.reset_prefix_cache()
        assert both.fast.idle == both.slow.idle
        if both.fast.idle:
            continue
        interrupt = rng.random() < failing
        for backend in both.backends:
            backend.interrupt = interrupt
        both.step()
        if interrupt:
            both.met["interrupts"] += 1
            for backend in both.backends:
                backend.kv.clear()
        for request, other in added:
            assert [c.finish_reason for c in request.choices] == [c.finish_reason for c in other.choices]
            assert request.prompt_logprobs == other.prompt_logprobs and request.cached_tokens == other.cached_tokens
            assert request.prompt_top_logprobs == other.prompt_top_logprobs
        for request, other in [pair for pair in added if pair[0].done]:
            assert [c.tokens for c in request.choices] == [c.tokens for c in other.choices]
            for one in request.choices:
                if one.finish_reason != "abort" and request.id not in stopped:
                    assert (output_ids(one), one.finish_reason) == alone(request, one.choice)
                    both.met["generated alone"] += 1
        added = [pair for pair in added if not pair[0].done]
    stats = both.fast.stats
    both.met |= Counter(preemptions=stats.preemptions, hits=stats.prefix_hits, accepted=stats.counts.accepted)
    return both.met


def main() -> None:
    left, seed, met = int(sys.argv[1]), int(sys.argv[2]), Counter[str]()
    while met["steps"] < left:
        met += compare(seed, 500)
        seed += 1
    print(f"seeds {sys.argv[2]} to {seed - 1}:", dict(met))


if __name__ == "__main__":
    main()
