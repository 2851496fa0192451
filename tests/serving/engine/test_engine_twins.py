"""In every step, the engine does the same as a slow reference engine that handles its sequences one by one."""

from collections import Counter

import pytest
from engine_twins import compare


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 10))
def test_steps_tables_pages_and_tokens_are_those_of_the_slow_engine(seed: int) -> None:
    compare(seed, 60)


def test_the_traffic_meets_everything() -> None:
    met = Counter[str]()
    for seed in range(5):
        met += compare(seed, 120)
    named = (
        "scored rows",
        "biased rows",
        "deferred tokens",
        "aborts",
        "interrupts",
        "preemptions",
        "hits",
        "accepted",
        "generated alone",
    )
    assert all(met[name] for name in (*named, "generated alone")), met
