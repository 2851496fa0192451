"""Compares each instruction of the CPU backend with the reference, for every SIMD width and type. The tests also show
that some choices do not change the bits of a result, such as the size of the tile, the split of attention, or the SIMD
instructions that multiply."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from cpu_support import DIMS, FORWARD, WIDTHS, Item, RandomCheckpoint, make_table, set_items
from handmade import record
from twins import CpuTwins, check_attention_splits, check_hostile_logits, check_norm_on_the_way_in, compare_samples

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dims, Dtype, Operation, StepTable, to_f32
from megakernel.model import families
from megakernel.runtime.cpu import native
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.runtime.cuda.limits import phase_refusal
from megakernel.scheduler import passes

B = Buffer
P = FORWARD.by_name


def make(dims: Dims, *, tied: bool = False, seed: int = 0, norm: str = "own") -> CpuTwins:
    checkpoint = RandomCheckpoint(dims, tied)
    return CpuTwins(checkpoint, passes.apply(families.forward(checkpoint.config), dims.split, norm), dims, seed)


ANY_CACHE = pytest.mark.parametrize("twins", [0, 1], ids=["whole K and V", "quantised K and V"], indirect=True)


@pytest.fixture
def twins(simd: str, dtype: Dtype, request: pytest.FixtureRequest) -> Iterator[CpuTwins]:
    quantised_kv = getattr(request, "param", 0)
    made = make(DIMS.changed(dtype=int(dtype), embed_scale=0.75, quantised_kv=quantised_kv))
    yield made
    made.backend.close()


@pytest.fixture
def backend(twins: CpuTwins) -> CpuBackend:
    """A CPU backend whose buffers contain random numbers."""
    twins.start_equal()
    return twins.backend


def close(twins: CpuTwins, name: str, layer: int, table: StepTable, *operands: int) -> None:
    """Compare an instruction's results. In bfloat16, a difference of one unit in the last place is allowed, and with
    quantised keys the difference of a query that is rounded to another integer."""
    most = (3e-3 if twins.dims.model.quantised_kv else 1e-3) if twins.dims.model.dtype == Dtype.BF16 else 2e-5
    twins.compare(record(P[name], *operands), layer, table, atol=most)


def test_embed_and_rope(twins: CpuTwins) -> None:
    table = make_table(twins.dims, {0: (37, 20), 1: (390, 4)})
    table.token_ids[[5, 6, 21]] = 0, twins.dims.model.vocab - 1, -1 - 1
    twins.reference.write_history(1, 391, np.array([77], np.int32))
    # HISTORY must not be read here: token id 0 is an ordinary id, and only negative ids refer to HISTORY.
    twins.reference.write_history(2, 42, np.array([5], np.int32))
    twins.compare(record(P["embed"], 3, 19), 0, table, rtol=0, atol=0)
    twins.compare(record(P["rope"], 3, 19), 0, table, rtol=0, atol=5e-5)


def test_norms(twins: CpuTwins) -> None:
    table = make_table(twins.dims, {0: (0, 40)})
    for name in ("attn_norm", "mlp_norm"):
        close(twins, name, 1, table, 5, 30)
    table.logit_rows[:] = [7, -1, 39, 0, -1]
    close(twins, "final_norm", 0, table, 0, 5)


# The numbers of rows fill part of a register block, several blocks, and more than a tile. The inner length, 301, is
# several chunks long and no multiple of a vector.
@pytest.mark.parametrize("rows", [1, 13, 120])
def test_a_norm_on_the_way_in_has_the_bits_of_its_own_phase(simd: str, dtype: Dtype, rows: int) -> None:
    """A matmul that normalises its inputs gives the same bits as a separate norm phase, for rows in the middle of a
    batch."""
    dims = DIMS.changed(hidden=301, tokens=125, max_seqs=1, dtype=int(dtype))
    own, inside = make(dims), make(dims, norm="inside")
    own.buffer(0, B.X)[:] *= np.linspace(0.1, 30, 125, dtype=np.float32)[:, None]
    for name, cols in (("qkv_rope", 240), ("gate_up_silu", 104)):
        tiles = [(5, rows, col, min(88, cols - col)) for col in range(0, cols, 88)]
        check_norm_on_the_way_in(own, inside, name, make_table(dims, {0: (0, 125)}), 1, tiles)
    own.backend.close()
    inside.backend.close()


def test_nan_stays_nan(backend: CpuBackend) -> None:
    """A NaN whose bits are all ones stays NaN in bfloat16, although rounding up could wrap it to zero."""
    backend.buffer(B.X).view(np.uint32)[3] = 0x7FFFFFFF
    backend.execute(record(P["attn_norm"], 3, 1), 0, make_table(backend.dims, {0: (0, 40)}), FORWARD)
    assert np.isnan(to_f32(backend.buffer(B.H)[3])).all()


# The row counts lie below and above the sizes of a register block and of a tile. The column ranges of the test begin in
# one head and end in another, and one ends at the matrix's last column.
@ANY_CACHE
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_qkv_rope(twins: CpuTwins, rows: int) -> None:
    """Padding rows store no keys and values."""
    table = make_table(twins.dims, {0: (30, 1), 2: (100, 39)} if rows > 1 else {2: (100, 40)})
    table.row_seq[min(rows, 37) :] = -1
    for col, end in ((24, 168), (168, 240)) if twins.dims.model.quantised_kv else ((16, 160), (160, 240)):
        close(twins, "qkv_rope", 1, table, 0, rows, col, end - col)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_matmuls(twins: CpuTwins, rows: int) -> None:
    table = make_table(twins.dims, {0: (0, 40)})
    for name in ("o_proj", "down_proj"):
        close(twins, name, 1, table, 0, rows, 16, 56)
    close(twins, "gate_up_silu", 0, table, 0, rows, 32, 72)
    close(twins, "lm_head", 0, table, 0, min(rows, 5), 48, 155)


def test_norms_of_what_a_layer_adds_and_gelu(simd: str, dtype: Dtype) -> None:
    dims = DIMS.changed(dtype=int(dtype), post_norms=1)
    checkpoint = RandomCheckpoint(dims, biased=False)
    checkpoint.config = replace(checkpoint.config, family="gemma3_text")
    forward = passes.apply(families.forward(checkpoint.config), dims.split)
    twins = CpuTwins(checkpoint, forward, dims)
    tiles = {"o_proj": (16, 56), "gate_up_silu": (32, 72), "down_proj": (16, 56), "post_mlp_norm": ()}
    for name, columns in tiles.items():
        one = record(forward.by_name[name], 3, 21, *columns)
        twins.compare(one, 1, make_table(dims, {0: (0, 40)}), atol=1e-3 if dtype is Dtype.BF16 else 2e-5)
    twins.backend.close()


@pytest.mark.parametrize("quantised_kv", [0, 1])
def test_norms_over_all_heads(simd: str, dtype: Dtype, quantised_kv: int) -> None:
    """Also on the second of two ranks, which has some of the heads that it normalises."""
    for rank, tp in ((0, 1), (1, 2)):
        dims = DIMS.changed(dtype=int(dtype), post_norms=1, whole_norms=1, quantised_kv=quantised_kv, tp=tp)
        twins = make(dims)
        table = make_table(dims, {0: (30, 12), 1: (100, 28)})
        table.row_seq[37:] = -1
        for name, columns in {"attn_input": (), "qkv": (16, 144), "qk_norm_rope": ()}.items():
            one = record(twins.forward.by_name[name], 3, 21, *columns)
            twins.compare(one, 1, table, rank, atol=1e-3 if dtype is Dtype.BF16 else 2e-5)
        twins.backend.close()


@pytest.mark.parametrize("k", [71, 256, 513])
def test_matmul_depths(k: int) -> None:
    """The down projection agrees with the reference. There are more rows than a tile has. The inner lengths are odd, or
    near a multiple of the chunk after which accumulators are stored."""
    twins = make(DIMS.changed(ffn=k, tokens=120, dtype=int(Dtype.BF16)))
    twins.compare(record(P["down_proj"], 0, 120, 0, 72), 0, make_table(twins.dims, {0: (0, 120)}))
    twins.backend.close()


def check_attention(twins: CpuTwins) -> None:
    # The step has a prefill that crosses the border between two KV blocks, a decode row with a long context, a
    # sequence's first token, and padding.
    table = make_table(twins.dims, {0: (110, 32), 1: (389, 1), 2: (0, 1)})
    items = [Item(0, 0, 32, 0, 2), Item(1, 32, 1, 0, 1), Item(1, 32, 1, 1, 1), Item(1, 33, 1, 0, 2)]
    items.append(Item(3, 34, 6, 0, 2))
    set_items(table, items)
    twins.fill_unused(table, 1, np.nan)
    for slot in range(4):
        close(twins, "attention", 1, table, slot, 1, 2)
    assert not twins.buffer(0, B.ATTN)[34:].any()


@ANY_CACHE
def test_attention(twins: CpuTwins) -> None:
    """Few rows read a quantised cache directly, and many a float32 copy of it."""
    check_attention(twins)
    check_attention_splits(twins)


WINDOWS = [(Dtype.F32, 20), (Dtype.BF16, 200)]


@pytest.mark.parametrize(("dtype", "window"), [*WINDOWS, (Dtype.F32, 1), (Dtype.F32, 128)])
def test_attention_in_a_window(simd: str, dtype: Dtype, window: int) -> None:
    """K and V are NaN for tokens that no row's window contains, so the results would be NaN if they were read."""
    twins = make(DIMS.changed(dtype=int(dtype), window=window))
    check_attention(twins)
    check_attention_splits(twins)
    twins.backend.close()


@pytest.mark.parametrize("quantised_kv", [0, 1])
@pytest.mark.parametrize(("dtype", "window"), [*WINDOWS, (Dtype.F32, 0)])
def test_sinks(monkeypatch: pytest.MonkeyPatch, simd: str, dtype: Dtype, window: int, quantised_kv: int) -> None:
    """A sink counts once, however many items divide the KV blocks of a row."""
    monkeypatch.setitem(families.FAMILIES, "llama", replace(families.FAMILIES["llama"], sinks=True))
    twins = make(DIMS.changed(dtype=int(dtype), window=window, quantised_kv=quantised_kv))
    check_attention(twins)
    check_attention_splits(twins)
    [attention] = [p for p in twins.forward if p.operation is Operation.ATTENTION]
    assert "sinks" in str(phase_refusal(attention, twins.dims))
    twins.backend.close()


def test_bits_do_not_depend_on_rows_or_tiles(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {0: (0, 40)})
    cases = [("qkv_rope", B.Q, 240, 144), ("gate_up_silu", B.ACT, 104, 104)]
    cases += [("o_proj", B.X, 72, 72), ("down_proj", B.X, 72, 72)]
    for name, out, cols, kept in cases:
        start = backend.buffer(out).copy()
        backend.execute(record(P[name], 0, 40, 0, cols), 0, table, FORWARD)
        together = backend.buffer(out)[:, :kept].copy()
        backend.buffer(out)[:] = start
        for row, rows in ((0, 1), (1, 2), (3, 6), (9, 1), (10, 30)):
            for col in range(0, cols, 44):  # most of these tiles begin inside a panel of 16 packed columns
                backend.execute(record(P[name], row, rows, col, min(44, cols - col)), 0, table, FORWARD)
        np.testing.assert_array_equal(backend.buffer(out)[:, :kept], together, err_msg=name)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_bits_do_not_depend_on_the_instructions_that_multiply(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Fused multiply-adds of 8 lanes, of 16 lanes and of bfloat16 pairs give the same bits, also for subnormals."""
    dims, rng = DIMS.changed(dtype=int(Dtype.BF16)), np.random.default_rng(rows)
    found: dict[str, np.ndarray] = {}
    given = rng.integers(0, 1 << 16, (rows, DIMS.split.q_cols)).astype(np.uint16)
    given = np.where(given & 0x7F80 == 0x7F80, given & 0x8FFF, given)  # finite
    given[::2] &= 0x83FF  # below 2^-119, so that products and sums are also subnormal
    for simd in WIDTHS[1:]:  # the portable path has no fused multiply-adds
        monkeypatch.setenv("MEGAKERNEL_SIMD", simd)
        try:
            native.simd()
        except MegakernelError:
            continue
        twins = make(dims)
        backend = twins.backend
        backend.buffer(B.X)[:] = backend.buffer(B.B_O, 0)[:] = 0
        backend.buffer(B.ATTN)[:rows] = given
        backend.execute(record(P["o_proj"], 0, rows, 0, 72), 0, make_table(dims, {0: (0, 40)}), FORWARD)
        found[simd] = backend.buffer(B.X)[:rows].view(np.uint32).copy()
        backend.close()
    if len(found) < 2:
        pytest.skip("this processor has no two paths to compare")
    for simd, bits in found.items():
        np.testing.assert_array_equal(bits, next(iter(found.values())), err_msg=simd)
        assert bits.any()


@pytest.fixture
def making(simd: str) -> Callable[[Dims, int], CpuTwins]:
    return lambda dims, seed: make(dims.changed(kv_page=64), seed=seed)


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [7, 203, 12345])
def test_sample(making: Callable[[Dims, int], CpuTwins], vocab: int, step: float) -> None:
    compare_samples(making, DIMS, vocab, step)


def test_hostile_logits(making: Callable[[Dims, int], CpuTwins]) -> None:
    check_hostile_logits(making, DIMS)


def test_tied_embedding_is_stored_once() -> None:
    twins = make(DIMS, tied=True)
    twins.compare(record(P["lm_head"], 0, 5, 0, 203), 0, make_table(twins.dims, {0: (0, 40)}))
    twins.backend.close()


def test_unknown_simd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAKERNEL_SIMD", "sse9")
    with pytest.raises(MegakernelError, match="portable, avx2, avx512 or avx512bf16"):
        native.simd()
