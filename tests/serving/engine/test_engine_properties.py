"""A request generates the same tokens whatever else the engine does. The fake model makes each token depend on all
tokens before it, so that any lost or wrong token changes the output."""

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from engine_support import EOS, TINY, FakeBackend, alone, fake_engine, output_ids

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.model import RandomCheckpoint
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.runtime.steps import Steps
from megakernel.serving.engine.engine import Engine
from megakernel.serving.engine.request import ROOT, Request, page_hash
from megakernel.serving.engine.scheduler import PagePool
from megakernel.serving.text import llm as llm_module
from megakernel.serving.text.codec import single_tokens

PAGE = 16


def assert_generated_alone(*requests: Request) -> None:
    for request in requests:
        for choice in request.choices:
            assert (output_ids(choice), choice.finish_reason) == alone(request, choice.choice)
        if request.params.prompt_logprobs is not None:
            assert request.prompt_logprobs == [-float(p) for p in range(1, len(request.prompt_ids))]


def assert_at_rest(engine: Engine, backend: FakeBackend) -> None:
    stats = engine.stats
    assert engine.idle and (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert sorted(engine._batch._slots) == list(range(engine.dims.bucket.max_seqs))


def finish(engine: Engine, backend: FakeBackend) -> None:
    for _ in engine.run():
        pass
    assert_at_rest(engine, backend)


# -- prefix cache


def one(engine: Engine, prompt: list[int], **params: Any) -> Request:
    request = engine.add(prompt, SamplingParams(**{"seed": 1, "max_tokens": 3, "ignore_eos": False} | params))
    for _ in engine.run():
        pass
    assert_generated_alone(request)
    return request


@pytest.mark.parametrize("length, cached", [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (47, 32)])
def test_a_prompt_met_again_computes_only_what_follows_its_full_pages(length: int, cached: int) -> None:
    """The last prompt token is computed even if the cached pages hold the whole prompt."""
    engine, backend = fake_engine(None, step_tokens=64)
    prompt = [i % 50 for i in range(length)]
    assert one(engine, prompt).cached_tokens == 0
    backend.tables.clear()
    assert one(engine, prompt).cached_tokens == cached
    assert backend.steps()[0] == [(0, length - cached)]
    assert_at_rest(engine, backend)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    engine, _ = fake_engine(None)
    first = one(engine, [1] * 10, max_tokens=40, seed=3, min_tokens=40)
    second = one(engine, [*first.prompt_ids, *output_ids(first.choices[0]), 5, 6], max_tokens=4)
    assert second.cached_tokens == 48  # the first request's 49 input tokens fill 3 pages of 16 tokens


def test_scored_prompts_and_a_cache_that_is_off_or_reset_compute_everything() -> None:
    prompt = list(range(40))
    engine, _ = fake_engine(None)
    one(engine, prompt)
    assert one(engine, prompt, prompt_logprobs=0).cached_tokens == 0
    assert one(engine, prompt).cached_tokens == 32
    engine.reset_prefix_cache()
    assert one(engine, prompt).cached_tokens == 0
    engine, _ = fake_engine(None, prefix_cache=False)
    one(engine, prompt)
    assert one(engine, prompt).cached_tokens == 0


def test_the_other_choices_run_though_the_first_is_stopped_before_it_could_share() -> None:
    engine, backend = fake_engine(None)
    request = engine.add([i % 50 for i in range(40)], SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True))
    engine.step()
    engine.stop(request, 0)
    finish(engine, backend)
    assert [c.finish_reason for c in request.choices] == ["stop", "length", "length"]


def test_duplicate_prompts_at_once_and_the_longest_unused_page_is_given_up_first() -> None:
    engine, backend = fake_engine(None, pages=8, step_tokens=32)
    twins = [engine.add([7] * 33, SamplingParams(seed=s, max_tokens=5)) for s in (1, 1, 2)]
    finish(engine, backend)
    assert_generated_alone(*twins)
    first, second, third = (output_ids(twin.choices[0]) for twin in twins)
    assert first == second != third
    one(engine, [8] * 33)
    one(engine, [7] * 33)
    one(engine, [9] * 65)  # needs 5 of the 8 pages: evicts the prompt of 8s, the least recently used
    assert one(engine, [7] * 33).cached_tokens == 32
    assert one(engine, [8] * 33).cached_tokens < 32
    assert_at_rest(engine, backend)


def test_a_chain_is_known_by_all_that_came_before() -> None:
    pool = PagePool(4)
    ones, threes, nines = np.array([[1, 2], [3, 4], [9, 9]], np.int32)
    first, second = page_hash(ROOT, ones), page_hash(page_hash(ROOT, ones), threes)
    pages = pool.take(2)
    pool.learn(first, pages[0])
    pool.learn(second, pages[1])
    assert pool.find([first, second]) == pages
    assert pool.find([page_hash(ROOT, threes)]) == []
    assert pool.find([page_hash(ROOT, nines), second]) == []
    pool.share(pages)
    pool.give(pages)
    assert pool.free == 2
    pool.give(pages)
    assert pool.free == 4
    pool.take(3)  # takes the two unused pages, then the last cached one
    assert pool.find([first, second]) == pages[:1]


# -- preemption and admission


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """When two sequences no longer fit, the younger is preempted. It keeps its tokens and computes their KV again."""
    engine, backend = fake_engine(None, pages=9, step_tokens=64)
    params = SamplingParams(seed=5, max_tokens=60, min_tokens=60)
    old, young = engine.add([1] * 20, params), engine.add([2] * 20, params)
    finish(engine, backend)
    assert engine.stats.preemptions >= 1
    assert_generated_alone(old, young)
    again = [count for step in backend.steps() for _, count in step if count > 1][2:]
    assert again and max(again) <= PAGE + 1  # its full pages were still cached


def test_the_oldest_is_never_preempted() -> None:
    engine, backend = fake_engine(None, max_seqs=8, pages=8, step_tokens=64)
    params = SamplingParams(seed=5, max_tokens=60, min_tokens=60)
    requests = [engine.add([i] * 16, params) for i in range(6)]
    order = [token.choice for step in engine.run() for token in single_tokens(step.tokens) if token.finish_reason]
    assert order[0] == 0 and engine.stats.preemptions > 2
    assert_generated_alone(*requests)
    assert_at_rest(engine, backend)


def test_a_page_is_kept_for_each_running_sequence_that_will_need_one() -> None:
    """A request that would take the last free pages waits, because a running one would soon preempt it."""
    engine, backend = fake_engine(None, pages=3, step_tokens=64)
    old = engine.add([1] * 4, SamplingParams(seed=5, max_tokens=40, min_tokens=40))
    engine.step()
    young = engine.add([2] * 32, SamplingParams(seed=5, max_tokens=16, min_tokens=16))
    finish(engine, backend)
    assert engine.stats.preemptions == 0
    assert_generated_alone(old, young)


def test_who_was_admitted_for_a_step_that_never_starts_is_known_to_the_next() -> None:
    """Two decoding requests fill the budget of every step and end unexpectedly, with EOS. By then, the engine has
    prepared one more step for them, which never starts. A third request was admitted while this step was planned. It
    must still get its turn."""
    engine, backend = fake_engine(lambda position: EOS if position == 2 else 1, max_seqs=3, step_tokens=2)
    for prompt in ([1], [2]):
        engine.add(prompt, SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    third = engine.add([3] * 20, SamplingParams(max_tokens=2))
    finish(engine, backend)
    assert [len(step) for step in backend.steps()][:3] == [2, 2, 2]
    assert output_ids(third.choices[0]) == [1, 1]


def test_what_never_fits_is_refused_while_others_run() -> None:
    engine, backend = fake_engine(None, pages=3)
    running = engine.add([1] * 20, SamplingParams(max_tokens=20, seed=1))
    engine.step()
    with pytest.raises(MegakernelError, match="need 4 KV pages, but the pool has 3: lower max_tokens"):
        engine.add([1] * 49, SamplingParams(max_tokens=1))
    exact = engine.add([1] * 48, SamplingParams(max_tokens=1, seed=2))
    finish(engine, backend)
    assert_generated_alone(running, exact)


# -- on a real model


WINDOWS = RandomCheckpoint("windows", replace(TINY.config, window=20, full_layers=(), max_context=512))
THREE = [[i, 5, 9] * 20 for i in (1, 2, 3)]
LONG = SamplingParams(max_tokens=440, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def one_after_another() -> list[list[int]]:
    with LLM(WINDOWS, backend="cpu", max_context=512, threads=1, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], LONG)[0].token_ids for prompt in THREE]


@pytest.mark.parametrize(
    "more", [{}, {"speculate": 8}, {"enable_prefix_caching": False, "max_num_batched_tokens": 13, "max_num_seqs": 3}]
)
def test_pages_that_all_windows_have_left_are_freed(
    one_after_another: list[list[int]], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Three sequences of 500 tokens fit into the pages of one, because windows of 20 tokens leave KV blocks of 128."""
    monkeypatch.setattr(llm_module, "kv_capacity", lambda *_, **__: (512, 512))
    with LLM(WINDOWS, backend="cpu", max_context=512, threads=1, **more) as llm:
        for _ in range(2):
            assert [result.token_ids for result in llm.generate(THREE, LONG)] == one_after_another
        stats = llm.engine.stats
        assert not stats.preemptions and not stats.pages_used


def test_an_interrupt_while_a_launch_runs_leaves_a_working_model(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [[i] * 40 for i in range(1, 5)]
    with LLM(TINY, backend="cpu", max_context=160, max_num_seqs=3, threads=1) as llm:
        expected = [result.token_ids for result in llm.generate(prompts, greedy)]
        llm.engine.reset_prefix_cache()
        backend, calls, build = llm.engine.backend, count(), Steps.build

        def interrupt(*_: Any) -> Any:
            if next(calls) == 4:
                assert isinstance(backend, CpuBackend) and backend._running is not None
                raise KeyboardInterrupt
            return build(*_)

        with monkeypatch.context() as patch:
            patch.setattr(Steps, "build", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy)
        assert llm.engine.idle and not llm.engine.stats.pages_used
        assert [result.token_ids for result in llm.generate(prompts, greedy)] == expected
