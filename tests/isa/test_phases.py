"""Tests of phases (operations with their parameters): numbers, storage in a file, and the sizes of each rank."""

import msgspec
import numpy as np
import pytest
from sizes import least_dims

from megakernel.errors import MegakernelError
from megakernel.isa import DRAIN, JOIN, MAX_PHASES, PHASE_FIELDS, Buffer, Dtype, Forward, Operation, Phase, Result, Rows
from megakernel.isa.record import COUNTER_MASK, counter_word, word_counter
from megakernel.model import KNOWN_SHAPES
from megakernel.model.families import forward
from megakernel.program.phases import _together
from megakernel.scheduler import passes

LLAMA = KNOWN_SHAPES["llama-3.2-1b"]
DIMS = least_dims(LLAMA, Dtype.BF16)


@pytest.mark.parametrize("norm", ["own", "next", "inside"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_forward_pass_survives_a_file(norm: str, tp: int) -> None:
    made = passes.apply(forward(LLAMA), DIMS.changed(tp=tp).split, norm, {Buffer.W_O: 4.5})
    assert msgspec.convert(made.to_json(), Forward) == made
    assert [p.number for p in made] == list(range(3, 3 + len(made.phases)))
    assert made.by_number[JOIN.number] is JOIN and made.by_number[DRAIN.number] is DRAIN
    assert {p.weight_bits for p in made if p.weights is Buffer.W_O and p.is_matmul} == {4.5}


def test_there_are_not_more_phases_than_a_record_can_name() -> None:
    many = [Phase(str(i), Operation.NORM, Rows.OWN, Buffer.ATTN_NORM, Buffer.X, Buffer.H) for i in range(MAX_PHASES)]
    most = Forward.of(many[2:], [], [])
    assert len(most.phases) == MAX_PHASES - 2 and not [why for why in _together(most) if "not numbered" in why]
    with pytest.raises(MegakernelError, match="at most 29 phases"):
        Forward.of(many[:9], many[9:], [])


def test_ranks_see_their_own_sizes() -> None:
    dims = DIMS.changed(tp=8, rank=7, ffn=300)  # 10 groups of up to 32 FFN columns: one each for ranks 2 to 7
    made = passes.apply(forward(LLAMA), dims.split)
    words = made.words(dims)
    column = [f.name for f in PHASE_FIELDS].index("inner")
    (partial,) = (p for p in made if p.weights is Buffer.W_DOWN and p.result is Result.PARTIAL)
    (total,) = (p for p in made if p.weights is Buffer.W_DOWN and p.operation is Operation.REDUCE)
    assert words[partial.number, column] == partial.inner(dims.split) == dims.split.rank_ffn == 300 - 288
    assert total.ranks(dims.split) == 8 and total.ranks(dims.changed(ffn=40).split) == 2


def test_counters_of_a_word_are_in_range() -> None:
    words = np.array([counter_word(0), counter_word(COUNTER_MASK - 1, rank=3, next_layer=True)], dtype=np.int64)
    assert word_counter(words).tolist() == [0, COUNTER_MASK - 1]
    for counter in (-1, COUNTER_MASK):
        with pytest.raises(ValueError, match=f"counter {counter} is not between"):
            counter_word(counter)
