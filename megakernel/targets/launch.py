"""The arguments of a launch of the CUDA interpreter, and the kinds of warps in a thread block. Host and kernel must
agree on them, so the C++ header `csrc/cuda/params.h` and the host's ctypes structs are generated from these tables."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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

# What a warp may wait for, with a text for error messages: a counter, or a shared-memory barrier of a page or an
# instruction (csrc/cuda/block.h). {} stands for the index of the counter, or of the page or instruction in its ring.
COUNTER = "counter"
AWAITED = {
    COUNTER: "counter {}",
    "full": "page {} to be filled",
    "ready": "page {} to be written",
    "empty": "page {} to be released",
    "fetched": "the next instruction, in slot {}",
    "inputs": "the counters of the instruction in slot {} to reach their totals",
    "loaded": "the loads of the instruction in slot {} to be requested",
    "outputs": "the instruction in slot {} to be computed",
    "retired": "the instruction in slot {} to end",
}


class Ablation(IntEnum):
    """The work that a variant of the kernel leaves out, so that a benchmark can time the rest."""

    NONE = 0
    COPIES = 1  # leaves out copies into shared memory
    COMPUTE = 2  # leaves out all arithmetic


_SCALARS: dict[str, tuple[str, Any]] = {
    "i4": ("int32_t", ctypes.c_int32),
    "u4": ("uint32_t", ctypes.c_uint32),
    "u8": ("uint64_t", ctypes.c_uint64),
}


@dataclass(frozen=True)
class Field:
    """A field of a C struct. `kind` is a number type (i4, u4, u8), another struct or a C pointer type. If `count` is
    above 1, the field is an array."""

    name: str
    kind: str
    what: str
    count: int = 1

    @property
    def c(self) -> str:
        """The field's declaration in C."""
        kind = _SCALARS[self.kind][0] if self.kind in _SCALARS else self.kind
        return f"{kind} {self.name}{f'[{self.count}]' if self.count > 1 else ''};"


# The structs that the host passes to the kernel. The description of a pointer begins with the shape of the data: `tp`
# is the model's number of ranks, and `blocks` the number of thread blocks of this launch on this GPU.
STRUCTS: dict[str, tuple[str, tuple[Field, ...]]] = {
    "Delay": (
        "Delays one instruction by `ns` nanoseconds, for tests of the trace. Only traced launches apply it.",
        (
            Field("segment", "i4", ""),
            Field("layer", "i4", ""),
            Field("record", "i4", "index of the record, as in a trace"),
            Field("ns", "i4", "0: no delay"),
        ),
    ),
    "Diagnosis": (
        "The wait in which a warp was stuck when its launch was aborted.",
        (
            Field("set", "i4", "0: the warp was not stuck, and the other fields are unset"),
            Field("segment", "i4", "segment of the instruction that the warp executed; -1: between two instructions"),
            Field("layer", "i4", "layer of the instruction, in the body"),
            Field("number", "i4", "index of the instruction's record, as in a trace"),
            Field("awaited", "i4", "the kind of counter or barrier waited for, an Awaited"),
            Field("index", "i4", "index of the counter in its block, or ring slot of the page or instruction"),
            Field("value", "i4", "value of the counter; unused for a barrier"),
            Field("expected", "i4", "the counter value waited for, or the parity of the barrier phase waited for"),
        ),
    ),
    "Params": (
        "Arguments of a launch.",
        (
            Field("dims", "const Dims*", "[tp]: one Dims per rank, which differ in Dims.rank"),
            Field("phases", "const Phase*", "[tp][kMaxPhases + 1]: each rank's phases, indexed by phase number"),
            Field("records", "const int32_t*", "[n][kWords]: those of prologue, body, epilogue and queues", 4),
            Field("offsets", "const int32_t*", "[tp * (workers or queues) + 1]: where each begins in `records`", 4),
            Field("totals", "const int32_t*", "[tp][counters]: signals per launch: first, middle, last block", 3),
            Field("counter_values", "int32_t* const*", "[tp]: each rank's counters, [layers + 1][counters]"),
            Field("claims", "int32_t* const*", "[tp]: each rank's claim counters, [layers][queues]"),
            Field("buffers", "void* const*", "[tp][kBuffers]"),
            Field("layer_stride", "const uint64_t*", "[tp][kBuffers]: bytes between layers; 0 if they share one copy"),
            Field("maps", "const TensorMap*", "[tp][kBuffers][kMaps]: set only for buffers copied through tensor maps"),
            Field("mapped", "u8", "bit b is set if blocks use their own rank's tensor maps of buffer b"),
            Field("mapped_everywhere", "u8", "bit b is set if blocks use every rank's tensor maps of buffer b"),
            Field("step_words", "const int32_t*", "the step table"),
            Field("abort", "int32_t*", "a value other than 0 makes all warps abort the launch"),
            Field("diagnoses", "Diagnosis*", "[blocks][warps]: for each warp, the wait in which it was stuck"),
            Field("sample_scratch", "float*", "[blocks][2][vocab]"),
            Field("trace", "Interval*", "[blocks][trace_capacity]"),
            Field("trace_counts", "int32_t*", "[blocks]: number of intervals, including those beyond trace_capacity"),
            Field("clocks", "uint64_t*", "[blocks][kClockStamps]"),
            Field("timeout_ns", "u8", "a wait that lasts longer than this aborts the launch"),
            Field("delay", "Delay", ""),
            Field("trace_capacity", "i4", ""),
            Field("launch", "u4", "number of launches since the counters were zeroed, including this one"),
            Field("first_rank", "i4", "the lowest rank that this grid runs"),
            Field("ranks", "i4", "number of ranks that this grid runs; each has `workers` workers"),
            Field("workers", "i4", "number of workers per rank"),
            Field("counters", "i4", "number of counters per counter block"),
            Field("queues", "i4", "number of queues per rank"),
            Field("synchronise", "i4", "0: instructions neither wait nor signal, for launches of a single phase"),
            Field("pipelined", "i4", "0: a block fetches an instruction only after its previous instruction has ended"),
            Field("segments", "i4", "bit s is set if segment s is run"),
            Field("layer_begin", "i4", "first layer of the body to run"),
            Field("layer_end", "i4", "one past the last layer to run"),
        ),
    ),
}


def _structures() -> dict[str, type[ctypes.Structure]]:
    made: dict[str, type[ctypes.Structure]] = {}
    for name, (what, fields) in STRUCTS.items():
        columns = []
        for field in fields:
            if field.kind in _SCALARS:
                kind = _SCALARS[field.kind][1]
            else:
                kind = ctypes.c_void_p if field.kind.endswith("*") else made[field.kind]
            columns.append((field.name, kind * field.count if field.count > 1 else kind))
        made[name] = type(name, (ctypes.Structure,), {"_fields_": columns, "__doc__": what})
    return made


# The structs above as ctypes classes.
STRUCTURES = _structures()
