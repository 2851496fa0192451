"""The arguments of a launch of the CUDA interpreter, and the layout of a block. `csrc/cuda/params.h` and the ctypes
structures of the launcher are generated from these tables.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

THREADS = 384  # threads of a block; one block per SM
WARPS = THREADS // 32
PAGES = 13  # pages of shared memory in the ring through which all operands pass
PAGE_BYTES = 16384
SLOTS = 4  # instructions in flight in a block, at most, from set-up to the end of their stores
# The same maximum while a block claims from a queue. A claim also waits until the loads of the
# previous instruction have been issued.
CLAIM_SLOTS = 2
SHARED_BYTES = 227 * 1024  # dynamic shared memory of a block, the maximum on Hopper
MAP_BYTES = 128  # bytes of an encoded tensor map, which must be aligned to 64 bytes
CLOCK_STAMPS = 4  # of a traced block: (clock64, %globaltimer) when it begins and when it ends

PROLOGUE, BODY, EPILOGUE, QUEUES = range(4)  # record lists; the first three are segments

# The first warps of a block, in order. All further warps are consumers.
SERVICE_WARPS = ("controller", "weight loader", "storer", "input loader")

# The things for which a warp may wait: a counter, or a shared-memory barrier of a page or of an
# instruction (csrc/cuda/block.h). {} is the index of the counter, or the slot of the page or
# instruction.
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
    "parted": "the other loader to end",
}


class Ablation(IntEnum):
    """The work that a build of the kernel leaves out, so that a benchmark can time the rest."""

    NONE = 0
    COPIES = 1  # loaders do not fill pages
    COMPUTE = 2  # consumers compute nothing


_SCALARS: dict[str, tuple[str, Any]] = {
    "i4": ("int32_t", ctypes.c_int32),
    "u4": ("uint32_t", ctypes.c_uint32),
    "u8": ("uint64_t", ctypes.c_uint64),
}


@dataclass(frozen=True)
class Field:
    """A field of a struct. `kind` is a scalar (i4, u4, u8), the name of another struct, or the C
    type of a pointer. `count` > 1 declares an array.
    """

    name: str
    kind: str
    what: str
    count: int = 1

    @property
    def c(self) -> str:
        """The field's declaration in C."""
        kind = _SCALARS[self.kind][0] if self.kind in _SCALARS else self.kind
        return f"{kind} {self.name}{f'[{self.count}]' if self.count > 1 else ''};"


# For a pointer, `what` begins with the shape of the data behind the pointer. In this shape, `tp` is
# the number of all ranks of the model, and `blocks` is the number of thread blocks of this grid
# only.
STRUCTS: dict[str, tuple[str, tuple[Field, ...]]] = {
    "Delay": (
        "A stall of one instruction, for tests of the trace; only traced launches have it.",
        (
            Field("segment", "i4", ""),
            Field("layer", "i4", ""),
            Field("record", "i4", "as in a trace"),
            Field("ns", "i4", "0: none"),
        ),
    ),
    "Diagnosis": (
        "A wait of a warp that lasts too long.",
        (
            Field("set", "i4", "0: it waits for nothing"),
            Field("segment", "i4", "the instruction that the warp is at; -1: it is between two"),
            Field("layer", "i4", "of the body"),
            Field("number", "i4", "record, as in a trace"),
            Field("awaited", "i4", "what it waits for, an Awaited"),
            Field("index", "i4", "counter: its index in its block; barrier: the slot of its page or instruction"),
            Field("value", "i4", "counter: its value"),
            Field("expected", "i4", "counter: the expected value; barrier: the parity of the incomplete phase"),
        ),
    ),
    "Params": (
        "Arguments of a launch.",
        (
            Field("dims", "const Dims*", "[tp], as each rank sees them"),
            Field("phases", "const Phase*", "[tp][kMaxPhases + 1], by number"),
            Field("records", "const int32_t*", "prologue, body, epilogue, queues: [n][kWords]", 4),
            Field("offsets", "const int32_t*", "[tp * workers + 1]; of the queues [tp * queues + 1]", 4),
            Field(
                "totals",
                "const int32_t*",
                "arrivals per launch in the first, the middle and the last counter blocks: [tp][counters]",
                3,
            ),
            Field("counter_values", "int32_t* const*", "[tp] of [layers + 1][counters]"),
            Field("claims", "int32_t* const*", "[tp] of [layers][queues]"),
            Field("buffers", "void* const*", "[tp][kBuffers]"),
            Field(
                "layer_stride", "const uint64_t*", "[tp][kBuffers] bytes; 0 where a buffer has one copy for all layers"
            ),
            Field(
                "maps",
                "const TensorMap*",
                "[tp][kBuffers][kMaps]; only for buffers that tiles or pages are copied from or to",
            ),
            Field("mapped", "u8", "bit b: a rank's blocks copy buffer b with the rank's own maps"),
            Field("mapped_everywhere", "u8", "bit b: a rank's blocks copy buffer b with the maps of all ranks"),
            Field("step_words", "const int32_t*", "the step table"),
            Field("abort", "int32_t*", "not 0: all warps end"),
            Field("diagnoses", "Diagnosis*", "[blocks][warps] the wait of each warp that lasts too long"),
            Field("sample_scratch", "float*", "[blocks][2][vocab]"),
            Field("trace", "Interval*", "[blocks][trace_capacity]"),
            Field("trace_counts", "int32_t*", "[blocks] number of intervals, including those that did not fit"),
            Field("clocks", "uint64_t*", "[blocks][kClockStamps]"),
            Field("timeout_ns", "u8", "a wait that lasts longer ends the launch"),
            Field("delay", "Delay", ""),
            Field("trace_capacity", "i4", ""),
            Field("launch", "u4", "number of this launch since the counters were zeroed, from 1"),
            Field("first_rank", "i4", "of this grid"),
            Field("ranks", "i4", "of this grid; each has `workers` blocks"),
            Field("workers", "i4", "per rank"),
            Field("counters", "i4", "per counter block"),
            Field("queues", "i4", "per rank"),
            Field("synchronise", "i4", "0: instructions neither wait nor signal, for launches of a single phase"),
            Field("pipelined", "i4", "0: an instruction is fetched only after the previous one has ended"),
            Field("segments", "i4", "bit s: run segment s"),
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


# The structs as ctypes classes.
STRUCTURES = _structures()
