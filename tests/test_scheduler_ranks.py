"""The scheduler for many ranks: every lowering, even, uneven and empty shards, any interleaving of all ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from symbolic import Failure, check
from test_scheduler import SMALL, compiled, small_machine

from megakernel.isa import BY_OPCODE, Family
from megakernel.isa.record import WAIT_WORD, WAITS, opcode
from megakernel.model.config import LlamaConfig
from megakernel.scheduler.options import Options

LOWERINGS = [
    Options(o=o, residual=residual)
    for o, residual in itertools.product(("sharded", "replicated"), ("dealt", "replicated"))
]
# 6 query heads that share 3 KV heads, 70 FFN columns and 101 tokens: uneven on 4 ranks, and with empty shards on 8.
UNEVEN = replace(SMALL, ffn=70, vocab=101, layers=2)


def name(options: Options) -> str:
    return f"{options.o}-{options.residual}"


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 11])
def test_any_interleaving_of_the_ranks_gives_the_results_of_program_order(
    options: Options, tp: int, tokens: int
) -> None:
    program = compiled(UNEVEN, small_machine(2, 2), tokens, logit_rows=3, tp=tp, options=options)
    check(program, seed=tp * 100 + tokens, rounds=2)


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
def test_random_shapes(options: Options) -> None:
    rng = np.random.default_rng(6)
    for seed in range(6):
        kv_heads, group, head_dim = (int(rng.integers(1, n)) for n in (5, 4, 3))
        config = LlamaConfig(
            vocab=int(rng.integers(2, 200)),
            hidden=int(rng.integers(1, 30)),
            ffn=int(rng.integers(1, 200)),
            layers=int(rng.integers(1, 4)),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=2 * head_dim,
            max_context=64,
        )
        target = small_machine(int(rng.integers(1, 4)), int(rng.integers(1, 6)))
        tp, tokens, rows = int(rng.choice([2, 4, 8])), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        check(compiled(config, target, tokens, rows, tp, options), seed, rounds=2)


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
def test_every_wait_is_needed(options: Options) -> None:
    """Without the waits of any one phase of a rank, some interleaving goes wrong; but norms follow their worker's."""
    program = compiled(UNEVEN, small_machine(2, 2), 5, logit_rows=3, tp=2, options=options)
    numbers = [n for n in np.unique(opcode(program.body.records)) if BY_OPCODE[int(n)].family is not Family.NORM]
    assert len(numbers) >= 6
    for number in numbers:
        records = program.body.records.copy()
        first_rank = np.arange(len(records)) < program.body.offsets[program.workers]
        records[(opcode(records) == number) & first_rank, WAIT_WORD : WAIT_WORD + WAITS] = 0
        with pytest.raises(Failure):
            check(replace(program, body=replace(program.body, records=records)), seed=1, rounds=12)
