"""The reference and the code of the Hopper interpreter on fibres: an instruction at a time, from equal buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
from cpu_support import PAGES, RandomCheckpoint
from numpy.typing import NDArray
from program_parts import segment
from protocol import LaunchImage

from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, Forward, Space, StepTable, from_f32, to_f32
from megakernel.isa.record import Records
from megakernel.program import Program
from megakernel.runtime.reference import ReferenceBackend

Array = NDArray[Any]
Key = tuple[int, Buffer, int]  # rank, buffer, layer


class Twins:
    """Weights and noise in every float buffer, on both. Counters: one for each row block."""

    def __init__(self, checkpoint: RandomCheckpoint, forward: Forward, dims: Dims, seed: int = 0) -> None:
        self.dims, self.forward = dims, forward
        self.reference = ReferenceBackend(checkpoint, dims, PAGES, dtype=Dtype.BF16)
        rng = np.random.default_rng(seed)
        for key in self.keys():
            view, kind = self.buffer(*key), BUFFERS[key[1]].resolve_dtype(dims)
            if kind is not Dtype.I32:
                view[:] = from_f32(rng.standard_normal(view.shape, dtype=np.float32), kind)
        nothing, totals = segment(*[[]] * dims.tp), np.zeros((dims.tp, dims.row_blocks), np.int32)
        empty = Program(dims, forward, "none", dims.tp, 1, dims.row_blocks, *[nothing] * 3, *[totals] * 3)
        self.image = LaunchImage(self.reference, empty, StepTable(dims), poison=False)

    def keys(self) -> list[Key]:
        """All that is not a weight."""
        return [
            (rank, buffer, layer)
            for rank in range(self.dims.tp)
            for buffer, spec in BUFFERS.items()
            if spec.space is not Space.WEIGHT
            for layer in range(self.dims.layers if spec.layered else 1)
        ]

    def buffer(self, rank: int, buffer: Buffer, layer: int = 0) -> Array:
        """Of the reference."""
        return self.reference.buffer(buffer, layer, rank)

    def run(self, instruction: Records, layer: int, table: StepTable, rank: int = 0) -> dict[Key, Array]:
        """Execute on fibres, from the reference's buffers; all buffers afterwards. Counters are those of this run."""
        for key in self.keys():
            self.image.buffer(key[1], key[2], key[0])[:] = self.buffer(*key)
        for other in range(self.dims.tp):
            self.image.counters(other)[:] = 0
        self.image.execute(instruction, layer, rank, table=table)
        return {key: self.image.buffer(key[1], key[2], key[0]).copy() for key in self.keys()}

    def compare(
        self,
        instruction: Records,
        layer: int,
        table: StepTable,
        rank: int = 0,
        *,
        rtol: float = 2e-5,
        atol: float = 2e-5,
    ) -> None:
        """The interpreter does to every buffer of every rank what the reference does."""
        after = self.run(instruction, layer, table, rank)
        self.reference.execute(instruction, layer, table, self.forward, rank)
        for key, got in after.items():
            expected, name = self.buffer(*key), f"{key[1].name} of rank {key[0]}, layer {key[2]}"
            if got.dtype == np.int32:
                np.testing.assert_array_equal(got, expected, err_msg=name)
                continue
            rounded = max(rtol, 2**-7) if got.dtype == np.uint16 else rtol
            wide = atol * 10 if key[1] is Buffer.PARTIALS else atol  # not yet divided by l
            np.testing.assert_allclose(to_f32(got), to_f32(expected), rtol=rounded, atol=wide, err_msg=name)
