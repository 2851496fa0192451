"""Small GPU programs for tests, each with a step table and a reference backend whose KV cache has random contents.
Another function lists the pages of an instruction."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
from compiled import compiled
from launch_image import dims_words, host_library
from numpy.typing import NDArray
from tiny_llama import make_llama

from megakernel import machine as machines
from megakernel.isa import Buffer, Dims, Forward, StepTable
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import Options

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 16, "hidden": 48, "ffn": 72},
    "wide": {"heads": 4, "kv_heads": 1, "head_dim": 80, "hidden": 64, "ffn": 136, "attention_bias": True},
    "fewer heads than ranks": {"heads": 3, "kv_heads": 3, "head_dim": 24, "hidden": 48, "ffn": 40, "mlp_bias": True},
    "norms of heads": {"family": "qwen3", "heads": 6, "kv_heads": 2, "head_dim": 64, "attention_bias": True},
    "norms of wide heads": {"family": "qwen3", "heads": 3, "kv_heads": 1, "head_dim": 128, "hidden": 64},
    "heads in two parts": {"heads": 6, "kv_heads": 2, "head_dim": 256, "hidden": 48, "ffn": 72},
    "whole pages": {"heads": 2, "kv_heads": 1, "head_dim": 128, "hidden": 256, "ffn": 256},
}
# The tile sizes of the shape "whole pages". All other shapes use the smaller tiles of the function `h100`, so that
# their programs have more tiles.
TILES = {"whole pages": {"rows": 128, "cols": 256}}
PAGES = 16


def h100(workers: int, *, rows: int = 32, cols: int = 64) -> machines.Machine:
    return replace(machines.MACHINES["h100"], workers=workers).with_tiles(rows=rows, cols=cols)


def make(
    shape: str,
    tp: int,
    options: Options,
    *,
    workers: int = 2,
    chunks: tuple[tuple[int, int], ...] = ((200, 3), (0, 30)),
) -> tuple[ReferenceBackend, Program, Any]:
    """Return a reference backend with a random KV cache, a program, and the table of a step that computes `chunks`.
    Each chunk is a sequence's (start position, number of tokens). The program has one token row more than the chunks
    need, so that the step has padding."""
    _, checkpoint = make_llama(1, layers=2, **SHAPES[shape])
    rows = sum(count for _, count in chunks)
    machine = h100(workers, **TILES.get(shape, {}))
    program = compiled(checkpoint.config, machine, rows + 1, len(chunks) + 1, tp, options, max_context=512)
    backend = ReferenceBackend(checkpoint, program.dims, PAGES)
    rng = np.random.default_rng(7)
    for rank in range(tp):
        for layer in range(program.dims.model.layers):
            for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                cache = backend.buffer(buffer, layer, rank)
                cache[:] = (rng.standard_normal(cache.shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    order = rng.permutation(PAGES).tolist()
    step = []
    for slot, (start, count) in enumerate(chunks):
        tokens = rng.integers(0, 100, count).tolist()
        step.append(Chunk(slot, start, tokens, order[4 * slot : 4 * slot + 4], [SampleRow(count - 1)]))
    table = build_step(program.dims, step)
    return backend, program, table


def plan(forward: Forward, dims: Dims, table: StepTable, record: NDArray[np.int32]) -> list[list[int]]:
    """For each page of a record: 0 (weights) or 1 (inputs), whether it has pieces, whether one copy fills it."""
    pages = np.zeros((4096, 3), np.int32)
    words, record = dims_words(dims), np.ascontiguousarray(record)
    arguments = (a.ctypes.data for a in (words, forward.words(dims), table.words, record, pages))
    n = host_library().mk_host_plan(*map(ctypes.c_void_p, arguments), len(pages))
    return pages[:n].tolist()
