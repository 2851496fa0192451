"""Sizes of the CUDA interpreter, and the kinds of warps in a thread block. Host and kernel must agree on them, so the
C++ header `csrc/cuda/params.h` is generated from this module."""

from __future__ import annotations

from enum import IntEnum

THREADS = 384  # threads per thread block; each SM runs one block
WARPS = THREADS // 32
PAGES = 13  # shared-memory pages in a block's ring buffer, through which all operands pass
PAGE_BYTES = 16384
SLOTS = 4  # maximum number of a block's instructions in flight, from set-up to the end of their stores

# Thread blocks take (claim) instructions from shared queues as late as possible, so that the block that is free first
# gets the work. A block with a claimed instruction has at most this many instructions in flight. Before a claim, it
# also waits until the loads of its previous instruction have been issued.
CLAIM_SLOTS = 2
SHARED_BYTES = 227 * 1024  # dynamic shared memory of a block, the maximum on Hopper
MAP_BYTES = 128  # bytes of an encoded tensor map, which must be aligned to 64 bytes
CLOCK_STAMPS = 4  # a traced block reads clock64 and %globaltimer at its start and at its end

PROLOGUE, BODY, EPILOGUE, QUEUES = range(4)  # the program's lists of instructions

# The first warps of a thread block, in order. All further warps are consumers, which compute.
SERVICE_WARPS = ("controller", "weight loader", "storer", "input loader")

# Texts for error messages about what a warp waits for: a counter, or a shared-memory barrier of a page, a stage or an
# instruction (csrc/cuda/block.h). {} stands for the index of the counter, page, stage or slot.
COUNTER = "counter"
AWAITED = {
    COUNTER: "counter {}",
    "full": "page {} to be filled",
    "empty": "page {} to be released",
    "filled": "stage {} to be filled",
    "ready": "stage {} to be written",
    "free": "stage {} to be released",
    "fetched": "the next instruction, in slot {}",
    "inputs": "the counters of the instruction in slot {} to reach their totals",
    "loaded": "the loads of the instruction in slot {} to be requested",
    "outputs": "the instruction in slot {} to be computed",
    "retired": "the instruction in slot {} to end",
}


class Ablation(IntEnum):
    """The work that a variant of the kernel leaves out, so that a benchmark can time all other work."""

    NONE = 0
    COPIES = 1  # leaves out copies into shared memory
    COMPUTE = 2  # leaves out all arithmetic
