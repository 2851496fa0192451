"""Decides in which types a model's matrices are kept in memory; they may differ from the compute type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dtype, Split, column_share, row_shares
from .checkpoint import Checkpoint, Storage, StoredRows, WeightRows, column_bytes, converted, vector
from .config import ModelConfig
from .families import weights
from .quantise import quantise
from .rope import rope_table

# The values of the flag `--weights`, except `auto`, which keeps the checkpoint's types.
WEIGHT_TYPES = {kind.name.lower(): kind for kind in Dtype if kind is not Dtype.I32}
# The values of the flag `--kv-cache-dtype`, except `auto`, which means the compute type.
KV_TYPES = {Dtype.Q8_0.name.lower(): Dtype.Q8_0}


def quantised_kv(name: str) -> bool:
    """Whether `--kv-cache-dtype name` means a quantised cache. Raises MegakernelError for an unknown name."""
    if name != "auto" and name not in KV_TYPES:
        raise MegakernelError(f"cannot store K and V in {name!r}: choose from auto, {', '.join(KV_TYPES)}")
    return name in KV_TYPES


def rounds_activations(name: str, storage: Mapping[Buffer, Storage]) -> bool:
    """Return whether inputs of quantised weights are rounded to integers, if `--activations` has the value `name`.
    `storage` lists the matrices that are not kept in the compute type. Raises MegakernelError for an unknown value."""
    if name not in ("auto", "q8", "float"):
        raise MegakernelError(f"cannot compute activations in {name!r}: choose from auto, q8, float")
    multiplied = [kept for buffer, kept in storage.items() if buffer is not Buffer.EMBED]
    quantised = any(part.dtype.quantised for kept in multiplied for layer in kept.layers for part in layer)
    if name == "q8" and not quantised:
        raise MegakernelError("--activations q8 needs weights that are quantised: choose their type with --weights")
    return quantised and name != "float"


def stored_as(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return `checkpoint` with its matrices converted to the type `name`, a value of `--weights`; `auto` keeps their
    types. Raises MegakernelError for an unknown name."""
    return checkpoint if name == "auto" else Stored(checkpoint, _all_in(checkpoint.config, _weight_type(name)))


def storage_of(checkpoint: Checkpoint | None, config: ModelConfig, name: str) -> dict[Buffer, Storage]:
    """Return the matrices that `--weights NAME` keeps in another type than the compute type, and their types. Without a
    checkpoint (None), `auto` means the compute type. Raises MegakernelError for an unknown NAME."""
    if name != "auto":
        return _all_in(config, _weight_type(name))
    return {} if checkpoint is None else checkpoint.storage


def bits_of(config: ModelConfig, storage: Mapping[Buffer, Storage]) -> dict[Buffer, float]:
    """Return the mean number of bits per weight of each matrix in `storage`."""
    split = Split(config.sizes(Dtype.F32))
    return {buffer: stored.bits(column_share(buffer, split).whole) for buffer, stored in storage.items()}


def _weight_type(name: str) -> Dtype:
    if name not in WEIGHT_TYPES:
        raise MegakernelError(f"cannot store weights in {name!r}: choose from auto, {', '.join(WEIGHT_TYPES)}")
    return WEIGHT_TYPES[name]


def _all_in(config: ModelConfig, kind: Dtype) -> dict[Buffer, Storage]:
    """Return the `storage` of a model whose matrices all have the type `kind`. Routers are not quantised: they are
    small, and rounding could change which experts they choose."""
    split = Split(config.sizes(Dtype.F32))
    rows = {b: sum(share.whole for share in row_shares(b, split)) for b in weights(config) if BUFFERS[b].matrix}
    kinds = {b: Dtype.F32 if b is Buffer.W_ROUTER and kind.quantised else kind for b in rows}
    return {b: Storage(((StoredRows(kinds[b], n),),) * len(BUFFERS[b].layers(config))) for b, n in rows.items()}


def bytes_by_type(config: ModelConfig, dtype: Dtype, storage: Mapping[Buffer, Storage]) -> dict[str, int]:
    """Return how many bytes of each type, by its name, a model's matrices take in memory. `storage` lists the matrices
    that do not have the compute type `dtype`. An LM head that is the embedding table (tied) counts once."""
    split, out = Split(config.sizes(dtype)), Counter[str]()
    for buffer, kept in {**_all_in(config, dtype), **storage}.items():
        if buffer is Buffer.LM_HEAD and config.tied:
            continue
        for kind, rows in (part for layer in kept.layers for part in layer):
            out[kind.name.lower()] += rows * kind.row_bytes(column_share(buffer, split).whole)
    return dict(out.most_common())


class Stored:
    """A checkpoint whose matrices are converted when read, to the types in `storage` or to the compute type. `config`
    replaces its configuration, which determines RoPE's frequencies."""

    def __init__(self, whole: Checkpoint, storage: dict[Buffer, Storage], config: ModelConfig | None = None) -> None:
        self.name, self.config, self.dtype = whole.name, config or whole.config, whole.dtype
        self.storage = storage
        self._whole = whole

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        if buffer is Buffer.INV_FREQ and self.config is not self._whole.config:
            return [vector(rope_table(self.config, layer))]
        inner = column_share(buffer, split).size
        if buffer not in self.storage:
            rows = self._whole.rows(buffer, layer, split)
            return converted(rows, inner, BUFFERS[buffer].resolve_dtype(split.model))
        exact = replace(split, model=replace(split.model, dtype=int(Dtype.F32)))  # do not round twice
        rows, kinds = self._whole.rows(buffer, layer, exact), self.storage[buffer].layers[layer]
        kinds *= len(rows) // len(kinds)  # all rows of a layer may be listed as one part

        def kept(part: WeightRows, kind: Dtype) -> WeightRows:
            if part.dtype is kind:
                return part
            column_bytes(kind, buffer, split)  # raises MegakernelError if columns would begin inside a block
            [floats] = converted([part], inner, Dtype.F32 if kind.quantised else kind)
            return WeightRows(kind, quantise(floats.data.view(np.float32), kind)) if kind.quantised else floats

        return [kept(part, kind) for part, (kind, _) in zip(rows, kinds, strict=True)]


def for_contexts(checkpoint: Checkpoint, tokens: int) -> Checkpoint:
    """Return `checkpoint` for contexts of up to `tokens` tokens, because LongRoPE's frequencies depend on them."""
    config, rope = checkpoint.config, checkpoint.config.rope
    if not rope.short_factors or tokens > rope.original_context:
        return checkpoint
    return Stored(checkpoint, checkpoint.storage, replace(config, max_context=tokens))
