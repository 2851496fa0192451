"""Compares every instruction of a program on the GPU with the NumPy reference, one phase (operation) after another.

Before a phase, the GPU gets a copy of the reference's buffers. Elements that nothing has written yet are NaN, so that a
wrong read shows in the result. Then all instructions of the phase run together, several times. This reveals wrong or
missing results, and results that differ between runs. If a phase is wrong, its instructions run one by one, to name the
first that is wrong even alone. Running every instruction alone would take a quarter of an hour.

Then whole steps run, in which instructions wait for each other, also across GPUs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dims, Dtype, Space, StepTable, from_f32, record, to_f32
from ..program import SEGMENTS, Program, Segment
from ..targets.launch import BODY
from .cuda.backend import CudaBackend
from .reference.backend import ReferenceBackend

_SUMMED, _ROUNDED = 2e-4, 4e-3
_WHOLE = 3e-2  # the largest relative error of a whole step's logits
_LATE_S, _RARELY = 0.1, 0.01
_NAN_BF16 = 0x7FC0

_Key = tuple[Buffer, int, int]  # (buffer, layer, rank), as the method `buffer` of both backends takes them
_State = dict[_Key, NDArray[np.generic]]


def prepare(reference: ReferenceBackend, seed: int) -> None:
    """Fill the reference's activations and outputs with NaN, and its KV cache with random numbers."""
    rng = np.random.default_rng(seed)
    for buffer, layer, rank in _keys(reference):
        array, spec = reference.buffer(buffer, layer, rank), BUFFERS[buffer]
        kind = spec.resolve_dtype(reference.dims.model)
        if kind is Dtype.I32:
            continue
        if spec.space is Space.STATE:
            array[:] = from_f32(rng.standard_normal(array.shape, dtype=np.float32), kind)
        else:
            array.fill(np.nan if kind is Dtype.F32 else _NAN_BF16)
            if buffer is Buffer.REDUCE and len(array):
                array[_padding(reference.dims.ranks[rank])] = 0


def _padding(d: Dims) -> NDArray[np.bool_]:
    """Return a mask of REDUCE's rows that belong to no token. A GPU sets them to 0, because it stores whole boxes."""
    rows = np.arange(d.bucket.tokens)
    kept = rows if d.split.replicated_residual else rows[d.owner(rows) == d.split.rank]
    padding = np.ones(d.split.tp * d.own_rows, bool)
    for rank in range(d.split.tp):
        padding[d.reduce_row(rank, kept)] = False
    return padding


def check_instructions(
    gpu: CudaBackend, reference: ReferenceBackend, program: Program, table: StepTable, *, repeats: int = 20
) -> Iterator[str | None]:
    """Compare the GPU with the reference for all phases (operations) of a step, in order. For each phase, yield None if
    the GPU's results are right, otherwise a description of the difference. This text also names the first instruction
    that is wrong when it runs alone.

    Before the call, create the reference with the program's sizes, and call `prepare` for it. The GPU runs each phase
    `repeats` times, and must give the same bits every time. A failed launch counts as a difference.
    """
    twins = _Twins(gpu, reference, program, table)
    for index, layer, phase in _phases(program):
        before = twins.state()
        name = f"{program.forward.of_record(phase.records[0]).name} (layer {layer})"
        try:
            wrong = twins.wrong(before, index, layer, phase, repeats)
        except MegakernelError as e:  # the error names the instruction that waited
            yield f"{name}: {e}"
            continue
        if wrong is None:
            yield None
            continue
        after = twins.state()
        yield f"{name}: {wrong}; {twins.culprit(before, index, layer, phase)}"
        twins.restore(after)


def check_launches(
    gpu: CudaBackend, reference: ReferenceBackend, program: Program, tables: Sequence[StepTable], launches: int
) -> Iterator[str]:
    """Launch steps in turn. Yield a description of each step whose logits are not near the reference's, and of each
    launch whose bits differ from the step's first launch. The KV caches of both backends must be equal at first.

    The steps should write different values to the same addresses. Otherwise, an instruction that does not wait would
    read a right value, left by the launch before. If there are several GPUs, they begin in random order. Rarely, one
    begins `_LATE_S` seconds after the one before it, or the launch is aborted when only some have begun.
    """
    rng, first = random.Random(launches), dict[int, bytes]()

    def begin(gpus: range) -> Iterator[int]:
        for number in rng.sample(gpus, len(gpus)):
            chance = rng.random() if len(gpus) > 1 else 1.0
            if chance < _RARELY:
                raise InterruptedError
            time.sleep(_LATE_S if chance < 2 * _RARELY else 0)
            yield number

    gpu.order = begin
    for launch in range(launches):
        turn = launch % len(tables)
        with suppress(InterruptedError):
            out = gpu.launch(program, tables[turn])
            rows = np.count_nonzero(tables[turn].logit_rows >= 0)
            bits = out.tokens[:rows].tobytes() + out.logits[:rows].tobytes()
            if turn not in first:
                wanted = reference.launch(program, tables[turn]).logits[:rows]
                error = float(np.linalg.norm(out.logits[:rows] - wanted) / np.linalg.norm(wanted))
                if not error < _WHOLE:
                    yield f"a whole step's logits are off by {error:.1e} of their norm, but only {_WHOLE} is allowed"
            if bits != first.setdefault(turn, bits):
                yield "a whole step's results differ from launch to launch"


class _Twins:
    """The GPU backend, the reference, and a copy of the GPU's buffers, so that unchanged buffers are not sent again."""

    def __init__(self, gpu: CudaBackend, reference: ReferenceBackend, program: Program, table: StepTable) -> None:
        self._gpu, self._reference, self._program, self._table = gpu, reference, program, table
        self._mirror: _State = {}

    def state(self) -> _State:
        return {key: self._reference.buffer(*key).copy() for key in _keys(self._reference)}

    def restore(self, state: _State) -> None:
        for key, array in state.items():
            self._reference.buffer(*key)[:] = array

    def wrong(self, before: _State, index: int, layer: int, work: Segment, repeats: int) -> str | None:
        """Run `work` on both backends from the state `before`. Describe the first error, or return None."""
        for stream in range(len(work.offsets) - 1):
            for words in work.stream(stream):
                rank = stream // self._program.workers
                self._reference.execute(words, layer, self._table, self._program.forward, rank)
        after = self.state()
        first: _State = {}
        for _ in range(repeats):
            mirror, self._mirror = self._mirror, {}
            for key, array in before.items():
                if key not in mirror or mirror[key].tobytes() != array.tobytes():
                    buffer, layer_of, rank = key
                    self._gpu.set_buffer(buffer, array, layer_of, rank)
            self._gpu.execute(self._program, index, work, layer, self._table)
            self._mirror = {key: self._gpu.buffer(*key, self._program.dims) for key in before}
            if not first:
                first = self._mirror
                if (found := _compare(before, after, first)) is not None:
                    return found
            changed = [key[0].name for key in first if self._mirror[key].tobytes() != first[key].tobytes()]
            if changed:
                return f"{changed[0]} differs from run to run"
        return None

    def culprit(self, before: _State, index: int, layer: int, phase: Segment) -> str:
        """Describe the first instruction of a phase whose results are wrong when it runs alone."""
        for row in range(len(phase.records)):
            stream = int(np.searchsorted(phase.offsets, row, "right")) - 1
            ends = (np.arange(len(phase.offsets)) > stream).astype(np.int32)
            self.restore(before)
            try:
                found = self.wrong(before, index, layer, Segment(phase.records[row : row + 1], ends), 1)
            except MegakernelError as e:
                found = str(e)
            if found is not None:
                rank, worker = divmod(stream, self._program.workers)
                operands = phase.records[row, record.OPERAND_WORD : record.WAIT_WORD].tolist()
                return f"alone on rank {rank}, worker {worker}, with operands {operands}: {found}"
        return "each instruction alone is right"


def _keys(reference: ReferenceBackend) -> Iterator[_Key]:
    for buffer, spec in BUFFERS.items():
        if spec.space is not Space.WEIGHT:
            for rank in range(reference.dims.split.tp):
                for layer in spec.layers(reference.dims.model):
                    yield buffer, layer, rank


def _phases(program: Program) -> Iterator[tuple[int, int, Segment]]:
    """Yield the number of the segment, the layer and the instructions of each phase of a step. A phase comes after all
    phases whose results it needs."""
    for index in range(len(SEGMENTS)):
        phases = program.phases(index)
        for layer in range(program.dims.model.layers) if index == BODY else (0,):
            for phase in phases:
                yield index, layer, phase


def _compare(before: _State, after: _State, got: _State) -> str | None:
    """Describe the first buffer that the GPU has computed wrongly, or return None if all are right. `got` is the GPU's
    state after a phase, and `after` the reference's. `before` is the state of both before the phase."""
    for key, expected in after.items():
        found, buffer = got[key], key[0]
        if expected.dtype == np.int32:
            if not np.array_equal(found, expected):
                return f"{buffer.name} holds integers that differ from the reference's"
            continue
        # Only elements that at least one of the backends has changed are compared. Unchanged ones would make the
        # relative error look smaller.
        bits = np.dtype(f"u{expected.dtype.itemsize}")
        old = before[key].view(bits)
        changed = (old != expected.view(bits)) | (old != found.view(bits))
        a, b = to_f32(found)[changed], to_f32(expected)[changed]
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            places = [int(np.isnan(x).sum()) for x in (a, b)]
            return f"{buffer.name} is not a number in {places[0]} places, but the reference's is in {places[1]}"
        norm, error = (float(np.linalg.norm(np.nan_to_num(x))) for x in (b, a - b))
        # A GPU may round a few bfloat16 values differently, and may add float32 values in another order. PARTIALS (of
        # attention) is a float32 buffer, but tensor cores take the softmax probabilities in bfloat16.
        limit = _ROUNDED if expected.dtype == np.uint16 or buffer is Buffer.PARTIALS else _SUMMED
        if error > limit * norm:
            return (
                f"{buffer.name} is off by {error / norm if norm else np.inf:.1e} of its norm, "
                f"but only {limit:.0e} is allowed"
            )
    return None
