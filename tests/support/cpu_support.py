"""Shared by the tests of the CPU backend: a small model with unusual sizes and random weights, and step tables."""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sizes import config_of

from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, KV_BLOCK, Buffer, Dims, Dtype, Space, Split, StepTable, from_f32
from megakernel.model import families
from megakernel.model.checkpoint import Storage, WeightRows, cut
from megakernel.program import Program
from megakernel.runtime import Output
from megakernel.runtime.cpu import native
from megakernel.scheduler import passes

Array = NDArray[Any]

# No size is a multiple of a tile's size, so every kernel meets partial tiles. Three query heads share a KV head.
_SIZES = {"vocab": 203, "hidden": 72, "ffn": 104, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 24}
_SIZES |= {"dtype": int(Dtype.F32), "kv_block": KV_BLOCK, "kv_page": 16, "row_block": 32, "tokens": 40, "logit_rows": 5}
_SIZES |= {"max_seqs": 3, "max_context": 400, "items": 8, "attention_slots": 4, "partials": 64, "bias_entries": 6}
DIMS = Dims.of(rms_eps=1e-5, **_SIZES)
PAGES = 80
WIDTHS = ("portable", "avx2", "avx512", "avx512bf16")  # values of MEGAKERNEL_SIMD


def use(monkeypatch: pytest.MonkeyPatch, simd: str) -> None:
    """Set MEGAKERNEL_SIMD to `simd` for this test. Skip the test if the processor does not support it."""
    monkeypatch.setenv("MEGAKERNEL_SIMD", simd)
    try:
        native.simd()
    except MegakernelError as e:
        pytest.skip(str(e))


@dataclass
class RandomCheckpoint:
    """A checkpoint whose weights depend only on the buffer and the layer. Matrices are drawn from N(0, 1 / fan-in), so
    that every weight influences the results."""

    dims: Dims
    tied: bool = False
    biased: bool = True
    name: str = "random"
    storage: dict[Buffer, Storage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = Dtype(self.dims.model.dtype)
        biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), self.biased)
        self.config = config_of(self.dims, tied=self.tied, **biases)

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        values, kind = self.values(buffer, layer), BUFFERS[buffer].resolve_dtype(split.model)
        rows = from_f32(values, kind).reshape(-1, values.shape[-1] if BUFFERS[buffer].matrix else 1)
        return cut([WeightRows(kind, rows.view(np.uint8))], buffer, split)

    def values(self, buffer: Buffer, layer: int) -> Array:
        """All weights of a buffer, in float32."""
        if buffer is Buffer.LM_HEAD and self.tied:
            return self.values(Buffer.EMBED, layer)
        shape = BUFFERS[buffer].shape(self.dims.changed(tp=1), PAGES)
        random = np.random.default_rng((int(buffer), layer)).standard_normal(shape, dtype=np.float32)
        if buffer is Buffer.INV_FREQ:
            pairs = shape[-1]
            random = np.stack([10000.0 ** -np.linspace(0, 1, pairs, endpoint=False), np.linspace(1.25, 0.75, pairs)])
            random = random.astype(np.float32)
        elif len(shape) > 1:
            random /= np.float32(np.sqrt(shape[-1]))
        return random


FORWARD = passes.apply(families.forward(RandomCheckpoint(DIMS).config), DIMS.split)


def make_table(dims: Dims, sequences: Mapping[int, tuple[int, int]], seed: int = 0) -> StepTable:
    """Return a step table with random token IDs and KV pages in random order. `sequences` maps each sequence to the
    position of its first row and its number of rows."""
    rng = np.random.default_rng(seed)
    table = StepTable(dims)
    table.block_tables[:] = rng.permutation(PAGES)[: table.block_tables.size].reshape(table.block_tables.shape)
    table.row_seq[:] = -1
    table.logit_rows[:] = table.sample_slot[:] = table.history_slot[:] = table.target[:] = table.item_split[:] = -1
    table.top_p[:] = table.repetition_penalty[:] = 1.0
    row = 0
    for sequence, (start, rows) in sequences.items():
        table.row_seq[row : row + rows] = sequence
        table.positions[row : row + rows] = np.arange(start, start + rows)
        table.token_ids[row : row + rows] = rng.integers(0, dims.model.vocab, rows)
        row += rows
    return table


@dataclass(frozen=True)
class Item:
    """An attention item in the work list of attention slot `slot`. `blocks` is the range (first, end) of its KV blocks;
    None means all."""

    slot: int
    row: int
    rows: int
    head: int
    heads: int
    blocks: tuple[int, int] | None = None
    split: int = -1
    splits: int = 0
    partial: int = 0


def set_items(table: StepTable, items: Sequence[Item]) -> None:
    """Write attention items, sorted by slot, to the step table."""
    d = table.dims
    for i, item in enumerate(items):
        last = int(table.positions[item.row + item.rows - 1])
        span = last // d.bucket.kv_block + 1 if table.row_seq[item.row] >= 0 else 0
        first, end = item.blocks or (0, span)
        table.item_row[i], table.item_rows[i] = item.row, item.rows
        table.item_kv_head[i], table.item_kv_heads[i] = item.head, item.heads
        table.item_seq[i] = table.row_seq[item.row]
        table.item_block[i], table.item_blocks[i] = first, end - first
        table.item_wait_block[i], table.item_wait_blocks[i] = item.row // d.bucket.row_block, 1
        table.item_split[i], table.item_splits[i] = item.split, item.splits
        table.item_partial[i], table.item_span[i] = item.partial, span
    slots = [item.slot for item in items]
    table.slot_items[:] = np.searchsorted(slots, np.arange(d.bucket.attention_slots + 1))


def fill(backend: Any) -> None:
    """Write random numbers to every float buffer of a backend with one rank, except to the weights."""
    rng, dims = np.random.default_rng(4), backend.dims
    for buffer, spec in BUFFERS.items():
        kind = spec.resolve_dtype(dims.model)
        if spec.space is not Space.WEIGHT and kind is not Dtype.I32:
            for layer in range(dims.model.layers if spec.layered else 1):
                view = backend.buffer(buffer, layer)
                view[:] = from_f32(rng.standard_normal(view.shape, dtype=np.float32), kind)


def bits(output: Output) -> tuple[bytes, ...]:
    """Return a launch's tokens and log probabilities, and the logits of the rows that it sampled, as bytes."""
    live = output.logprobs != 0
    return output.tokens.tobytes(), output.logprobs.tobytes(), output.logits[live].tobytes()


def check_stops(backend: Any, program: Program, table: StepTable, stall: Callable[[], object]) -> None:
    """Check that a launch cannot start before the previous one has ended. Also check that a stalled launch can be
    aborted or interrupted on every rank, and that the next launch then works. `stall` makes one instruction never end
    in later launches that have a trace."""
    before = bits(backend.launch(program, table))
    stall()
    launch = backend.start(program, table, trace=True)
    with pytest.raises(MegakernelError, match="has not ended"):
        backend.start(program, table)
    for _ in range(2):
        launch.abort()  # the second call has no effect
    assert bits(backend.launch(program, table)) == before
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        backend.launch(program, table, trace=True)
    timer.join()
    backend.delay(0, 0, 0, 0.0)
    for trace in (False, True, False):
        assert bits(backend.launch(program, table, trace=trace)) == before
