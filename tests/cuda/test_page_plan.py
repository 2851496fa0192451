"""Tests of the shared-memory pages that the CUDA interpreter plans for an instruction."""

import pytest
from gpu_programs import make, plan

from megakernel.isa import Operation
from megakernel.isa.record import phase_number
from megakernel.scheduler import Options

WEIGHTS, INPUTS = range(2)


@pytest.mark.parametrize("matmul", ["tensor", "dots"])
def test_one_copy_fills_a_page_where_it_can(matmul: str) -> None:
    """With such sizes, each page of weights, of keys and of values is filled by one copy. Weights are in pieces of rows
    for dot products, and otherwise in tiles."""
    _, program, table = make("whole pages", 1, Options(matmul=matmul))
    whole, pages = set(), 0
    for record in program.body.records:
        phase = program.forward.by_number[int(phase_number(record))]
        planned = plan(program.forward, program.dims, table, record)
        assert bool(planned) == (phase.is_matmul or phase.operation is Operation.ATTENTION)
        whole |= {(fill, pieces > 0) for fill, pieces, one in planned if one}
        pages += sum(one == 0 for fill, _, one in planned if fill == WEIGHTS)
    assert whole == {(WEIGHTS, matmul == "dots"), (INPUTS, False)} and pages == 0
