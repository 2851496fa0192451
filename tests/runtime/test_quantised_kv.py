"""Tests of a KV cache in Q8_0: which bytes are stored, and what it takes. test_cpu_instructions.py tests how attention
reads them, and test_invariance.py what must be bit-identical."""

from dataclasses import replace

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, Array, Item, RandomCheckpoint, make_table, set_items
from engine_support import TINY
from handmade import record
from stored_checkpoints import logits as logits_of
from twins import CpuTwins, get_rows

from megakernel import LLM
from megakernel.isa import BUFFERS, Buffer, Dtype, attention_cost, kv_bytes
from megakernel.isa.context import cache_bytes
from megakernel.machine import host
from megakernel.model import families
from megakernel.model.quantise import quantise
from megakernel.roofline import memory_fit, step_work
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.scheduler import Spec, compile_program, passes
from megakernel.scheduler.verify import verify
from megakernel.serving.engine.memory import kv_capacity, token_bytes

B = Buffer
QUANTISED = DIMS.changed(quantised_kv=1)


class Columns(RandomCheckpoint):
    """A checkpoint in which each column of W_QKV is the desired Q, K and V of one token row. If the input rows are
    those of the identity matrix, the product of row i and W_QKV is column i."""

    def values(self, buffer: Buffer, layer: int) -> Array:
        if buffer is not B.W_QKV:
            return super().values(buffer, layer)
        d, rng = self.dims, np.random.default_rng(5)
        heads = d.split.qkv_cols // d.model.head_dim
        rows = rng.standard_normal((d.model.hidden, heads, d.model.head_dim)).astype(np.float32)
        # The float16 scales of these rows range from subnormal to infinite.
        rows *= np.float32(10.0) ** rng.integers(-9, 8, rows.shape[:2])[..., None]
        # The maximum of 127 makes every scale 1, so that values such as 2.5 are halfway between two integers.
        rows[1] = rng.integers(-254, 255, rows[1].shape) / 2
        rows[1, :, ::32] = 127
        rows[2] = 0
        return np.ascontiguousarray(rows.reshape(d.model.hidden, -1).T)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_rows_are_stored_as_weights_are_quantised(simd: str, head_dim: int) -> None:
    stored = []
    for flag in (0, 1):
        dims = DIMS.changed(head_dim=head_dim, quantised_kv=flag)
        checkpoint, table = Columns(dims, biased=False), make_table(dims, {0: (9, 30)})
        backend = CpuBackend(checkpoint, dims, PAGES, threads=1)
        backend.buffer(B.H)[:] = np.eye(dims.bucket.tokens, dims.model.hidden)
        backend.buffer(B.H)[3] = np.nan
        backend.buffer(B.ROPE)[:] = np.tile(np.float32([1, 0]), head_dim // 2)
        forward = passes.apply(families.forward(checkpoint.config), dims.split)
        for col, cols in ((0, 7 * head_dim), (7 * head_dim, 3 * head_dim)):
            backend.execute(record(forward.by_name["qkv_rope"], 0, 30, col, cols), 1, table, forward)
        stored.append([backend.buffer(buffer, 1).copy() for buffer in (B.K_CACHE, B.V_CACHE)])
        backend.close()
    position = np.arange(9, 39)
    page, offset = table.block_tables[0, position // 16, None], (position % 16)[:, None]
    for buffer, whole, found in zip((B.K_CACHE, B.V_CACHE), *stored, strict=True):
        head = np.arange(2)
        rows = (whole.transpose(0, 1, 3, 2) if buffer is B.K_CACHE else whole)[page, head, offset]
        got = found[cache_bytes(dims, buffer, page, head, offset)]
        with np.errstate(all="ignore"):
            expected = quantise(rows.reshape(-1, head_dim), Dtype.Q8_0)[:, : dims.model.kv_row].reshape(got.shape)
        real = np.arange(30) != 3
        np.testing.assert_array_equal(got[real], expected[real], err_msg=buffer.name)
        assert np.isnan(get_rows(found, dims, buffer)[page[3], head, offset[3]]).all(), "NaN stays NaN"


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_heads_of_part_of_a_block_and_of_several(simd: str, head_dim: int) -> None:
    dims = QUANTISED.changed(head_dim=head_dim, kv_page=32)
    checkpoint = RandomCheckpoint(dims)
    twins = CpuTwins(checkpoint, passes.apply(families.forward(checkpoint.config), dims.split), dims)
    table = make_table(dims, {0: (250, 20), 1: (299, 1)})
    set_items(table, [Item(0, 0, 20, 0, 2), Item(0, 20, 1, 0, 2)])
    twins.compare(record(twins.forward.by_name["attention"], 0, 1, 2), 1, table)
    twins.backend.close()


ROWS = 100
BUCKET = {"tokens": ROWS, "logit_rows": ROWS, "max_seqs": 3, "max_context": 400}


def logits(backend: str, dtype: Dtype = Dtype.F32, tp: int = 1, *, quantised_kv: bool = True) -> Array:
    """Return the logits of every row of a prompt of ROWS tokens."""
    checkpoint = RandomCheckpoint(DIMS.changed(heads=8, dtype=int(dtype)))
    return logits_of(backend, checkpoint, ROWS, tp, quantised_kv=quantised_kv)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_agree_with_the_reference(tp: int) -> None:
    """With four ranks, two of them share each KV head, and each of the two quantises it."""
    got, expected = (logits(backend, tp=tp) for backend in ("cpu", "reference"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_logits_are_close_to_those_of_a_whole_cache(dtype: Dtype) -> None:
    quantised, whole = (logits("cpu", dtype, quantised_kv=q) for q in (True, False))
    # The measured ratios are 0.0033 in float32 and 0.0058 in bfloat16.
    assert 0 < np.abs(quantised - whole).max() < 0.01 * np.abs(whole).max()


def test_programs_cut_no_head_and_a_proof_says_so() -> None:
    """With a quantised cache, each tile consists of whole heads, and the verifier rejects programs that cut a head. The
    elements of a quantisation block share one scale, so one instruction must compute them all."""
    config, machine = RandomCheckpoint(DIMS).config, host(7).with_tiles(cols=16)
    specs = (Spec(config, machine, dtype=Dtype.F32, quantised_kv=q, **BUCKET) for q in (False, True))
    plain, program = map(compile_program, specs)
    assert verify(plain).ok and verify(program).ok
    for flag, message in ((1, "its column tile cuts a head"), (2, "out of range")):
        found = verify(replace(plain, dims=plain.dims.changed(quantised_kv=flag))).violations
        assert any(message in violation for violation in found)


def test_the_engine_says_how_it_stores_them() -> None:
    for name, shown in (("auto", "bf16"), ("q8_0", "q8_0")):
        with LLM(TINY, backend="null", kv_cache_dtype=name, max_context=32, max_num_seqs=1) as llm:
            assert llm.about["kv_cache"] == shown


def test_bytes_of_the_cache() -> None:
    """A block of 32 elements takes 34 bytes. A head's partial last block takes 2 bytes plus 1 byte per element. The KV
    pool, the cost functions and the roofline formulas agree on this size."""
    for head_dim, row in ((8, 10), (24, 26), (64, 68), (80, 86), (128, 136)):
        dims = DIMS.changed(head_dim=head_dim, quantised_kv=1)
        whole = dims.changed(quantised_kv=0, dtype=int(Dtype.BF16))
        assert (kv_bytes(dims.model), kv_bytes(whole.model)) == (2 * row, 4 * head_dim)
        for buffer in (B.K_CACHE, B.V_CACHE):
            spec = BUFFERS[buffer]
            assert spec.resolve_dtype(dims.model).itemsize * np.prod(spec.shape(dims, 7)) == 7 * 2 * 16 * row
        assert attention_cost(dims.model, 3, 100.0) == (attention_cost(whole.model, 3, 100.0)[0], 3 * 100 * 2 * row)
        forward = passes.apply(families.forward(RandomCheckpoint(dims).config), dims.split)
        assert step_work(forward, dims.split, [1, 1], [50, 70], 2).kv_bytes == 120 * 2 * 2 * 2 * row
        assert memory_fit([dims], 0, 1e9, 5, 100)["kv_bytes"] == 5 * 100 * 2 * 2 * 2 * row


def test_the_pool_holds_more_tokens() -> None:
    config = replace(TINY.config, head_dim=64)
    pool = 1000 * (2 * 2 * 2 * 64 * 2)  # enough for 1,000 tokens in bfloat16
    sizes = (token_bytes(config, Dtype.BF16, 1, quantised) for quantised in (False, True))
    bf16, q8 = (kv_capacity(config.max_context, size, 4 * pool, pool, 64, 64)[1] for size in sizes)
    assert (bf16, q8) == (1000, 1000 * 128 // 68)
