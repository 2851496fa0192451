"""Copies a checkpoint to the GPUs: each rank's part of each weight buffer, row-major."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ...errors import MegakernelError
from ...isa import BUFFERS, Buffer, Dims, Dtype, column_share, row_shares
from ...model import families
from ...model.checkpoint import Checkpoint, WeightRows, converted, rows_of
from ..buffers import holds_whole
from .heap import Heap, copy_bytes

_THREADS = 8  # threads, each of which reads one tensor at a time


def load_weights(
    heap: Heap, checkpoint: Checkpoint, dims: Dims, places: Collection[tuple[Buffer, int]] | None = None
) -> None:
    """Copy all weights to the GPUs and set their addresses. Ranks on one GPU share weights that each needs as a whole.
    `places` are the (buffer, layer) pairs to copy again, to the same addresses; None: all, for the first time."""
    ranks = dims.ranks
    weights = families.weights(checkpoint.config)
    own = [b for b in weights if not (b is Buffer.LM_HEAD and checkpoint.config.tied)]
    homes = {(d.split.rank, b): _home(heap, ranks, d, b) for d in ranks for b in own}
    if places is None:
        _check_memory(heap, checkpoint, ranks, homes)
    for buffer in own:
        for d in ranks if places is None else []:
            if homes[d.split.rank, buffer] == d.split.rank:
                size = len(BUFFERS[buffer].layers(d.model)) * copy_bytes(buffer, d, 0)
                heap.bind(d.split.rank, buffer, heap.keep(heap.node.gpu(d.split.rank), size))
            else:
                heap.bind(d.split.rank, buffer, heap.address(homes[d.split.rank, buffer], buffer))
        holders = [d for d in ranks if homes[d.split.rank, buffer] == d.split.rank]
        wanted = [n for n in BUFFERS[buffer].layers(dims.model) if places is None or (buffer, n) in places]
        for d, layer, rows in _read_ahead(checkpoint, buffer, wanted, holders):
            begin = 0
            for part in rows:
                array = part.data.view(part.dtype.numpy)
                heap.write(d.split.rank, buffer, layer, array, at=begin)
                begin += array.size
    if checkpoint.config.tied and places is None:
        for d in ranks:
            before = d.split.first_vocab * d.model.hidden * Dtype(d.model.dtype).itemsize
            heap.bind(d.split.rank, Buffer.LM_HEAD, heap.address(d.split.rank, Buffer.EMBED) + before)


def _home(heap: Heap, ranks: list[Dims], d: Dims, buffer: Buffer) -> int:
    """Return the rank whose copy of a weight buffer rank `d.rank` uses: itself, or an earlier rank on the same GPU."""
    gpu = heap.node.gpu(d.split.rank)
    sharing = (r.split.rank for r in ranks if heap.node.gpu(r.split.rank) is gpu and holds_whole(buffer, r))
    return next(sharing) if holds_whole(buffer, d) else d.split.rank


def _read_ahead(
    checkpoint: Checkpoint, buffer: Buffer, wanted: list[int], ranks: list[Dims]
) -> Iterator[tuple[Dims, int, list[WeightRows]]]:
    """Yield a buffer's rows for each wanted layer and each rank. Meanwhile, other threads read later layers."""
    threads = min(_THREADS, os.cpu_count() or 1)
    waiting: deque[Future[list[tuple[Dims, int, list[WeightRows]]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for layer in wanted:
            waiting.append(pool.submit(_read, checkpoint, buffer, layer, ranks))
            if len(waiting) > threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _read(
    checkpoint: Checkpoint, buffer: Buffer, layer: int, ranks: list[Dims]
) -> list[tuple[Dims, int, list[WeightRows]]]:
    read: dict[object, list[WeightRows]] = {}  # ranks that need the same rows share one copy of them
    out = []
    for d in ranks:
        part = *row_shares(buffer, d.split), column_share(buffer, d.split)
        if part not in read:
            rows = rows_of(checkpoint, buffer, layer, d.split)
            read[part] = converted(rows, part[-1].size, BUFFERS[buffer].resolve_dtype(d.model))
        out.append((d, layer, read[part]))
    return out


def _check_memory(heap: Heap, checkpoint: Checkpoint, ranks: list[Dims], homes: dict[tuple[int, Buffer], int]) -> None:
    for gpu, here in heap.node.grids():
        own = [(ranks[rank], buffer) for (rank, buffer), home in homes.items() if rank in here and home == rank]
        need = sum(len(BUFFERS[buffer].layers(d.model)) * copy_bytes(buffer, d, 0) for d, buffer in own)
        free, _ = gpu.memory()
        if need > free:
            raise MegakernelError(
                f"{checkpoint.name} needs {need / 1e9:.1f} GB on GPU {gpu.ordinal}, but only {free / 1e9:.1f} GB are "
                "free beside the KV pool: use a smaller model, more GPUs (--tp) or a shorter --max-model-len"
            )
