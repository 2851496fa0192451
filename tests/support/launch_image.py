"""Runs the code of the Hopper interpreter's warps on the host, so that tests can launch programs without a GPU. A
`LaunchImage` holds all memory that a launch accesses."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from built_once import WARNINGS, linked
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Forward, Space, StepTable
from megakernel.isa.record import Records
from megakernel.program import Program
from megakernel.runtime.cpu.native import CDims
from megakernel.runtime.cuda import stall
from megakernel.runtime.cuda.maps import MapLayout, map_bits, map_layouts
from megakernel.runtime.cuda.pages import MAPS
from megakernel.runtime.cuda.params import BODY, MAP_BYTES, STRUCTURES, WARPS
from megakernel.runtime.reference import ReferenceBackend

ROOT = Path(__file__).parents[2]
HOST = ROOT / "tests" / "cuda" / "host"
FLAGS = ["-O1", *WARNINGS, "-U_FORTIFY_SOURCE"]
_ALIGNMENT = 1024
_MESSAGE = 1024
MAP = np.dtype(
    [("base", "<i8"), ("strides", "<i8", 5), ("sizes", "<i4", 5), ("box", "<i4", 5)]
    + [(name, "<i4") for name in ("item", "swizzled")]
)
Array = NDArray[Any]


@functools.cache
def host_library(sms: int = 1) -> ctypes.CDLL:
    """Build the library that runs launches on the host, with `sms` SMs per worker."""
    flags = [*FLAGS, f"-DMK_SMS={sms}", "-shared", "-fPIC"]
    library = ctypes.CDLL(str(linked("host.so", HOST / "host.cpp", *flags)))
    library.mk_host_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32]
    return library


class Image:
    """The layout of a block of memory: arrays at fixed offsets, and pointers from one offset to another."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Array]] = []
        self._pointers: list[tuple[int, int]] = []  # place, target
        self.size = 0

    def add(self, array: Array) -> int:
        offset = self.size
        self._parts.append((offset, np.ascontiguousarray(array)))
        self.size = -(-(offset + max(array.nbytes, 1)) // _ALIGNMENT) * _ALIGNMENT
        return offset

    def point(self, place: int, target: int) -> None:
        self._pointers.append((place, target))

    def table(self, targets: Sequence[int]) -> int:
        """Append an array of pointers to the offsets `targets`, and return its offset. A target of -1 becomes null."""
        offset = self.add(np.zeros(len(targets), np.int64))
        for i, target in enumerate(targets):
            if target >= 0:
                self.point(offset + 8 * i, target)
        return offset

    def memory(self) -> NDArray[np.uint8]:
        """Return a new block of memory with the arrays. Its pointers are addresses in the block itself."""
        room = np.zeros(self.size + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        memory = room[start : start + self.size]
        self.fill(memory)
        return memory

    def fill(self, memory: NDArray[np.uint8]) -> None:
        """Restore the initial contents of `memory`, a block that the method `memory` has returned."""
        for offset, array in self._parts:
            memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        for place, target in self._pointers:
            memory[place : place + 8].view(np.int64)[0] = memory.ctypes.data + target


class LaunchImage:
    """The memory of a launch: a program, a step table and the buffers of `backend`. It can be launched repeatedly. If
    `poison` is set, activations and outputs except SPLITS begin as 0xFF bytes, which are NaN if read as floats."""

    def __init__(self, backend: ReferenceBackend, program: Program, table: StepTable, *, poison: bool = True) -> None:
        self.program, self.dims, self._pages = program, program.dims, backend.pages
        self.image = Image()
        self._buffers: dict[tuple[int, Buffer], int] = {}
        self._shapes: dict[tuple[int, Buffer], tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for rank in range(program.ranks):
            for buffer in buffers_of(program.forward):
                spec = BUFFERS[buffer]
                layers = self.dims.model.layers if spec.layered else 1
                array = np.stack([backend.buffer(buffer, layer, rank) for layer in range(layers)])
                if poison and spec.space in (Space.ACTIVATION, Space.OUTPUT) and buffer is not Buffer.SPLITS:
                    array.view(np.uint8).fill(0xFF)
                self._buffers[rank, buffer] = self.image.add(array)
                self._shapes[rank, buffer] = (array.shape, array.dtype)
        self._params = self._add_params(table)
        self.memory = self.image.memory()

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> Array:
        """Return a view of a buffer of one rank, and of one layer if the buffer has layers."""
        shape, dtype = self._shapes[rank, buffer]
        start = self._buffers[rank, buffer]
        size = int(np.prod(shape)) * dtype.itemsize
        view: Array = self.memory[start : start + size].view(dtype).reshape(shape)[layer]
        return view

    def counters(self, rank: int) -> NDArray[np.int32]:
        """Return a view of a rank's counters, with shape [layers + 1, counters]."""
        start = self._counters[rank]
        count = self.program.total_counters
        return self.memory[start : start + 4 * count].view(np.int32).reshape(self.dims.model.layers + 1, -1)

    @property
    def params(self) -> Any:
        """Return the kernel parameters in the image. Changes to them apply to the next launch."""
        return STRUCTURES["Params"].from_buffer(self.memory.data, self._params)

    @property
    def waits(self) -> list[stall.Wait]:
        """Return the waits that the watchdogs have recorded. These waits took too long."""
        size = self._blocks * WARPS * stall.NOTE.itemsize
        notes: Any = (ctypes.c_uint8 * size).from_address(self.params.diagnoses)
        return stall.waits_of(self.program, np.frombuffer(notes, stall.NOTE), range(self.program.ranks))

    def restore(self) -> None:
        """Restore the contents that the memory had before the first launch."""
        self.image.fill(self.memory)

    def run(self) -> str:
        """Run one launch, and return a description of what went wrong, or an empty string."""
        self.params.launch += 1
        return self._launch(self.memory.ctypes.data + self._params)

    def _launch(self, params: int) -> str:
        message = ctypes.create_string_buffer(_MESSAGE)
        host_library(self.dims.worker.sms).mk_host_run(params, message, _MESSAGE)
        return message.value.decode()

    def execute(self, words: Records, layer: int, rank: int, table: StepTable) -> None:
        """Run one record of the body alone, with another step table. Its waits end at once, because the
        counters already have the totals of all launches so far."""
        params = STRUCTURES["Params"].from_buffer_copy(self.params)
        words, offsets = np.ascontiguousarray(words), (np.arange(self.program.ranks + 1) > rank).astype(np.int32)
        params.records[BODY], params.offsets[BODY] = words.ctypes.data, offsets.ctypes.data
        params.step_words = table.words.ctypes.data
        params.segments, params.first_rank, params.ranks, params.workers = 1 << BODY, rank, 1, 1
        params.layer_begin, params.layer_end = layer, layer + 1
        if said := self._launch(ctypes.addressof(params)):
            raise AssertionError(said)

    def _add_params(self, table: StepTable) -> int:
        program, image, tp = self.program, self.image, self.program.ranks
        self._blocks = blocks = tp * program.processors
        lists = [program.prologue, program.body, program.epilogue, program.queues]
        self._counters = [image.add(np.zeros(program.total_counters, np.int32)) for _ in range(tp)]
        queues = max(program.rank_queues, 1) * self.dims.model.layers
        claims = [image.add(np.zeros(queues, np.int32)) for _ in range(tp)]
        strides = np.zeros((tp, len(BUFFERS)), np.int64)
        for (rank, buffer), (shape, dtype) in self._shapes.items():
            if BUFFERS[buffer].layered:
                strides[rank, buffer] = int(np.prod(shape[1:])) * dtype.itemsize
        ranks = [program.rank_dims(rank) for rank in range(tp)]
        pointers = {
            "dims": image.add(np.stack([dims_words(d) for d in ranks])),
            "phases": image.add(np.stack([program.forward.words(d) for d in ranks])),
            "counter_values": image.table(self._counters),
            "claims": image.table(claims),
            "buffers": image.table([self._buffers.get((rank, buffer), -1) for rank in range(tp) for buffer in BUFFERS]),
            "layer_stride": image.add(strides),
            "maps": self._add_maps(),
            "step_words": image.add(table.words),
            "abort": image.add(np.zeros(1, np.int32)),
            "diagnoses": image.add(np.zeros(blocks * WARPS, stall.NOTE)),
            "sample_scratch": image.add(np.zeros((blocks, 2, self.dims.model.vocab), np.float32)),
        }
        struct = STRUCTURES["Params"]
        params = struct()
        params.ranks, params.workers = tp, program.workers
        params.counters, params.queues = program.counters, program.rank_queues
        params.synchronise = params.pipelined = 1
        params.mapped, params.mapped_everywhere = map_bits(program.forward, self.dims)
        params.segments, params.layer_end = 7, self.dims.model.layers
        at = image.add(np.frombuffer(bytes(params), np.uint8))
        for name, target in pointers.items():
            image.point(at + getattr(struct, name).offset, target)
        for i, segment in enumerate(lists):
            image.point(at + struct.records.offset + 8 * i, image.add(segment.records))
            image.point(at + struct.offsets.offset + 8 * i, image.add(segment.offsets))
        for i, totals in enumerate((program.totals_first, program.totals_middle, program.totals_last)):
            image.point(at + struct.totals.offset + 8 * i, image.add(totals))
        return at

    def _add_maps(self) -> int:
        maps = np.zeros((self.program.ranks, len(BUFFERS), MAPS, MAP_BYTES), np.uint8)
        at = self.image.add(maps)
        for rank in range(self.program.ranks):
            d = self.program.rank_dims(rank)
            for place, layout in map_layouts(self.program.forward, d, self._pages).items():
                buffer = place[0]
                maps[rank, *place, : MAP.itemsize] = host_map(layout)
                self.image.point(
                    at + np.ravel_multi_index((rank, *place), maps.shape[:3]) * MAP_BYTES, self._buffers[rank, buffer]
                )
        return at


def host_map(layout: MapLayout, *, address: int = 0) -> NDArray[np.uint8]:
    """Return the bytes of a HostMap, the struct that replaces a tensor map in tests/cuda/host/tensor_map.h."""
    rest = (1,) * (5 - len(layout.sizes))
    strides = (layout.item, *layout.strides, *(0 for _ in rest))
    fields = (address, strides, layout.sizes + rest, layout.box + rest, layout.item, layout.swizzled)
    return np.frombuffer(np.array(fields, MAP).tobytes(), np.uint8)


def buffers_of(forward: Forward) -> list[Buffer]:
    """Return the buffers that a launch uses: all except the weights that no phase names."""
    named = {buffer for phase in forward for buffer in (phase.weights, phase.bias, phase.norm, phase.head_norm)}
    return [buffer for buffer, spec in BUFFERS.items() if spec.space is not Space.WEIGHT or buffer in named]


def dims_words(dims: Dims) -> NDArray[np.int32]:
    return np.frombuffer(CDims.of(dims), np.int32)
