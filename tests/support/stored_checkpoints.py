"""Checkpoints whose matrices are stored in other types than the compute type, and their logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from compiled import compiled
from cpu_support import DIMS, Array, RandomCheckpoint
from runner import Runner

from megakernel.isa import Buffer, Dims, Dtype, Split, column_share
from megakernel.machine import host
from megakernel.model.checkpoint import Checkpoint, Storage, StoredRows, WeightRows, converted
from megakernel.model.weight_types import bits_of, stored_as
from megakernel.program import Program
from megakernel.scheduler.options import Options

# Rows of 301 or 333 weights take two chunks of 256 steps along K, and end with a partial quantisation block. The last
# panel of 16 columns is partial too.
ODD = DIMS.changed(hidden=301, ffn=333)
# With these sizes, ranks never divide a quantisation block of 32 weights.
SHARED = DIMS.changed(heads=8, head_dim=32, ffn=288)


class Dequantised:
    """The weights of a quantised checkpoint, converted to float32. The LM head does not share the embedding table."""

    def __init__(self, quantised: Checkpoint) -> None:
        self.name, self.dtype = quantised.name, quantised.dtype
        self.config = replace(quantised.config, tied=False)
        self.storage = {
            buffer: Storage(tuple((StoredRows(Dtype.F32, sum(p.rows for p in layer)),) for layer in storage.layers))
            for buffer, storage in quantised.storage.items()
        }
        self._quantised = quantised

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        return converted(self._quantised.rows(buffer, layer, split), column_share(buffer, split).size, Dtype.F32)


class GivenHead(RandomCheckpoint):
    """A checkpoint whose LM head has these rows of blocks of a type."""

    def __init__(self, dims: Dims, kind: Dtype, head: Array) -> None:
        super().__init__(dims, storage={Buffer.LM_HEAD: Storage(((StoredRows(kind, len(head)),),))})
        self._head = WeightRows(kind, head)

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        return [self._head] if buffer is Buffer.LM_HEAD else super().rows(buffer, layer, split)


class Mixed:
    """A checkpoint whose matrices each have rows of three types, which differ from layer to layer."""

    def __init__(self, whole: RandomCheckpoint, kinds: tuple[Dtype, ...]) -> None:
        self.name, self.dtype, self.config = whole.name, whole.dtype, whole.config
        self._all = {kind: stored_as(whole, kind.name.lower()) for kind in kinds}
        self._whole, self._kinds = whole, kinds
        layers = {b: len(s.layers) for b, s in self._all[kinds[0]].storage.items()}
        self.storage = {b: Storage(tuple(tuple(self._parts(b, i)) for i in range(n))) for b, n in layers.items()}

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        if buffer not in self.storage:
            return self._whole.rows(buffer, layer, split)
        out, begin = [], 0
        for kind, rows in self._parts(buffer, layer):
            whole = np.concatenate([part.data for part in self._all[kind].rows(buffer, layer, split)])
            out.append(WeightRows(kind, whole[begin : begin + rows]))
            begin += rows
        return out

    def _parts(self, buffer: Buffer, layer: int) -> list[StoredRows]:
        rows = self._all[self._kinds[0]].storage[buffer].layers[layer][0].rows
        third = rows // 3 // 16 * 16 or rows // 3
        turned = self._kinds[layer % len(self._kinds) :] + self._kinds
        return [StoredRows(turned[0], third), StoredRows(turned[1], third), StoredRows(turned[2], rows - 2 * third)]


def quantised(
    dims: Dims, dtype: Dtype = Dtype.F32, kind: Dtype = Dtype.Q8_0, *, tied: bool = False
) -> tuple[Checkpoint, Dequantised]:
    """Return a checkpoint that stores all matrices as `kind`, and the same weights converted to float32."""
    dims = dims.changed(dtype=int(dtype))
    checkpoint = stored_as(RandomCheckpoint(dims, tied), kind.name.lower())
    return checkpoint, Dequantised(checkpoint)


def program_of(checkpoint: Checkpoint, rows: int, tp: int = 1, *, q8: bool = False, **options: Any) -> Program:
    bits = bits_of(checkpoint.config, checkpoint.storage)
    given: dict[str, Any] = {"dtype": checkpoint.dtype, "weight_bits": bits, "q8_activations": q8}
    given |= {"max_seqs": 3, "max_context": 400}
    return compiled(checkpoint.config, host(2), rows, rows, tp, Options(**options), **given)


def logits(backend: str, checkpoint: Checkpoint, rows: int, tp: int = 1, **options: Any) -> Array:
    """Return the logits of every row of a random prompt of `rows` tokens."""
    [found] = all_logits(backend, checkpoint, [rows], tp=tp, **options)
    return found


def all_logits(backend: str, checkpoint: Checkpoint, prompts: Sequence[int], **options: Any) -> list[Array]:
    """Return the logits of random prompts of these lengths, which run one after the other on one backend."""
    runner = Runner(checkpoint, backend, checkpoint.dtype, max_seqs=3, max_context=400, **options)
    try:
        vocab = checkpoint.config.vocab
        return [runner.logits(np.random.default_rng(rows).integers(0, vocab, rows).tolist()) for rows in prompts]
    finally:
        runner.close()


def assert_close(got: Array, expected: Array, dtype: Dtype) -> None:
    tolerance = 2**-7 if dtype is Dtype.BF16 else 1e-5
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())
