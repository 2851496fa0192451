"""Bodies of the CUDA interpreter's instructions that are no matmul, run on the host, against the reference.

The matrix instructions of the device are loops on the host; control, pages, masks, merges and addresses are the same
code. What the compiler makes of the bodies for the device is checked where there is an nvcc.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, Array, Item, RandomCheckpoint, make_table, set_items
from program_parts import record

from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, Space, StepTable, from_f32, to_f32
from megakernel.isa.record import Records
from megakernel.runtime.cpu.native import CDims
from megakernel.runtime.reference import ReferenceBackend

ROOT = Path(__file__).parents[2]
INCLUDES = [f"-I{ROOT / 'csrc' / 'cuda'}"]
B = Buffer
LAYER = 1
BF16_DIMS = replace(DIMS, dtype=int(Dtype.BF16), page=128, row_block=64, tokens=48)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the package itself needs a C++ compiler"
    target = tmp_path_factory.mktemp("ops") / "ops.so"
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread"]
    source = str(ROOT / "tests" / "support" / "cuda_ops.cpp")
    subprocess.run([compiler, *flags, *INCLUDES, source, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@dataclass
class Machine:
    """The reference, and copies of its buffers on which the bodies run."""

    library: ctypes.CDLL
    dims: Dims
    seed: int = 0

    def __post_init__(self) -> None:
        checkpoint = RandomCheckpoint(replace(self.dims, tp=1, replicated_o=0, one_hop=0))
        self.reference = ReferenceBackend(checkpoint, self.dims, PAGES, dtype=Dtype.BF16)
        rng = np.random.default_rng(self.seed)
        for rank in range(self.dims.tp):
            for buffer, spec in BUFFERS.items():
                kind = spec.resolve_dtype(self.dims)
                view = self.reference.buffer(buffer, LAYER if spec.layered else 0, rank)
                if spec.space is not Space.WEIGHT and kind is not Dtype.I32:
                    view[:] = from_f32(rng.standard_normal(view.shape, dtype=np.float32), kind)
        self.done = np.zeros(self.dims.items, np.int32)

    def buffer(self, buffer: Buffer, rank: int = 0) -> Array:
        return self.reference.buffer(buffer, LAYER if BUFFERS[buffer].layered else 0, rank)

    def run(self, instruction: Records, table: StepTable, rank: int = 0) -> dict[tuple[int, Buffer], Array]:
        """Execute on copies; all buffers of all ranks afterwards."""
        after = {(r, b): self.buffer(b, r).copy() for r in range(self.dims.tp) for b in Buffer}
        dims = CDims.of(replace(self.dims, rank=rank))
        pointers = (ctypes.c_void_p * len(after))(*(a.ctypes.data for a in after.values()))
        scratch = np.full(2 * self.dims.vocab, np.nan, np.float32)
        words, self.done = np.ascontiguousarray(table.words), np.zeros(self.dims.items, np.int32)
        unfinished = self.library.run_op(
            ctypes.byref(dims),
            words.ctypes.data_as(ctypes.c_void_p),
            pointers,
            instruction.ctypes.data_as(ctypes.c_void_p),
            PAGES,
            scratch.ctypes.data_as(ctypes.c_void_p),
            self.done.ctypes.data_as(ctypes.c_void_p),
        )
        assert unfinished == 0, "not all pages were taken"
        return after

    def compare(
        self, instruction: Records, table: StepTable, rank: int = 0, rtol: float = 2e-5, atol: float = 2e-5
    ) -> None:
        """The body does to every buffer of every rank what the reference does."""
        after = self.run(instruction, table, rank)
        self.reference.execute(instruction, LAYER, table, rank)
        for (r, buffer), got in after.items():
            expected = self.buffer(buffer, r)
            if got.dtype == np.int32:
                np.testing.assert_array_equal(got, expected, err_msg=f"{buffer.name} of rank {r}")
                continue
            tolerance = max(rtol, 2**-7) if got.dtype == np.uint16 else rtol
            wide = atol * 10 if buffer is B.PARTIALS else atol  # not yet divided by l
            np.testing.assert_allclose(
                to_f32(got), to_f32(expected), rtol=tolerance, atol=wide, err_msg=f"{buffer.name} of rank {r}"
            )


def ranks(dims: Dims) -> list[Dims]:
    """The same sizes on one rank; on three, rows having owners; on three, the residual being everywhere."""
    return [dims, replace(dims, tp=3, row_block=16), replace(dims, tp=3, row_block=16, one_hop=1)]


def test_embed_and_rope(library: ctypes.CDLL) -> None:
    dims = replace(BF16_DIMS, max_context=131072, head_dim=80, max_seqs=1)
    machine = Machine(library, dims)
    table = StepTable(dims)
    table.token_ids[:] = np.arange(dims.tokens) * 4
    table.positions[:] = np.arange(dims.tokens) * 2741
    table.token_ids[21] = -1
    machine.reference.write_history(0, int(table.positions[21]), np.array([77], np.int32))
    for name in ("embed", "rope"):
        machine.compare(record(name, 3, 41), table, rtol=0, atol=3e-7 if name == "rope" else 0)


@pytest.mark.parametrize("hidden", [72, 576])
@pytest.mark.parametrize("case", range(3))
def test_norms(library: ctypes.CDLL, hidden: int, case: int) -> None:
    dims = ranks(replace(BF16_DIMS, hidden=hidden))[case]
    machine = Machine(library, dims)
    table = make_table(dims, {0: (0, 48)})
    table.logit_rows[:] = [7, -1, 39, 0, -1]
    row = 16 * (dims.tp - 1)
    for r in range(dims.tp):
        machine.buffer(B.X, r)[47] = np.nan  # read by none
        for name in ("attn_norm", "mlp_norm"):
            machine.compare(record(name, row, 11), table, rank=r)
        machine.compare(record("final_norm", 0, 5), table, rank=r)


@pytest.mark.parametrize("case", [1, 2])
def test_reduces(library: ctypes.CDLL, case: int) -> None:
    dims = ranks(BF16_DIMS)[case]
    machine = Machine(library, dims)
    table = make_table(dims, {0: (0, 48)})
    for name in ("o_reduce", "down_reduce"):
        machine.compare(record(name, 32, 9, 16, 40), table, rank=2)


# (head_dim, query heads, KV heads): every width of a page, groups of 1 to 8, one KV head, sizes that fill no tile.
HEADS = [(64, 9, 3), (64, 4, 4), (128, 8, 2), (80, 8, 1), (24, 6, 2), (128, 3, 1)]
SEQUENCES = {0: (120, 20), 1: (300, 1), 2: (0, 7)}  # first position, rows; rows 28 .. are padding


def attention_machine(library: ctypes.CDLL, dims: Dims) -> tuple[Machine, StepTable]:
    """Cache slots that hold no token of the step are huge: they may meet a zero, no more."""
    machine = Machine(library, dims)
    table = make_table(dims, SEQUENCES)
    for rank in range(dims.tp):
        keep = np.zeros((PAGES, dims.page), bool)
        for row in np.flatnonzero(table.row_seq >= 0):
            token = np.arange(table.positions[row] + 1)
            keep[table.block_tables[table.row_seq[row], token // dims.page], token % dims.page] = True
        huge = from_f32(np.full(1, 1e30, np.float32), Dtype.BF16)[0]
        machine.buffer(B.K_CACHE, rank).transpose(0, 3, 1, 2)[~keep] = huge
        machine.buffer(B.V_CACHE, rank).transpose(0, 2, 1, 3)[~keep] = huge
        for row in np.flatnonzero(table.row_seq < 0):
            machine.buffer(B.Q, rank)[row] = 0x7FC0  # not a number
    return machine, table


def run_items(machine: Machine, table: StepTable, items: Sequence[Item], final: Mapping[int, Sequence[int]]) -> None:
    """`final`: the items of each slot whose rows are final after it."""
    set_items(table.rank(0), items)
    for slot, expected in final.items():
        # Probabilities are rounded to bf16, so an output is off by some 2^-9 of the largest value at most.
        machine.compare(record("attention", slot, 1, machine.dims.kv_heads), table, rtol=2**-7, atol=6e-3)
        np.testing.assert_array_equal(np.flatnonzero(machine.done), expected)
        assert set(machine.done[expected]) <= {8}


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(library: ctypes.CDLL, heads: tuple[int, int, int]) -> None:
    head_dim, query, kv = heads
    dims = replace(BF16_DIMS, head_dim=head_dim, heads=query, kv_heads=kv)
    machine, table = attention_machine(library, dims)
    items = [Item(0, 0, 20, 0, kv), Item(0, 20, 1, 0, kv), Item(1, 21, 7, 0, 1), Item(1, 28, 20, 0, kv)]
    run_items(machine, table, items, {0: [0, 1], 1: [2, 3]})


@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_split_attention(library: ctypes.CDLL, heads: tuple[int, int, int]) -> None:
    """The last item of a split merges all; the bits are those of one item."""
    head_dim, query, kv = heads
    dims = replace(BF16_DIMS, head_dim=head_dim, heads=query, kv_heads=kv, partials=20 * kv * 3)
    whole, table = attention_machine(library, dims)
    set_items(table, [Item(0, 0, 20, 0, kv), Item(0, 20, 1, 0, kv)])
    unsplit = whole.run(record("attention", 0, 1, kv), table)

    machine, table = attention_machine(library, dims)
    splits = [Item(0, 0, 20, 0, kv, blocks=(1, 2), split=2, splits=2), Item(1, 0, 20, 0, kv, (0, 1), 2, 2)]
    run_items(machine, table, splits, {0: [], 1: [1]})
    set_items(table, [splits[0], replace(splits[1], slot=0)])
    rows = machine.run(record("attention", 0, 1, kv), table)[0, B.ATTN][:20]
    np.testing.assert_array_equal(rows, unsplit[0, B.ATTN][:20])

    one = [Item(0, 20, 1, 0, kv, (b, b + 1), 0, 3) for b in range(3)]
    run_items(machine, table, one, {0: [2]})
    row = machine.run(record("attention", 0, 1, kv), table)[0, B.ATTN][20]
    np.testing.assert_array_equal(row, unsplit[0, B.ATTN][20])


def test_rows_alone_have_the_same_bits(library: ctypes.CDLL) -> None:
    machine, table = attention_machine(library, replace(BF16_DIMS, head_dim=64, heads=9, kv_heads=3))
    set_items(table, [Item(0, 0, 20, 0, 3)])
    together = machine.run(record("attention", 0, 1, 3), table)[0, B.ATTN]
    for row in (0, 7, 8, 19):
        set_items(table, [Item(0, row, 1, 1, 2)])
        alone = machine.run(record("attention", 0, 1, 3), table)[0, B.ATTN]
        np.testing.assert_array_equal(alone[row, 192:], together[row, 192:])


@pytest.mark.parametrize(("replicated_o", "one_hop"), [(0, 0), (1, 0), (1, 1)])
def test_attention_of_ranks(library: ctypes.CDLL, replicated_o: int, one_hop: int) -> None:
    """Nine query heads on two ranks: the middle KV head is on both, with two and one of its heads."""
    dims = replace(BF16_DIMS, head_dim=64, heads=9, kv_heads=3, tp=2, row_block=16)
    dims = replace(dims, replicated_o=replicated_o, one_hop=one_hop)
    machine, table = attention_machine(library, dims)
    for rank in range(2):
        view = table.rank(rank)
        set_items(view, [Item(0, 16, 4, 0, 2), Item(0, 20, 1, 0, 2), Item(0, 28, 4, 0, 2)])
        machine.compare(record("attention", 0, 1, 2), table, rank, rtol=2**-7, atol=6e-3)


def sampling_table(dims: Dims, machine: Machine, seed: int) -> StepTable:
    """Rows with all kinds of sampling parameters, and a history for each."""
    rng = np.random.default_rng(seed)
    n = dims.logit_rows
    table = make_table(dims, {})
    table.logit_rows[:] = np.arange(n) % dims.tokens
    table.sample_slot[:] = np.arange(n)
    table.sample_position[:] = rng.integers(1, dims.max_context, n)
    table.prompt_length[:] = table.sample_position // 2
    for slot in range(n):
        tokens = rng.integers(0, min(dims.vocab, 60), dims.max_context).astype(np.int32)
        machine.reference.write_history(slot, 0, tokens)
    table.temperature[:] = rng.choice([0.0, 0.3, 1.0, 2.5], n, p=[0.1, 0.2, 0.4, 0.3])
    table.top_p[:] = rng.choice([1.0, 0.9, 0.5, 1e-6], n)
    table.min_p[:] = rng.choice([0.0, 0.0, 0.05, 0.5], n)
    table.top_k[:] = rng.choice([0, 0, 1, 5, 50, 100000], n)
    table.presence_penalty[:] = rng.choice([0.0, 0.5, -1.0], n)
    table.frequency_penalty[:] = rng.choice([0.0, 0.2], n)
    table.repetition_penalty[:] = rng.choice([1.0, 1.3], n)
    table.seed_low[:], table.seed_high[:] = rng.integers(-(2**31), 2**31, (2, n))
    table.choice[:] = rng.integers(0, 5, n)
    half = dims.bias_entries // 2
    table.bias_begin[1], table.bias_end[1] = 0, half
    table.bias_begin[3], table.bias_end[3] = half, dims.bias_entries
    table.bias_ids[:] = rng.integers(0, dims.vocab, dims.bias_entries)
    table.bias_ids[1] = table.bias_ids[0]  # adds up
    table.bias_values[:] = rng.choice([3.0, -2.0, -np.inf], dims.bias_entries)
    return table


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [7, 203, 12345])
def test_sample(library: ctypes.CDLL, vocab: int, step: float) -> None:
    n = 24
    dims = replace(BF16_DIMS, vocab=vocab, logit_rows=n, max_seqs=n, max_context=96, bias_entries=8)
    for seed in range(3):
        machine = Machine(library, dims, seed)
        logits = machine.buffer(B.LOGITS)
        logits *= 3
        if step:
            logits[:] = np.round(logits / step) * step
        table = sampling_table(dims, machine, seed)
        table.target[5], table.sample_slot[6], table.logit_rows[7], table.sample_slot[7] = vocab - 1, -1, -1, -1
        table.presence_penalty[6] = table.frequency_penalty[6] = 0.0
        table.repetition_penalty[6] = 1.0
        machine.compare(record("sample", 0, n), table, atol=1e-4)


def test_sample_of_ranks(library: ctypes.CDLL) -> None:
    """The token goes to everyone's history, the outputs to rank 0."""
    dims = replace(BF16_DIMS, logit_rows=6, max_seqs=6, tp=2, bias_entries=8)
    machine = Machine(library, dims)
    table = sampling_table(dims, machine, 1)
    for rank in range(2):
        machine.compare(record("sample", 3 * rank, 3), table, rank, atol=1e-4)


def test_hostile_logits(library: ctypes.CDLL) -> None:
    """What is no number, or forbidden everywhere, gives some token and no hang."""
    dims = replace(BF16_DIMS, logit_rows=4, max_seqs=4, bias_entries=8)
    machine = Machine(library, dims)
    table = sampling_table(dims, machine, 2)
    table.temperature[:], table.top_p[:], table.top_k[:] = 1.0, 0.9, 5
    machine.buffer(B.LOGITS)[:] = np.array([np.nan, -np.inf, 0.0, 3e38], np.float32)[:, None]
    tokens = machine.run(record("sample", 0, 4), table)[0, B.TOKENS_OUT]
    assert ((tokens >= 0) & (tokens < dims.vocab)).all()
