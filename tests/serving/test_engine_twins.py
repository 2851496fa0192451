"""The engine does in every step what one does that goes through its sequences one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_twins import compare


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_steps_tables_pages_and_tokens_are_those_of_the_slow_engine(seed: int) -> None:
    compare(seed, 60)


def test_the_traffic_meets_everything() -> None:
    """What the test above is about did happen in it."""
    met = Counter[str]()
    for seed in range(5):
        met += compare(seed, 200)
    named = ("scored rows", "biased rows", "deferred tokens", "aborts", "interrupts", "preemptions", "hits", "accepted")
    assert all(met[name] for name in named), met
