"""Every instruction of a program on the GPU against the reference, one at a time, from the same poisoned state.

Before an instruction runs, the GPU gets all that the reference's buffers hold: NaN wherever nothing has been written.
So an element that is not written, or written though it should not be, shows, and so does a value that changes from one
run to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...isa import BUFFERS, BY_OPCODE, Buffer, Dtype, Space, StepTable, from_f32, record, to_f32
from ...isa.launch import BODY
from ...isa.record import Records
from ...program import SEGMENTS, Program
from ..reference import ReferenceBackend
from .backend import CudaBackend

_SUMMED, _ROUNDED = 2e-4, 4e-3
_NAN_BF16 = 0x7FC0

_Key = tuple[int, Buffer, int]
_State = dict[_Key, NDArray[np.generic]]


@dataclass(frozen=True)
class Difference:
    """What is wrong with one instruction."""

    instruction: str
    layer: int
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.instruction} (rank {self.rank}, layer {self.layer}): {self.what}"


def prepare(reference: ReferenceBackend, seed: int) -> None:
    """Poison what a step computes, and fill the KV cache with noise."""
    rng = np.random.default_rng(seed)
    for rank, buffer, layer in _keys(reference):
        array, spec = reference.buffer(buffer, layer, rank), BUFFERS[buffer]
        kind = spec.resolve_dtype(reference.dims)
        if kind is Dtype.I32:
            continue
        if spec.space is Space.STATE:
            array[:] = from_f32(rng.standard_normal(array.shape, dtype=np.float32), kind)
        else:
            array.fill(np.nan if kind is Dtype.F32 else _NAN_BF16)


def check_instructions(
    gpu: CudaBackend, reference: ReferenceBackend, program: Program, table: StepTable, *, repeats: int = 20
) -> Iterator[Difference | None]:
    """Execute all instructions of a step in order on both backends: per instruction None, or what is wrong.

    The reference's buffers are as `prepare` leaves them, and its sizes the program's. Each instruction runs `repeats`
    times on the GPU, which must give the same bits every time.
    """
    mirror: _State = {}  # what is on the GPU
    for words, layer, rank in _unrolled(program):
        before = _state(reference)
        reference.execute(words, layer, table, rank)
        after = _state(reference)
        name = BY_OPCODE[int(record.opcode(words))].name
        first: _State = {}
        wrong: str | None = None
        for _ in range(repeats):
            for key, array in before.items():
                if key not in mirror or mirror[key].tobytes() != array.tobytes():
                    gpu.set_buffer(key[1], array, key[2], key[0])
            gpu.execute(words, layer, table, rank)
            mirror = {key: gpu.buffer(key[1], key[2], key[0], program.dims) for key in before}
            if not first:
                first = mirror
                wrong = _compare(before, after, mirror)
            elif wrong is None:
                changed = [key[1].name for key in mirror if mirror[key].tobytes() != first[key].tobytes()]
                wrong = f"{changed[0]} differs from run to run" if changed else None
        yield Difference(name, layer, rank, wrong) if wrong else None


def _keys(reference: ReferenceBackend) -> Iterator[_Key]:
    for buffer, spec in BUFFERS.items():
        if spec.space is not Space.WEIGHT:
            for rank in range(reference.dims.tp):
                for layer in range(reference.dims.layers if spec.layered else 1):
                    yield rank, buffer, layer


def _state(reference: ReferenceBackend) -> _State:
    return {(r, b, layer): reference.buffer(b, layer, r).copy() for r, b, layer in _keys(reference)}


def _unrolled(program: Program) -> Iterator[tuple[Records, int, int]]:
    """(record, layer, rank) of a step, phase by phase: what a phase reads has been written by those before it."""
    for index in range(len(SEGMENTS)):
        phases = program.phases(index)
        for layer in range(program.dims.layers) if index == BODY else (0,):
            for phase in phases:
                for stream in range(len(phase.offsets) - 1):
                    for words in phase.stream(stream):
                        yield words, layer, stream // program.workers


def _compare(before: _State, after: _State, got: _State) -> str | None:
    """What is wrong with the first buffer that is."""
    for key, expected in after.items():
        found, buffer = got[key], key[1]
        if expected.dtype == np.int32:
            if not np.array_equal(found, expected):
                return f"{buffer.name} holds other integers than the reference's"
            continue
        # All that either has changed: what only one of them has counts in full.
        bits = np.dtype(f"u{expected.dtype.itemsize}")
        old = before[key].view(bits)
        changed = (old != expected.view(bits)) | (old != found.view(bits))
        a, b = to_f32(found)[changed], to_f32(expected)[changed]
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            places = [int(np.isnan(x).sum()) for x in (a, b)]
            return f"{buffer.name} is not a number in {places[0]} places, the reference's in {places[1]}"
        norm, error = (float(np.linalg.norm(np.nan_to_num(x))) for x in (b, a - b))
        limit = _limit(buffer, Dtype.BF16 if expected.dtype == np.uint16 else Dtype.F32)
        if error > limit * norm:
            return (
                f"{buffer.name} is off by {error / norm if norm else np.inf:.1e} of its norm, {limit:.0e} are allowed"
            )
    return None


def _limit(buffer: Buffer, dtype: Dtype) -> float:
    """Relative error of what an instruction writes, in the Euclidean norm.

    bfloat16: a few roundings fall the other way. float32: sums in another order; but a split's o is a sum over
    probabilities that the tensor cores take in bfloat16.
    """
    return _ROUNDED if dtype is Dtype.BF16 or buffer is Buffer.PARTIALS else _SUMMED
