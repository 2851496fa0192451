"""Runs the code of the Hopper interpreter's warps on the host, so that tests can launch programs without a GPU. A
`LaunchImage` holds all memory that a launch accesses."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from built_once import WARNINGS, linked
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Forward, Space, StepTable
from megakernel.isa.record import Records
from megakernel.program import Program
from megakernel.runtime.cuda import stall
from megakernel.runtime.cuda.loaded import Params
from megakernel.runtime.cuda.maps import MapLayout, map_bits, map_layouts
from megakernel.runtime.reference import ReferenceBackend
from megakernel.targets.launch import BODY, MAP_BYTES, WARPS
from megakernel.targets.pages import MAPS

ROOT = Path(__file__).parents[2]
HOST = ROOT / "tests" / "cuda" / "host"
FLAGS = ["-O1", *WARNINGS, "-U_FORTIFY_SOURCE"]
_ALIGNMENT = 64
_MESSAGE = 1024
MAP = np.dtype(
    [("base", "<i8"), ("strides", "<i8", 5), ("sizes", "<i4", 5), ("box", "<i4", 5)]
    + [(name, "<i4") for name in ("item", "swizzled")]
)
Array = NDArray[Any]


@functools.cache
def host_library() -> ctypes.CDLL:
    """Build the library that runs launches on the host."""
    library = ctypes.CDLL(str(linked("host.so", HOST / "host.cpp", *FLAGS, "-shared", "-fPIC")))
    library.mk_host_run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32]
    return library


class LaunchImage:
    """The memory of a launch: a program, a step table and the buffers of `backend`. It can be launched repeatedly. If
    `poison` is set, activations and outputs except SPLITS begin as 0xFF bytes, which are NaN if read as floats.
    `params` are the kernel's parameters; changes to them apply to the next launch."""

    def __init__(self, backend: ReferenceBackend, program: Program, table: StepTable, *, poison: bool = True) -> None:
        self.program, self.dims = program, program.dims
        self._held: list[Array] = []
        self._buffers: dict[tuple[int, Buffer], Array] = {}
        for rank in range(program.ranks):
            for buffer in buffers_of(program.forward):
                spec = BUFFERS[buffer]
                layers = self.dims.model.layers if spec.layered else 1
                array = self._hold(np.stack([backend.buffer(buffer, layer, rank) for layer in range(layers)]))
                if poison and spec.space in (Space.ACTIVATION, Space.OUTPUT) and buffer is not Buffer.SPLITS:
                    array.view(np.uint8).fill(0xFF)
                self._buffers[rank, buffer] = array
        self._set_params(table, backend.pages)

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> Array:
        """Return a view of a buffer of one rank, and of one layer if the buffer has layers."""
        view: Array = self._buffers[rank, buffer][layer]
        return view

    def counters(self, rank: int) -> NDArray[np.int32]:
        """Return a view of a rank's counters, with shape [layers + 1, counters]."""
        return self._counters[rank]

    @property
    def waits(self) -> list[stall.Wait]:
        """Return the waits that the watchdogs have recorded. These waits took too long."""
        return stall.waits_of(self.program, self._diagnoses, range(self.program.ranks))

    def run(self) -> str:
        """Run one launch, and return a description of what went wrong, or an empty string."""
        self.params.launch += 1
        return self._launch(self.params)

    def _launch(self, params: Any) -> str:
        message = ctypes.create_string_buffer(_MESSAGE)
        host_library().mk_host_run(ctypes.byref(ctypes.c_void_p(ctypes.addressof(params))), 1, message, _MESSAGE)
        return message.value.decode()

    def execute(self, words: Records, layer: int, rank: int, table: StepTable) -> None:
        """Run one record of the body alone, with another step table. Its waits end at once, because the
        counters already have the totals of all launches so far."""
        params = Params.from_buffer_copy(self.params)
        words, offsets = np.ascontiguousarray(words), (np.arange(self.program.ranks + 1) > rank).astype(np.int32)
        params.records[BODY], params.offsets[BODY] = words.ctypes.data, offsets.ctypes.data
        params.step_words = table.words.ctypes.data
        params.segments, params.first_rank, params.ranks, params.workers = 1 << BODY, rank, 1, 1
        params.layer_begin, params.layer_end = layer, layer + 1
        if said := self._launch(params):
            raise AssertionError(said)

    def _hold(self, array: Array) -> Array:
        """Return a copy of an array, which lives as long as the image and is aligned."""
        room = np.zeros(array.nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        copy: Array = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._held.append(copy)
        return copy

    def _set_params(self, table: StepTable, pages: int) -> None:
        program, tp, layers = self.program, self.program.ranks, self.dims.model.layers
        ranks, blocks = program.dims.ranks, tp * program.workers
        self._counters = [self._hold(np.zeros((layers + 1, program.counters), np.int32)) for _ in range(tp)]
        self._diagnoses = self._hold(np.zeros(blocks * WARPS, stall.NOTE))
        claims = [self._hold(np.zeros(max(program.rank_queues, 1) * layers, np.int32)) for _ in range(tp)]
        addresses, strides = np.zeros((2, tp, len(BUFFERS)), np.int64)
        for (rank, buffer), array in self._buffers.items():
            addresses[rank, buffer] = array.ctypes.data
            strides[rank, buffer] = array[0].nbytes * BUFFERS[buffer].layered
        maps = np.zeros((tp, len(BUFFERS), MAPS, MAP_BYTES), np.uint8)
        for rank, d in enumerate(ranks):
            for place, layout in map_layouts(program.forward, d, pages).items():
                maps[rank, *place, : MAP.itemsize] = host_map(layout, address=int(addresses[rank, place[0]]))
        self.params = params = Params()
        arrays = {
            "dims": np.stack([dims_words(d) for d in ranks]),
            "phases": np.stack([program.forward.words(d) for d in ranks]),
            "maps": maps,
            "step_words": table.words,
            "abort": np.zeros(1, np.int32),
            "sample_scratch": np.zeros((blocks, 2, self.dims.model.vocab), np.float32),
        }
        for name, array in arrays.items():
            setattr(params, name, self._hold(array).ctypes.data)
        params.counter_values[:tp] = [counters.ctypes.data for counters in self._counters]
        params.claims[:tp] = [words.ctypes.data for words in claims]
        for values, array in ((params.buffers, addresses), (params.layer_stride, strides)):
            values[: array.size] = array.ravel().tolist()
        params.diagnoses = self._diagnoses.ctypes.data
        params.ranks, params.workers = tp, program.workers
        params.counters, params.queues = program.counters, program.rank_queues
        params.synchronise = params.pipelined = 1
        params.mapped, params.mapped_everywhere = map_bits(program.forward, self.dims)
        params.segments, params.layer_end = 7, layers
        for i, segment in enumerate((program.prologue, program.body, program.epilogue, program.queues)):
            params.records[i] = self._hold(segment.records).ctypes.data
            params.offsets[i] = self._hold(segment.offsets).ctypes.data
        for i, totals in enumerate((program.totals_first, program.totals_middle, program.totals_last)):
            params.totals[i] = self._hold(totals).ctypes.data


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
    return np.frombuffer(dims.native, np.int32)
