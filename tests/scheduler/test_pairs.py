"""Programs whose workers are pairs of SMs: sizes, costs, rejected machines and options, and automatic choice."""

from dataclasses import replace

import numpy as np
import pytest
from compiled import compiled

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, Units
from megakernel.model import load_config
from megakernel.program.checks import violation
from megakernel.scheduler import Options
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.scheduler.tune import Fastest
from megakernel.scheduler.verify import verify
from megakernel.targets.hopper import HOPPER
from megakernel.targets.pages import computed_rows, first_rows

H100 = machines.MACHINES["h100"]
LLAMA_1B = load_config("random:llama-3.2-1b")
PAIRS = Options(matmul="tensor", queue="body", pairs="on")


def test_workers_are_half_as_many_with_tiles_of_twice_the_rows() -> None:
    alone, pairs = (
        compiled(LLAMA_1B, replace(H100, workers=8), 600, 4, 1, replace(PAIRS, pairs=how), max_context=1024)
        for how in ("off", "on")
    )
    assert (alone.dims.worker.sms, alone.workers, alone.processors, alone.dims.bucket.row_block) == (1, 8, 8, 128)
    assert (pairs.dims.worker.sms, pairs.workers, pairs.processors, pairs.dims.bucket.row_block) == (2, 4, 8, 256)
    assert pairs.dims.bucket.attention_slots * 2 == alone.dims.bucket.attention_slots


def test_the_verifier_proves_them() -> None:
    for tp in (1, 2):
        report = verify(compiled(LLAMA_1B, replace(H100, workers=8), 300, 4, tp, PAIRS, max_context=512))
        assert report.ok, report.violations[:3]


@pytest.mark.parametrize(
    ("machine", "options", "why"),
    [
        (replace(H100, workers=7), PAIRS, "7 is an odd number of workers"),
        (H100, replace(PAIRS, matmul="dots"), "matrix units of a GPU"),
        (machines.host(2), PAIRS, "matrix units of a GPU"),
    ],
)
def test_what_has_no_pairs_is_refused(machine: machines.Machine, options: Options, why: str) -> None:
    with pytest.raises(MegakernelError, match=f"cannot compile for pairs of SMs: .*{why}"):
        compiled(LLAMA_1B, machine, 4, 4, 1, options, max_context=512)


def test_a_program_with_other_workers_is_wrong() -> None:
    program = compiled(LLAMA_1B, replace(H100, workers=8), 300, 4, 1, PAIRS, max_context=512)
    for sms in (0, 3):
        wrong = replace(program, dims=program.dims.changed(sms=sms))
        assert f"workers of {sms} SMs are not possible: a worker has one, or two where matrix units compute" in str(
            violation(wrong)
        )
    alone = replace(program, dims=program.dims.changed(sms=1))
    with pytest.raises(MegakernelError, match="its tile has more than 128 rows"):
        HOPPER.check(alone)
    dots = replace(program, dims=program.dims.changed(units=int(Units.DOTS)))
    assert "workers of 2 SMs" in str(violation(dots))


def test_rows_are_dealt_in_whole_boxes() -> None:
    program = compiled(LLAMA_1B, replace(H100, workers=8), 300, 4, 1, PAIRS, max_context=512)
    rows = np.array([1, 32, 33, 64, 65, 192, 256])
    np.testing.assert_array_equal(first_rows(rows, program.dims), [1, 32, 32, 32, 64, 96, 128])
    np.testing.assert_array_equal(computed_rows(rows, program.dims), [128, 128, 128, 128, 128, 256, 256])
    alone = program.dims.changed(sms=1)
    np.testing.assert_array_equal(first_rows(rows, alone), rows)


def test_a_pair_has_the_rates_of_two_and_the_ring_of_one() -> None:
    costs = costs_of(H100)
    pair = costs.paired()
    assert pair.matmul_flops[0][1] == 2 * costs.matmul_flops[0][1] and pair.vector_flops == 2 * costs.vector_flops
    assert pair.ring_bytes == costs.ring_bytes and pair.cache_bytes_per_s == costs.cache_bytes_per_s
    assert costs.worker_bytes_per_s < pair.worker_bytes_per_s < 2 * costs.worker_bytes_per_s


def fastest(pairs: str) -> Fastest:
    options = Options(matmul="tensor", queue="body", o="replicated", pairs=pairs)
    config, sizes = load_config("random:llama-3.1-70b"), {"max_seqs": 8192, "max_context": 128}
    return Fastest(config, H100, tp=8, options=options, dtype=Dtype.BF16, **sizes)


def test_they_are_tried_where_a_tile_does_not_have_all_rows() -> None:
    tried = [{"pairs": "off"}, {"pairs": "on"}]
    assert tried in fastest("auto").open(8192)
    assert tried not in fastest("auto").open(128) and tried not in fastest("off").open(8192)


@pytest.mark.slow
def test_they_are_faster_where_the_cache_is_busy() -> None:
    known: dict[Options | str, float] = {}
    on, off = (fastest("off").seconds(replace(PAIRS, o="replicated", pairs=how), 8192, known) for how in ("on", "off"))
    assert on < off
