"""Compares matmuls of the CUDA interpreter with the reference backend. Each instruction runs alone on the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_support import DIMS, RandomCheckpoint, make_table
from handmade import record
from twins import HostTwins, check_norm_on_the_way_in

from megakernel.isa import Buffer, Dims, Dtype, Rows, Units
from megakernel.model import families
from megakernel.runtime.cuda.limits import phase_refusal
from megakernel.scheduler import passes

B = Buffer
SMALL = DIMS.changed(dtype=int(Dtype.BF16), kv_page=DIMS.bucket.kv_block, units=int(Units.TENSOR))
MODELS = {
    "odd": SMALL,
    "head80": SMALL.changed(hidden=160, ffn=200, heads=3, kv_heads=1, head_dim=80, vocab=301),
    # A tensor map copies whole weight pages of 512 elements, but not of 1,288. The LM head's last page is partly empty.
    "mapped": SMALL.changed(hidden=512, ffn=1288, heads=4, kv_heads=2, head_dim=128, vocab=299, layers=2),
    # Dot products load rows in pieces of 1,024 elements. These rows are longer, so the ring is filled several times.
    "wide": SMALL.changed(hidden=1096, ffn=2056, heads=9, kv_heads=3, head_dim=128, layers=1),
}
ON_ONE_RANK = ("qkv_rope", "o_proj", "gate_up_silu", "down_proj", "lm_head")
ON_RANKS = ("qkv_rope", "o_partial", "gate_up_silu", "down_partial", "lm_head")
FAMILIES = {"glm4": SMALL.changed(post_norms=1), "gemma": SMALL}
# Partial sums are stored at the rank that owns the rows, or at all that keep the residual; logits at rank 0.
RANKS = {f"replicated {n}": SMALL.changed(tp=2, tokens=64, replicated_residual=n) for n in (0, 1)}
OTHERS = FAMILIES | RANKS | {"both warpgroups": SMALL.changed(tokens=100, row_block=128)}
MATMULS = [(model, name) for model in [*MODELS, "both warpgroups"] for name in ON_ONE_RANK]
MATMULS += [(model, name) for model in RANKS for name in ON_RANKS]
MATMULS += [("glm4", "o_proj"), ("glm4", "down_proj"), ("gemma", "gate_up_silu")]
ON_UNITS = [(*each, units) for each in MATMULS for units in (Units.TENSOR, Units.DOTS)]


def make(dims: Dims, *, biased: bool = True, norm: str = "own", family: str = "llama") -> HostTwins:
    checkpoint = RandomCheckpoint(dims.changed(tp=1), biased=biased)
    checkpoint.config = replace(checkpoint.config, family=family)
    return HostTwins(checkpoint, passes.apply(families.forward(checkpoint.config), dims.split, norm), dims)


def _table(dims: Dims) -> Any:
    """Return a step table with rows of two sequences, and three rows of padding at the end."""
    return make_table(dims, {0: (37, 5), 2: (120, dims.bucket.tokens - 8)})


def _run_all(twins: HostTwins, name: str, rank: int, row: int, rows: int, unit: int) -> None:
    """Compare a rank's part of a matmul with the reference, in two instructions that begin at multiples of `unit`
    columns."""
    phase, table = twins.forward.by_name[name], _table(twins.dims)
    total = phase.width(twins.dims.ranks[rank].split)
    first = min(total, (total // 2 + unit - 1) // unit * unit)
    for col, end in ((0, first), (first, total)):
        if end > col:
            words = record(phase, row, rows, col, end - col)
            twins.compare(words, twins.dims.model.layers - 1, table, rank, rtol=1e-5)


@pytest.mark.parametrize(("model", "name", "units"), [each for each in ON_UNITS if each[::2] != ("wide", Units.TENSOR)])
def test_matmul(model: str, name: str, units: Units) -> None:
    dots, family = units is Units.DOTS, model if model in FAMILIES else "llama"
    biased = family == "llama" and (model, dots) != ("head80", True)
    twins = make((MODELS | OTHERS)[model].changed(units=int(units)), biased=biased, family=family)
    twins.buffer(0, B.H)[2:4] = [[0x4900], [0xC900]]  # gates far from zero, of both signs
    # On tensor cores, a tile must end with the buffer or have a multiple of 32 rows, the height of a TMA box.
    tiles = [(3, 1), (32, 5)] if dots else [(32, twins.dims.bucket.tokens - 32), (0, 32)]
    for rank in range(twins.dims.split.tp):
        for row, rows in [(0, 5)] if name == "lm_head" else tiles:
            _run_all(twins, name, rank, row, rows, 8 if dots else 64)


def test_bits_of_a_dot_product_depend_on_its_row_alone() -> None:
    dims = MODELS["wide"].changed(units=int(Units.DOTS))
    twins, table = make(dims), _table(dims)
    phase = twins.forward.by_name["gate_up_silu"]
    whole = twins.run(record(phase, 0, 6, 0, dims.model.ffn), 0, table)[0, B.ACT, 0]
    for row in range(6):
        for col, end in ((0, 8), (8, 1024), (1024, dims.model.ffn)):
            part = twins.run(record(phase, row, 1, col, end - col), 0, table)[0, B.ACT, 0]
            np.testing.assert_array_equal(part[row, col:end], whole[row, col:end])


HEADED = SMALL.changed(head_dim=48, hidden=256)  # for Qwen3, whose QKV matmul normalises heads


@pytest.mark.parametrize(
    ("dims", "family", "name"),
    [*((d, "llama", n) for d in MODELS.values() for n in ("qkv_rope", "gate_up_silu")), (HEADED, "qwen3", "qkv_rope")],
    ids=lambda v: v if isinstance(v, str) else f"hidden {v.model.hidden}",
)
def test_rows_normalised_on_the_way_in_have_the_bits_of_a_norm_before(dims: Dims, family: str, name: str) -> None:
    dims = dims.changed(units=int(Units.DOTS))
    inside, own = (make(dims, norm=norm, family=family) for norm in ("inside", "own"))
    col = 0 if family == "qwen3" else 8  # a tile that normalises heads must start with a whole head
    cols = own.forward.by_name[name].width(dims.split) - col
    rows = ((3, 1), (0, 7), *([(0, 1), (0, 32)] if family == "qwen3" else []))
    check_norm_on_the_way_in(own, inside, name, _table(dims), dims.model.layers - 1, [(*r, col, cols) for r in rows])
    assert inside.forward.by_name[name].rows is Rows.EVERY


HEADS = [*((Units.TENSOR, size) for size in (32, 64, 256)), *((Units.DOTS, size) for size in (16, 80, 128, 256))]


def _normed_heads(units: Units, head_dim: int, biased: bool = True, **sizes: Any) -> HostTwins:
    dims = SMALL.changed(units=int(units), head_dim=head_dim, heads=3, kv_heads=2, **sizes)
    return make(dims, biased=biased, family="qwen3")


@pytest.mark.parametrize(
    ("units", "head_dim", "taken"),
    [
        *((*heads, None) for heads in HEADS),
        (Units.DOTS, 24, "heads of 24 elements, but its units take multiples of 16"),
        (Units.TENSOR, 16, "heads of 16 elements, but its units take multiples of 32 that divide 256"),
        (Units.TENSOR, 96, "heads of 96 elements, but its units take multiples of 32 that divide 256"),
    ],
)
def test_heads_that_are_not_normalised_are_refused(units: Units, head_dim: int, taken: str | None) -> None:
    twins = _normed_heads(units, head_dim)
    phase = twins.forward.by_name["qkv_rope"]
    assert phase_refusal(phase, twins.dims) == (taken and f"normalises {taken}")
    assert phase_refusal(replace(phase, head_norm=None), twins.dims) is None


@pytest.mark.parametrize(("units", "head_dim"), HEADS)
def test_bits_of_normalised_heads_depend_on_their_row_alone(units: Units, head_dim: int) -> None:
    """They are close to those of the reference, also in a row of very small inputs and in one of very large ones."""
    twins = _normed_heads(units, head_dim)
    phase, table = twins.forward.by_name["qkv_rope"], _table(twins.dims)
    total, written = phase.width(twins.dims.split), (B.Q, B.K_CACHE, B.V_CACHE)
    twins.buffer(0, B.H)[3:5] = [[0x2F80], [0x4700]]
    whole = twins.run(record(phase, 0, 32, 0, total), 0, table)
    keys = [key for key in whole if key[1] in written and key[2] == 0]
    assert all((whole[key] != twins.buffer(*key)).any() for key in keys)
    for row, end in ((0, 1), (1, 8), (8, 32)):
        for col in range(0, total, head_dim):
            part = twins.run(record(phase, row, end - row, col, head_dim), 0, table)
            for key in keys:
                twins.buffer(*key)[:] = part[key]
    assert [key for key in keys if whole[key].tobytes() != twins.buffer(*key).tobytes()] == []
    twins.compare(record(phase, 0, 32, 0, total), 0, table, rtol=1e-5)
