"""Tests of layers with experts: instructions, quantised experts, programs, and wrong routing tables. test_families.py
compares whole models with transformers. test_invariance.py tests that neither other rows nor the size of a step change
bits."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from compiled import TINY, compiled, small_machine
from cpu_support import DIMS, RandomCheckpoint, make_table
from handmade import record
from mutate import edit, rows_of
from stored_checkpoints import assert_close, logits
from twins import CpuTwins, HostTwins, Twins

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dims, Dtype, Kind, Operation, Split, Units, accesses, cost, from_f32, to_f32
from megakernel.isa.operations.route import chosen
from megakernel.isa.record import WAIT_WORD, WAITS
from megakernel.machine import host
from megakernel.model import KNOWN_SHAPES, families
from megakernel.model import RandomCheckpoint as Seeded
from megakernel.model.config import ModelConfig
from megakernel.model.weight_types import stored_as
from megakernel.roofline.work import step_work
from megakernel.runtime.cuda.limits import model_refusal, phase_refusal
from megakernel.scheduler import Options, passes
from megakernel.scheduler.verify import verify

B = Buffer
# No size is a multiple of 16, the columns in a panel of packed weights. 40 rows choose 120 experts together, more than
# the 11 of a layer, so experts serve several rows.
EXPERTS = DIMS.changed(experts=11, experts_per_token=3, ffn=37)
FEW = {"tokens": 3, "logit_rows": 3}
# Kinds of routes. Layer 1 is the one that runs.
ROUTES: list[dict[str, float]] = [
    {},
    {"normalised_routes": 1},
    {"sigmoid_routes": 1, "choice_bias": 1, "normalised_routes": 1, "route_scale": 2.5, "shared_experts": 1},
    {"choice_bias": 1, "normalised_routes": 1, "dense_layers": 1},
    {"shared_experts": 2, "shared_gate": 1},
    {"dense_layers": 2},
]
T = TypeVar("T", bound=Twins)


@pytest.fixture
def dims(simd: str, dtype: Dtype) -> Dims:
    return EXPERTS.changed(dtype=int(dtype))


def routed(dims: Dims, *, biased: bool = False) -> CpuTwins:
    return routed_on(CpuTwins, dims, biased=biased)


def routed_on(kind: type[T], dims: Dims, *, biased: bool = False) -> T:
    """Interpreters whose buffers have random contents, and in ROUTES different experts for each row."""
    checkpoint = RandomCheckpoint(dims, biased=biased)
    twins = kind(checkpoint, passes.apply(families.forward(checkpoint.config), dims.split), dims)
    rng, count = np.random.default_rng(1), dims.model.experts_per_token
    twins.buffer(0, B.ROUTES)[:] = [rng.permutation(dims.model.experts)[:count] for _ in range(dims.bucket.tokens)]
    return twins


@pytest.mark.parametrize("kind", ROUTES)
def test_route(dims: Dims, kind: dict[str, float]) -> None:
    twins = routed(dims.changed(**kind), biased="normalised_routes" in kind)
    twins.compare(record(twins.forward.by_name["route"], 3, 30), 1, make_table(twins.dims, {0: (0, 40)}))
    twins.backend.close()


def check_experts(
    twins: Twins, tokens: int, places: Iterable[int], tiles: Sequence[tuple[int, int]], first: int
) -> None:
    """Compare experts that compute these row ranges, in two tiles of columns, of which one has `first` columns, and the
    sum of their results. Gates are large enough to be limited if the model limits them."""
    d, table, layer = twins.dims, make_table(twins.dims, {0: (0, tokens)}), twins.dims.model.layers - 1
    h = twins.buffer(0, B.H)
    h[:] = from_f32(to_f32(h) * np.float32(1 + 4 * d.model.clipped_gates), Dtype(d.model.dtype))
    for name, width in (("experts_gate_up", d.model.ffn), ("experts_down", d.model.hidden)):
        for place, tile, (col, end) in itertools.product(places, tiles, ((0, first), (first, width))):
            one = record(twins.forward.by_name[name], *tile, col, end - col, place)
            twins.compare(one, layer, table, rtol=1e-4, atol=1e-4)
    twins.compare(record(twins.forward.by_name["combine"], 1, tokens - 1), layer, table, atol=1e-4)


@pytest.mark.parametrize("clipped", [0, 1])
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_and_their_sum(dims: Dims, tokens: int, clipped: int) -> None:
    """An instruction computes the j-th of each row's 3 experts if there are few rows, otherwise one of all 11."""
    twins = routed(dims.changed(tokens=tokens, logit_rows=3, clipped_gates=clipped), biased=bool(clipped))
    assert twins.dims.places == (11 if tokens > 3 else 3)
    check_experts(twins, tokens, range(twins.dims.places), [(0, tokens)], 16)
    twins.backend.close()


# Sizes of rows that a GPU copies piece by piece, in whole pages, and in several pieces with few rows in a page.
ON_GPUS = EXPERTS.changed(dtype=int(Dtype.BF16), kv_page=DIMS.bucket.kv_block, ffn=40)
GPU_SIZES = {"pieces": {}, "whole": {"hidden": 512, "ffn": 256}}
GPU_SIZES["long"] = {"hidden": 1096, "ffn": 2056, "experts": 4, "layers": 1}


# Experts are always computed as dot products, so the build for tensor cores does not run the largest size.
ON_UNITS = [(sizes, Units.DOTS, clipped) for sizes, clipped in (("pieces", 1), ("whole", 0), ("long", 1))]
ON_UNITS += [("pieces", Units.TENSOR, 0), ("whole", Units.TENSOR, 1)]


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(("sizes", "units", "clipped"), ON_UNITS)
def test_experts_on_gpus(sizes: str, units: Units, clipped: int, tokens: int) -> None:
    dims = ON_GPUS.changed(units=int(units), tokens=tokens, logit_rows=3, clipped_gates=clipped, **GPU_SIZES[sizes])
    twins = routed_on(HostTwins, dims, biased=bool(clipped))
    d, routes = twins.dims, twins.buffer(0, B.ROUTES)
    routes[:] = (routes[:, :1] + [0, 1, 2]) % (d.model.experts - 1)  # the last expert has no row
    check_experts(twins, tokens, {0, 1, d.places - 1}, [(0, tokens)] if d.by_expert else [(0, 1), (2, 1)], 24)
    table, layer = make_table(d, {0: (0, tokens)}), d.model.layers - 1
    for kind in ROUTES:
        twins = routed_on(HostTwins, dims.changed(ffn=40, **kind), biased="normalised_routes" in kind)
        twins.compare(record(twins.forward.by_name["route"], 1, tokens - 1), layer, table)


@pytest.mark.parametrize("tokens", [3, 40])
def test_whole_experts_on_gpus(tokens: int) -> None:
    check_whole_experts(HostTwins, ON_GPUS, tokens)


@pytest.mark.parametrize("tokens", [3, 40])
def test_whole_experts_on_each_rank(dims: Dims, tokens: int) -> None:
    check_whole_experts(CpuTwins, dims, tokens).backend.close()


def check_whole_experts(kind: type[T], dims: Dims, tokens: int) -> T:
    """With expert parallelism, a rank computes its own experts with the whole bias, and adds only their results."""
    sizes = {"experts": 12, "tp": 3, "expert_parallel": 1, "tokens": tokens, "logit_rows": 3}
    twins = routed_on(kind, dims.changed(**sizes), biased=True)
    table, forward = make_table(twins.dims, {0: (0, tokens)}), twins.forward.by_name
    assert twins.dims.places == (4 if tokens > 3 else 3)
    for rank in range(3):
        twins.buffer(rank, B.ROUTES)[:] = twins.buffer(0, B.ROUTES)
        for place in range(twins.dims.places):
            for name, width in (("experts_gate_up", dims.model.ffn), ("experts_down", dims.model.hidden)):
                tile = record(forward[name], 0, tokens, 0, width, place)
                twins.compare(tile, 1, table, rank, rtol=1e-4, atol=1e-4)
        twins.compare(record(forward["combine_partial"], 0, 1), 1, table, rank, atol=1e-4)
    return twins


def test_of_equal_logits_the_lower_expert_is_better() -> None:
    tied = np.array([[1, 3, 2, 3, 3], [np.nan, 0, -np.inf, np.nan, 0]], np.float32)
    experts, weights = chosen(tied, EXPERTS.changed(experts=5, experts_per_token=4).model)
    assert experts.tolist() == [[1, 3, 4, 2], [1, 4, 0, 2]]
    np.testing.assert_allclose(weights[1], [0.5, 0.5, 0, 0])
    for twins in (routed(EXPERTS), routed_on(HostTwins, ON_GPUS)):
        h, router = twins.buffer(0, B.H), twins.reference.buffer(B.W_ROUTER, 1)
        h[:8], h[8:12] = 0, from_f32(np.full(1, np.nan, np.float32), Dtype(twins.dims.model.dtype))
        table = make_table(twins.dims, {0: (0, 40)})
        twins.start_equal()
        twins.execute_both(record(twins.forward.by_name["route"], 0, 40), 1, table, 0)
        got = twins.other(0, B.ROUTES)
        assert (got[:12] == [0, 1, 2]).all() and len(router) == 11
        np.testing.assert_array_equal(got, twins.buffer(0, B.ROUTES))


@pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1, -(2**31)])
def test_an_expert_that_does_not_exist_is_skipped(wrong: int) -> None:
    for tokens, on_gpu in itertools.product((3, 40), (False, True)):
        dims = (ON_GPUS if on_gpu else EXPERTS).changed(tokens=tokens, logit_rows=3)
        twins = routed_on(HostTwins, dims) if on_gpu else routed(dims)
        twins.buffer(0, B.ROUTES)[:] = wrong
        table = make_table(twins.dims, {0: (0, tokens)})
        tile = record(twins.forward.by_name["experts_gate_up"], 0, tokens, 0, dims.model.ffn, 2)
        found = to_f32(twins.run(tile, 1, table)[0, B.ACT, 0])
        assert np.isfinite(found).all()


SMALL = replace(
    KNOWN_SHAPES["qwen3-30b-a3b"], vocab=211, hidden=256, ffn=256, layers=2, heads=4, kv_heads=2, head_dim=32,
    max_context=512, experts=9, experts_per_token=2,
)  # fmt: skip
KINDS = ("q8_0", "q5_1", "q6_k", "mxfp4", "f16")


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_experts(kind: str) -> None:
    """The CPU agrees with the reference. A router is never quantised."""
    whole = Seeded("random", SMALL)
    whole.dtype = Dtype.F32
    checkpoint = stored_as(whole, kind)
    assert checkpoint.storage[B.W_ROUTER].layers[0][0].dtype is (Dtype.F16 if kind == "f16" else Dtype.F32)
    for q8, tp in [(False, 1), *([(True, 1)] if kind != "f16" else []), *([(False, 2)] if kind == "q8_0" else [])]:
        cpu, reference = (logits(b, checkpoint, 20, tp, q8=q8) for b in ("cpu", "reference"))
        assert_close(cpu, reference, Dtype.BF16 if q8 else Dtype.F32)


@pytest.mark.parametrize("tokens", [1, 4, 5, 64])
@pytest.mark.parametrize(("tp", "whole"), [(1, False), (2, False), (8, False), (8, True)])
def test_programs_are_proved_and_their_waits_are_needed(tp: int, whole: bool, tokens: int) -> None:
    config = replace(SMALL, hidden=64, ffn=96, experts=8)
    program = compiled(config, small_machine(3), tokens=tokens, tp=tp, options=Options(expert_parallel=whole))
    assert verify(program).ok
    for name in ("route", "experts_gate_up", "experts_down", "combine" if tp == 1 else "combine_partial"):
        broken = program
        # Remove the waits of all instructions of the phase: one that is left would order later ones of its stream too.
        for at in rows_of(program, "body", name):
            broken = edit(broken, "body", at, list(range(WAIT_WORD, WAIT_WORD + WAITS)))
        violations = verify(broken).violations
        assert violations, name
        # The combination of whole experts orders so much that the first violations are those of other phases.
        assert any(name in violation for violation in violations) or (whole and name == "combine_partial"), name


def test_tables_order_what_different_experts_store_in_one_place() -> None:
    """In the next layer, another expert may store its results in the same part of the output. The verifier can prove
    that the second store comes later: the instructions of both experts read the routing table, which is overwritten in
    between."""
    program = compiled(replace(SMALL, hidden=64, ffn=96), small_machine(1), tokens=5)
    for phase, d, _, columns in program.by_phase(1):
        read = {a.buffer for a in accesses(phase, columns, d) if a.kind is Kind.READ}
        if phase.operation is Operation.EXPERTS:
            assert B.ROUTES in read
        elif phase.operation is Operation.COMBINE:
            assert {B.ROUTES, B.ROUTE_WEIGHTS} <= read


@pytest.mark.parametrize(
    ("operand", "value", "message"),
    [(4, 8, "rows have no such place"), (4, 0, "both write"), (3, 97, "outside the rank's part")],
)
def test_wrong_records_are_refused(operand: int, value: int, message: str) -> None:
    program = compiled(replace(SMALL, hidden=64, ffn=96, experts=8), small_machine(1), tokens=5)
    at = rows_of(program, "body", "experts_gate_up")[-1]
    assert any(message in v for v in verify(edit(program, "body", at, 1 + operand, value)).violations)


def test_costs_count_the_experts_that_a_step_needs_at_most() -> None:
    config = KNOWN_SHAPES["qwen3-30b-a3b"]
    one = 3 * config.hidden * config.ffn * 2  # bytes of an expert
    forward, split = families.forward(config), Split(config.sizes(Dtype.BF16))
    works = [step_work(forward, split, [1] * rows, [1] * rows, 0) for rows in (1, 3, 100)]
    for work, experts in zip(works[1:], (24, 128), strict=True):
        rest = (experts - 8) * one * config.layers
        np.testing.assert_allclose(work.weight_bytes - works[0].weight_bytes, rest, rtol=1e-3)
    np.testing.assert_allclose(works[1].flops / works[0].flops, 3)
    for tokens, experts in ((1, 8), (3, 24), (100, 128)):
        program = compiled(config, host(4), tokens=tokens)
        phases = [each for each in program.by_phase(1) if each[0].operation is Operation.EXPERTS]
        read = sum(float(cost(phase, columns, dims).memory_bytes.sum()) for phase, dims, _, columns in phases)
        assert read == experts * one


def test_what_gpus_do_not_compute_is_refused() -> None:
    for config in (SMALL, KNOWN_SHAPES["gpt-oss-20b"]):
        assert model_refusal(config.sizes(Dtype.BF16)) is None
    for hidden, wrong in ((32768, False), (32776, True)):
        dims = ON_GPUS.changed(hidden=hidden)
        config = RandomCheckpoint(dims, biased=False).config
        phase = passes.apply(families.forward(config), dims.split).by_name["experts_gate_up"]
        assert bool(phase_refusal(phase, dims)) is wrong


@pytest.mark.parametrize("config", [SMALL, TINY], ids=["9 experts", "no experts"])
def test_ranks_must_have_equally_many_whole_experts(config: ModelConfig) -> None:
    with pytest.raises(MegakernelError, match="experts equally among 2 ranks"):
        compiled(config, host(4), tokens=1, tp=2, options=Options(expert_parallel=True))


def test_a_program_with_impossible_experts_is_refused() -> None:
    program = compiled(replace(SMALL, hidden=64, ffn=96), small_machine(1), tokens=5)
    impossible, flag = "are not possible", "a flag is out of range"
    for change, what in (
        ({"experts": 2, "experts_per_token": 3}, impossible),
        ({"experts": 600}, impossible),
        ({"experts_per_token": 0}, impossible),
        ({"experts": 512, "hidden": 1 << 20}, "of 512 experts must be at most"),
        ({"normalised_routes": 2}, flag),
    ):
        violations = verify(replace(program, dims=program.dims.changed(**change))).violations
        assert any(what in violation for violation in violations), change
