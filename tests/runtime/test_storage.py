"""Tests of weights that stay in memory in the type that their file has, such as Q8_0. Such weights must give the same
bits as their float32 values, and take as many bytes as in the file, apart from padding."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, Array, RandomCheckpoint, make_table
from handmade import record
from stored_checkpoints import (
    ODD,
    SHARED,
    Dequantised,
    GivenHead,
    Mixed,
    all_logits,
    assert_close,
    logits,
    program_of,
    quantised,
)

from megakernel import LLM, SamplingParams
from megakernel.cli import main
from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, Buffer, Dtype, to_f32
from megakernel.isa.dtypes import BLOCKS
from megakernel.model.weight_types import stored_as
from megakernel.roofline import step_work
from megakernel.runtime import choose_backend
from megakernel.runtime.cpu import native
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.runtime.cuda.limits import refusal

# Prompt lengths: one row, two rows, more than the 12 rows of the largest register block, and more than the 96 rows of
# one pass over the weights.
PROMPTS = (1, 2, 13, 100)


@cache
def of_the_reference(kind: Dtype, dtype: Dtype) -> list[Array]:
    return all_logits("reference", quantised(ODD, dtype, kind, tied=True)[0], PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Dtype.F16, *BLOCKS], ids=lambda t: t.name)
def test_the_bits_of_what_the_blocks_stand_for(simd: str, kind: Dtype, dtype: Dtype) -> None:
    """Weights in each type give the same bits as their float32 values, and the reference's logits up to rounding. The
    LM head shares the embedding table."""
    blocks, floats = quantised(ODD, dtype, kind, tied=True)
    found = all_logits("cpu", blocks, PROMPTS)
    of_floats = all_logits("cpu", floats, PROMPTS)
    for some, others, reference in zip(found, of_floats, of_the_reference(kind, dtype), strict=True):
        np.testing.assert_array_equal(some, others)
        assert_close(some, reference, dtype)


# In ODD, the type of the up projection's rows changes inside a panel of 16 rows. In SHARED, types change only between
# panels.
@pytest.mark.parametrize("dims", ["ODD", "SHARED"])
@pytest.mark.parametrize("rows", [1, 13])
def test_matrices_of_several_types(dims: str, rows: int) -> None:
    whole = RandomCheckpoint({"ODD": ODD, "SHARED": SHARED}[dims])
    mixed = Mixed(whole, (Dtype.Q4_K, Dtype.Q6_K, Dtype.F16, Dtype.BF16))
    found = logits("cpu", mixed, rows)
    np.testing.assert_array_equal(found, logits("cpu", Dequantised(mixed), rows))
    assert_close(found, logits("reference", mixed, rows), Dtype.F32)


def test_quantised_weights_are_other_weights(dtype: Dtype) -> None:
    """Quantisation changes the logits, so the tests for equal bits can fail. Weights stored as float32 are not rounded,
    even if the backend computes in bfloat16."""
    blocks, floats = quantised(ODD, dtype)
    whole = RandomCheckpoint(ODD.changed(dtype=int(dtype)))
    found = [logits("cpu", c, 2) for c in (blocks, floats, whole, stored_as(whole, "f32"))]
    assert (found[0] != found[2]).mean() > 0.9
    assert (found[2] == found[3]).all() == (dtype is Dtype.F32)
    assert_close(found[3], logits("reference", stored_as(whole, "f32"), 2), dtype)


def test_every_scale_of_a_block(simd: str) -> None:
    """Every float16 value works as the scale of a Q8_0 block. Finite scales, also subnormal ones, give exact weights.
    Infinite and NaN scales give results that are not finite."""
    scales = np.arange(1 << 16, dtype=np.uint16)
    dims = DIMS.changed(ffn=32, vocab=len(scales), hidden=32, layers=1)
    values = np.random.default_rng(3).integers(-128, 128, (len(scales), 32)).astype(np.int8)
    values[:, 0] = -128
    head = np.concatenate([scales[:, None].view(np.uint8), values.view(np.uint8)], axis=1)

    checkpoint = GivenHead(dims, Dtype.Q8_0, head)
    program = program_of(checkpoint, 5)
    backend = CpuBackend(checkpoint, program.dims, PAGES, threads=1)
    tile = record(program.forward.by_name["lm_head"], 0, 1, 0, dims.model.vocab)
    with np.errstate(invalid="ignore"):
        expected = to_f32(head, Dtype.Q8_0)
    for step in (0, 31):  # the input is 1 at `step` and 0 elsewhere, so the logits are exact weights
        backend.buffer(Buffer.Y)[:] = 0
        backend.buffer(Buffer.Y)[0, step] = 1
        backend.execute(tile, 0, make_table(program.dims, {0: (0, 1)}), program.forward)
        found = backend.buffer(Buffer.LOGITS)[0]
        finite = np.isfinite(expected).all(axis=1)
        assert finite.sum() == 2 * 31 * 1024
        np.testing.assert_array_equal(found[finite], expected[finite, step])
        assert not np.isfinite(found[~finite]).any()
    backend.close()


@pytest.mark.parametrize(("tp", "o"), [(2, "replicated"), (8, "sharded")])
def test_ranks_share_blocks(tp: int, o: str) -> None:
    """Ranks that divide quantised matrices give the same bits as with float32 values. With eight ranks, the first has
    more FFN columns than the others."""
    blocks, floats = quantised(SHARED, Dtype.BF16)
    found = logits("cpu", blocks, 13, tp, o=o)
    np.testing.assert_array_equal(found, logits("cpu", floats, 13, tp, o=o))
    assert_close(found, logits("reference", blocks, 13, tp, o=o), Dtype.BF16)


def test_a_rank_takes_no_part_of_a_block() -> None:
    """W_O cannot be divided inside a block of 32 weights. Here the second rank's part would begin at column 72."""
    blocks, _ = quantised(DIMS)
    with pytest.raises(MegakernelError, match="cannot divide W_O in q8_0 among ranks: a part would begin inside"):
        logits("cpu", blocks, 2, 2, o="sharded")
    assert np.isfinite(logits("cpu", blocks, 2, 2, o="replicated")).all()


@pytest.mark.parametrize("kind", [Dtype.F16, *BLOCKS], ids=lambda t: t.name)
def test_packed_weights_have_the_bytes_of_the_file(kind: Dtype) -> None:
    """Packed weights take the bytes of the file, plus padding of partial groups of 16 columns and of cache lines."""
    dims = DIMS.changed(hidden=512, ffn=512)
    blocks, _ = quantised(dims, kind=kind, tied=True)
    backend = CpuBackend(blocks, dims, PAGES, threads=1)
    need = taken = 0
    for buffer in blocks.storage.keys() - {Buffer.LM_HEAD}:
        *matrices, rows, inner = BUFFERS[buffer].shape(dims, 0)
        panels = math.prod(matrices) * -(-rows // 16)
        first, second = (native.CPanel * 2).from_address(backend._lib.mk_bound(backend._engine, 0, buffer, 0))
        need, taken = need + panels * 16 * kind.row_bytes(inner), taken + panels * (second.data - first.data)
    assert need <= taken < need * 1.01
    backend.close()


def test_a_step_reads_the_bytes_of_the_blocks() -> None:
    """A step reads 34 bytes for each block of 32 weights, even a partial one, instead of 4 bytes per float32 weight."""
    whole, (blocks, _) = RandomCheckpoint(SHARED), quantised(SHARED)
    read = []
    for checkpoint in (whole, blocks):
        program = program_of(checkpoint, 1)
        read.append(step_work(program.forward, program.dims.split, [1], [1], 1).weight_bytes)
    d = SHARED
    model, split = SHARED.model, SHARED.split
    layer = [(split.qkv_cols + 2 * model.ffn, model.hidden), (model.hidden, split.q_cols), (model.hidden, model.ffn)]
    matrices = [*layer * d.model.layers, (d.model.vocab + 1, d.model.hidden)]  # the LM head and one embedding row
    saved = sum(rows * (4 * inner - -(-inner // 32) * 34) for rows, inner in matrices)
    assert read[0] - read[1] == pytest.approx(saved, abs=1)  # each buffer's bytes are rounded


@pytest.mark.parametrize(
    ("flag", "message", "known"),
    [("weights", "cannot store weights in 'q4'", "f32, bf16, .*mxfp4"), ("kv_cache_dtype", "K and V in 'q4'", "q8_0")],
)
def test_unknown_types_are_refused(capsys: pytest.CaptureFixture[str], flag: str, message: str, known: str) -> None:
    with pytest.raises(MegakernelError, match=f"{message}: choose from auto, {known}$"):
        LLM("random:smollm2-135m", **{flag: "q4"})  # type: ignore[arg-type]
    name = f"--{flag.replace('_', '-')}"
    assert main(["generate", "--model", "random:smollm2-135m", name, "q4", "--prompt-ids", "1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("kinds", "message"), [(("q8_0", "auto"), "weights in q8_0 are"), (("auto", "q8_0"), "a KV cache in q8_0 is")]
)
def test_cuda_refuses_them_and_auto_takes_another(kinds: tuple[str, str], message: str) -> None:
    """The `cuda` backend refuses quantised weights and caches, whether or not a GPU is present."""
    whole, (weights, cache) = RandomCheckpoint(DIMS), kinds
    with pytest.raises(MegakernelError, match=f"{message} not supported on a Hopper GPU"):
        LLM(whole, backend="cuda", weights=weights, kv_cache_dtype=cache, max_context=32, max_num_seqs=1)  # type: ignore[arg-type]
    assert choose_backend("auto", whole.config, None, *kinds) == ("cpu", None)
    assert "K and V are quantised" in str(refusal(DIMS.changed(dtype=int(Dtype.BF16), quantised_kv=1)))


_SLOWER = [pytest.param(*how, marks=pytest.mark.slow) for how in (("f32", "auto"), ("q8_0", "auto"), ("auto", "q8_0"))]


@pytest.mark.parametrize(("weights", "kv"), [("auto", "auto"), *_SLOWER])
def test_the_default_model_answers(smollm2: Path, weights: str, kv: str) -> None:
    how: dict[str, Any] = {"backend": "cpu", "weights": weights, "kv_cache_dtype": kv}
    with LLM("smollm2-135m", **how, max_context=512, max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16)
        [answer] = llm.chat([{"role": "user", "content": "Name the capital of France."}], params)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
