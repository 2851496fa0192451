"""Runs single instructions on the reference backend and on another interpreter, and compares their buffers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cpu_support import PAGES, Item, RandomCheckpoint, make_table, set_items
from handmade import record, segment
from launch_image import LaunchImage
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, Forward, Space, StepTable, from_f32, to_f32
from megakernel.isa.context import cache_bytes
from megakernel.isa.record import Records
from megakernel.model.quantise import quantise
from megakernel.program import Program
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.runtime.reference import ReferenceBackend

Array = NDArray[Any]
Key = tuple[int, Buffer, int]  # rank, buffer, layer


def cache_slots(view: Array, dims: Dims) -> tuple[int, int, int]:
    """Return (pages, KV heads, tokens per page) of `view`, which is a rank's K_CACHE or V_CACHE."""
    return view.shape[0], view.shape[1], dims.bucket.kv_page


def get_rows(view: Array, dims: Dims, buffer: Buffer) -> NDArray[np.float32]:
    """Return the dequantised contents of a quantised K_CACHE or V_CACHE, indexed by [page, KV head, token, element]."""
    rows = view[cache_bytes(dims, buffer, *np.indices(cache_slots(view, dims)))]
    whole = Dtype.Q8_0.row_bytes(dims.model.head_dim) - dims.model.kv_row
    with np.errstate(invalid="ignore"):  # infinite scale times 0
        return to_f32(np.pad(rows, [(0, 0)] * 3 + [(0, whole)]), Dtype.Q8_0)[..., : dims.model.head_dim]


def set_rows(view: Array, dims: Dims, buffer: Buffer, rows: NDArray[Any]) -> None:
    """Quantise `rows`, which have the shape that `get_rows` returns, and store them in a quantised K_CACHE or V_CACHE.
    A row that begins with NaN gets NaN as its scale."""
    slots = cache_slots(view, dims)
    flat = np.ascontiguousarray(rows, dtype=np.float32).reshape(-1, dims.model.head_dim)
    blocks = quantise(np.nan_to_num(flat), Dtype.Q8_0)[:, : dims.model.kv_row]
    blocks[np.isnan(flat[:, 0]), 1::34] = 0x7F
    view[cache_bytes(dims, buffer, *np.indices(slots))] = blocks.reshape(*slots, dims.model.kv_row)


class Twins(ABC):
    """The reference backend and another interpreter, with the same weights. All other float buffers of the reference
    are filled with random numbers, including KV cache slots that no sequence uses. `start_equal` copies them to the
    other interpreter."""

    def __init__(self, checkpoint: RandomCheckpoint, forward: Forward, dims: Dims, seed: int = 0) -> None:
        self.dims, self.forward = dims, forward
        self.reference = ReferenceBackend(checkpoint, dims, PAGES)
        rng = np.random.default_rng(seed)
        for key in self.copies():
            view, kind = self.buffer(*key), BUFFERS[key[1]].resolve_dtype(dims.model)
            if kind is Dtype.Q8_0:
                set_rows(view, dims, key[1], rng.standard_normal((*cache_slots(view, dims), dims.model.head_dim)))
            elif kind is not Dtype.I32:
                view[:] = from_f32(rng.standard_normal(view.shape, dtype=np.float32), kind)

    def copies(self) -> list[Key]:
        """Return (rank, buffer, layer) of every buffer to compare. Weights are not compared."""
        return [
            (rank, buffer, layer)
            for rank in range(self.dims.split.tp)
            for buffer, spec in BUFFERS.items()
            if spec.space is not Space.WEIGHT
            for layer in range(self.dims.model.layers if spec.layered else 1)
        ]

    def buffer(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        """Return a view of the rows that are compared, in the reference's copy of a buffer."""
        return self.reference.buffer(buffer, layer, rank)

    def fill_unused(self, table: StepTable, layer: int, value: float) -> None:
        """Store `value` in those slots of the reference's KV cache that hold no token that the step's rows see."""
        unused = np.ones((PAGES, self.dims.bucket.kv_page), bool)
        for row in np.flatnonzero(table.row_seq >= 0):
            after = int(table.positions[row]) + 1
            token = np.arange(max(after - self.dims.model.span(layer), 0), after)
            pages = table.block_tables[table.row_seq[row], token // self.dims.bucket.kv_page]
            unused[pages, token % self.dims.bucket.kv_page] = False
        for rank in range(self.dims.split.tp) if self.dims.model.quantised_kv else ():
            for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                view = self.buffer(rank, buffer, layer)
                rows = get_rows(view, self.dims, buffer)
                rows.transpose(0, 2, 1, 3)[unused] = value
                set_rows(view, self.dims, buffer, rows)
        stored = from_f32(np.full(1, value, np.float32), Dtype(self.dims.model.dtype))[0]
        for rank in () if self.dims.model.quantised_kv else range(self.dims.split.tp):
            self.buffer(rank, Buffer.K_CACHE, layer).transpose(0, 3, 1, 2)[unused] = stored
            self.buffer(rank, Buffer.V_CACHE, layer).transpose(0, 2, 1, 3)[unused] = stored

    @abstractmethod
    def other(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        """Return a view of the rows that are compared, in the other interpreter's copy of a buffer."""

    @abstractmethod
    def execute(self, instruction: Records, layer: int, table: StepTable, rank: int) -> None:
        """Run an instruction on the other interpreter, but not on the reference."""

    def run(self, instruction: Records, layer: int, table: StepTable, rank: int = 0) -> dict[Key, Array]:
        """Run an instruction on the other interpreter, starting from the contents of the reference's buffers. Returns
        copies of the other interpreter's buffers. The reference does not run the instruction."""
        self.start_equal()
        self.execute(instruction, layer, table, rank)
        return {key: self.other(*key).copy() for key in self.copies()}

    def start_equal(self) -> None:
        """Copy the contents of the reference's buffers to the other interpreter."""
        for key in self.copies():
            self.other(*key)[:] = self.buffer(*key)

    def compare(self, instruction: Records, layer: int, table: StepTable, rank: int = 0, **tolerances: float) -> None:
        """Run an instruction on both interpreters from equal buffers. Check that all ranks' buffers stay equal."""
        self.start_equal()
        self.execute_both(instruction, layer, table, rank)
        self.assert_equal(**tolerances)

    def execute_both(self, instruction: Records, layer: int, table: StepTable, rank: int) -> None:
        self.execute(instruction, layer, table, rank)
        self.reference.execute(instruction, layer, table, self.forward, rank)

    def assert_equal(self, rtol: float = 2e-5, atol: float = 2e-5) -> None:
        """Check that the buffers of the two interpreters are equal. Integers must match exactly. Floats may differ by
        the tolerances, and bfloat16 and Q8_0 values also by one rounding step of the type."""
        for key in self.copies():
            got, expected, name = self.other(*key), self.buffer(*key), f"{key[1].name} of rank {key[0]}, layer {key[2]}"
            if got.dtype == np.int32:
                np.testing.assert_array_equal(got, expected, err_msg=name)
                continue
            if got.dtype == np.uint8:
                got, expected = (get_rows(array, self.dims, key[1]) for array in (got, expected))
                same = (got == expected) | (np.isnan(got) & np.isnan(expected))
                # A value may be rounded to the neighbouring step. A step of Q8_0 is at most 1/127 of the row's maximum.
                step = np.abs(expected).max(axis=-1, keepdims=True) / 100
                assert (same | (np.abs(got - expected) <= step)).all() and same.mean() > 0.99, name
                continue
            rounded = max(rtol, 2**-7) if got.dtype == np.uint16 else rtol
            # Partial attention outputs are larger, so they differ more: they are not yet divided by the softmax's sum.
            wide = atol * 10 if key[1] is Buffer.PARTIALS else atol
            np.testing.assert_allclose(to_f32(got), to_f32(expected), rtol=rounded, atol=wide, err_msg=name)


class HostTwins(Twins):
    """Compares the reference with the Hopper interpreter, which runs on the host. There is one counter per row block. A
    call of `execute` sets the counters to zero first."""

    def __init__(self, checkpoint: RandomCheckpoint, forward: Forward, dims: Dims, seed: int = 0) -> None:
        super().__init__(checkpoint, forward, dims, seed)
        nothing, totals = segment(*[[]] * dims.split.tp), np.zeros((dims.split.tp, dims.bucket.row_blocks), np.int32)
        empty = Program(dims, forward, "none", dims.split.tp, 1, dims.bucket.row_blocks, *[nothing] * 3, *[totals] * 3)
        self.image = LaunchImage(self.reference, empty, StepTable(dims), poison=False)

    def other(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        return self.image.buffer(buffer, layer, rank)

    def execute(self, instruction: Records, layer: int, table: StepTable, rank: int) -> None:
        for each in range(self.dims.split.tp):
            self.image.counters(each)[:] = 0
        self.image.execute(instruction, layer, rank, table)


class CpuTwins(Twins):
    """Compares the CPU backend with the reference. All ranks of the CPU backend share one copy of the output buffers,
    so only the rows that belong to a rank are compared. SPLITS, the number of finished items of each attention split,
    is not compared."""

    def __init__(self, checkpoint: RandomCheckpoint, forward: Forward, dims: Dims, seed: int = 0) -> None:
        super().__init__(checkpoint, forward, dims, seed)
        self.backend = CpuBackend(checkpoint, dims, PAGES, threads=1)

    def copies(self) -> list[Key]:
        return [key for key in super().copies() if key[1] is not Buffer.SPLITS]

    def buffer(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        return super().buffer(rank, buffer, layer)[self._rows(rank, buffer)]

    def other(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        height = len(self.reference.buffer(buffer, layer, rank))
        return self.backend.buffer(buffer, layer, rank)[:height][self._rows(rank, buffer)]

    def _rows(self, rank: int, buffer: Buffer) -> slice:
        """Return the rows of a buffer that a rank uses. Ranks share the output buffers but use separate rows."""
        if BUFFERS[buffer].space is not Space.OUTPUT:
            return slice(None)
        own = self.dims.own_logit_rows if buffer is Buffer.LOGITS else self.dims.bucket.logit_rows if rank == 0 else 0
        return slice(rank * own, (rank + 1) * own)

    def execute(self, instruction: Records, layer: int, table: StepTable, rank: int) -> None:
        self.backend.execute(instruction, layer, table, self.forward, rank)


def check_norm_on_the_way_in(
    own: Twins, inside: Twins, name: str, table: StepTable, layer: int, tiles: Sequence[tuple[int, ...]]
) -> None:
    """Check that tiles of a matmul that normalises its inputs, in the forward pass of `inside`, have the bits of tiles
    after a norm of its own, in that of `own`. Rows that the norm stores elsewhere are not read."""
    matmul = inside.forward.by_name[name]
    norm = next(p for p in own.forward.body if p.weights is matmul.norm)
    for key in own.copies():
        inside.buffer(*key)[:] = own.buffer(*key)
    inside.buffer(0, Buffer.H)[:] = from_f32(np.full(1, np.nan, np.float32), Dtype(own.dims.model.dtype))
    for row, rows, *columns in tiles:
        own.buffer(0, Buffer.H)[:] = own.run(record(norm, row, rows), layer, table)[0, Buffer.H, 0]
        expected = own.run(record(own.forward.by_name[name], row, rows, *columns), layer, table)
        got = inside.run(record(matmul, row, rows, *columns), layer, table)
        changed = {key for key in got if got[key].tobytes() != inside.buffer(*key).tobytes()}
        assert changed == {k for k in got if expected[k].tobytes() != own.buffer(*k).tobytes()} != set()
        assert [key for key in changed if got[key].tobytes() != expected[key].tobytes()] == []


def sampling_table(twins: Twins, seed: int) -> StepTable:
    """Return a step table whose rows have random sampling parameters of all kinds. Writes a random history of tokens
    for every row to the reference."""
    rng = np.random.default_rng(seed)
    dims, n = twins.dims, twins.dims.bucket.logit_rows
    table = make_table(dims, {})
    table.logit_rows[:] = np.arange(n) % dims.bucket.tokens
    table.sample_slot[:] = table.history_slot[:] = np.arange(n)
    table.sample_position[:] = rng.integers(1, dims.bucket.max_context, n)
    table.prompt_length[:] = table.sample_position // 2
    for slot in range(n):
        tokens = rng.integers(0, min(dims.model.vocab, 60), dims.bucket.max_context).astype(np.int32)
        twins.reference.write_history(slot, 0, tokens)
    table.temperature[:] = rng.choice([0.0, 0.3, 1.0, 2.5], n, p=[0.1, 0.2, 0.4, 0.3])
    table.top_p[:] = rng.choice([1.0, 0.9, 0.5, 1e-6], n)
    table.min_p[:] = rng.choice([0.0, 0.0, 0.05, 0.5], n)
    table.top_k[:] = rng.choice([0, 0, 1, 5, 50, 100000], n)
    table.presence_penalty[:] = rng.choice([0.0, 0.5, -1.0], n)
    table.frequency_penalty[:] = rng.choice([0.0, 0.2], n)
    table.repetition_penalty[:] = rng.choice([1.0, 1.3], n)
    table.seed_low[:], table.seed_high[:] = rng.integers(-(2**31), 2**31, (2, n))
    table.choice[:] = rng.integers(0, 5, n)
    half = dims.bucket.bias_entries // 2
    table.bias_begin[1], table.bias_end[1] = 0, half
    table.bias_begin[3], table.bias_end[3] = half, dims.bucket.bias_entries
    table.bias_ids[:] = rng.integers(0, dims.model.vocab, dims.bucket.bias_entries)
    table.bias_ids[1] = table.bias_ids[0]  # two biases of one token add up
    table.bias_values[:] = rng.choice([3.0, -2.0, -np.inf], dims.bucket.bias_entries)
    table.mask_count[:], table.mask[[0, 2, 3, n - 1]] = dims.bucket.mask_rows, np.arange(4) % dims.bucket.mask_rows + 1
    few = rng.integers(0, 2**32, (dims.bucket.mask_rows, dims.model.mask_words), np.uint32)
    # Some 32-bit words of the token masks have no bit set, or at most the lowest two. Every seventh word is all ones.
    few[1:] &= rng.choice(np.array([0, 3, 2**32 - 1], np.uint32), few[1:].shape)
    few[1:, ::7] |= np.uint32(2**32 - 1)
    table.masks[:] = few.view(np.int32)
    return table


def compare_samples(make: Callable[[Dims, int], Twins], dims: Dims, vocab: int, step: float) -> None:
    """Check that both interpreters sample the same tokens from random logits, with sampling parameters of all kinds.
    Rounds the logits to multiples of `step`, so that ties occur, unless `step` is 0."""
    n = 24
    dims = dims.changed(vocab=vocab, logit_rows=n, max_seqs=n, max_context=96, bias_entries=8, mask_rows=3)
    for seed in range(3):
        twins = make(dims, seed)
        for rank in range(dims.split.tp):
            logits = twins.buffer(rank, Buffer.LOGITS)
            logits[:] = np.round(3 * logits / step) * step if step else 3 * logits
        table = sampling_table(twins, seed)
        table.target[5], table.sample_slot[6], table.logit_rows[7], table.sample_slot[7] = vocab - 1, -1, -1, -1
        for rank in range(dims.split.tp):  # each writes the tokens to all histories, and rank 0 alone to the outputs
            rows = record(twins.forward.by_name["sample"], 0, n // (rank + 1))
            twins.compare(rows, 1, table, rank, atol=1e-4)


def check_hostile_logits(make: Callable[[Dims, int], Twins], dims: Dims) -> None:
    """Check that sampling ends and returns a valid token from rows in which all logits are NaN, -inf, 0 or 3e38. The
    test draws tokens at temperature 1 and greedily."""
    twins = make(dims.changed(logit_rows=4, max_seqs=4, max_context=96, bias_entries=8, mask_rows=3), 0)
    table = sampling_table(twins, 2)
    for temperature in (1.0, 0.0):
        table.temperature[:], table.top_p[:], table.top_k[:] = temperature, 0.9, 5
        twins.buffer(0, Buffer.LOGITS)[:] = np.array([np.nan, -np.inf, 0.0, 3e38], np.float32)[:, None]
        tokens = twins.run(record(twins.forward.by_name["sample"], 0, 4), 1, table)[0, Buffer.TOKENS_OUT, 0]
        assert ((tokens >= 0) & (tokens < twins.dims.model.vocab)).all()


def check_attention_splits(twins: CpuTwins) -> None:
    """Check that attention gives the same bits if several items share the heads, rows and KV blocks of one item.
    SPLITS, which counts the finished items of a split, must be zero afterwards."""
    table = make_table(twins.dims, {0: (290, 5), 1: (120, 9)})
    whole = [Item(0, 0, 5, 0, 2), Item(0, 5, 9, 0, 2)]
    cut = [Item(0, 0, 5, 0, 1, (2, 3), 1, 2, 7), Item(1, 0, 5, 0, 1, (0, 2), 1, 2, 7), Item(2, 0, 2, 1, 1)]
    cut += [Item(2, 2, 3, 1, 1), Item(3, 5, 1, 0, 2), Item(3, 6, 8, 0, 1), Item(3, 6, 8, 1, 1)]
    found = []
    for items in (whole, cut):
        set_items(table, items)
        twins.fill_unused(table, 1, np.nan)
        twins.start_equal()
        for slot in range(4):
            twins.backend.execute(record(twins.forward.by_name["attention"], slot, 1, 2), 1, table, twins.forward)
        found.append(twins.backend.buffer(Buffer.ATTN)[:14].copy())
    np.testing.assert_array_equal(*found)
    assert not twins.backend.buffer(Buffer.SPLITS).any()
