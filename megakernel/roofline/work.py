"""Computes the work that a step cannot avoid, the least time for it, and how close measured times come to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import (
    BUFFERS,
    Buffer,
    Dims,
    Forward,
    ModelSizes,
    Operation,
    Phase,
    Rows,
    Space,
    Split,
    attention_cost,
    itemsize,
    kv_bytes,
    weight_shape,
)
from .ceilings import Ceilings


@dataclass(frozen=True)
class StepWork:
    """The FLOPs (a multiply-add counts as two) and the bytes of one step on one rank."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    link_bytes: float = 0.0  # bytes that the rank stores on other ranks

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


def model_weights(phases: Iterable[Phase], split: Split) -> dict[Buffer, int]:
    """Return the bytes that each weight buffer of the phases takes on rank `split.rank`, all layers together."""
    out: dict[Buffer, int] = {}
    for phase in phases:
        for buffer in (phase.weights, phase.norm, phase.bias):
            if buffer is not None and buffer not in out:
                spec = BUFFERS[buffer]
                bits = phase.stored_bits(split.model) if spec.matrix else spec.resolve_dtype(split.model).bits
                elements = (split.model.layers if spec.layered else 1) * math.prod(weight_shape(buffer, split))
                out[buffer] = round(elements * bits / 8)
    return out


def step_work(
    forward: Forward, split: Split, rows: Sequence[int], contexts: Sequence[int], logit_rows: int, *, tied: bool = False
) -> StepWork:
    """Return the least work of a step on rank `split.rank`: what no implementation of the phases `forward` can avoid.

    Sequence i adds `rows[i]` new tokens, and has `contexts[i]` KV tokens afterwards, including the new ones.

    FLOPs are those of matmuls, 2 x weights x rows, and of attention, 4 x query heads x head_dim x layers x (query, key)
    pairs. A sliding window reduces the number of pairs. Norms, RoPE and softmax are ignored, because they take only a
    few operations per element.

    Every weight is read once, and K and V of every visible token once. If B rows use k of E experts each, the weights
    of min(B k, E) experts are read. The LM head is read only if there are logit rows. Of the embedding table, only the
    rows of the step's tokens are read. They cost nothing if the LM head is read and is the same matrix (`tied`).
    `_link_bytes` gives the bytes sent to other ranks.
    """
    if len(rows) != len(contexts):
        raise ValueError(
            f"there are {len(rows)} row counts but {len(contexts)} contexts: each sequence needs one of each"
        )
    new, after = np.array(rows, np.int64), np.array(contexts, np.int64)
    if ((new < 0) | (new > after)).any():
        raise ValueError("a sequence's context must be at least its number of new rows")
    total = int(new.sum())
    pairs, tokens = attended(split.model, new, after)
    flops, _ = attention_cost(split.model, split.model.kv_heads, float(pairs))
    for runs, segment in zip((1, split.model.layers, 1), forward.segments, strict=True):
        for phase in segment:
            if phase.reads_weights and phase.operation is not Operation.GATHER and phase.weights is not None:
                products = runs * math.prod(weight_shape(phase.weights, split)) * _used(phase.weights, split, 1)
                flops += 2.0 * products * (logit_rows if phase.rows is Rows.LOGIT else total)

    def read(phase: Phase) -> bool:
        return phase.operation is not Operation.GATHER and (logit_rows > 0 or phase.rows is not Rows.LOGIT)

    sizes = model_weights(filter(read, forward), split)
    weights = float(sum(size * _used(buffer, split, total) for buffer, size in sizes.items()))
    if not (tied and logit_rows):
        gathers = (phase for phase in forward if phase.operation is Operation.GATHER)
        weights += sum(total * phase.inner(split) * phase.stored_bits(split.model) / 8 for phase in gathers)
    kv = float(tokens * split.rank_kv_heads * kv_bytes(split.model))
    return StepWork(flops, weights, kv, _link_bytes(split, total, logit_rows))


def _used(buffer: Buffer, split: Split, rows: int) -> float:
    """Return the fraction of a weight buffer that `rows` token rows read, if no two of them choose the same expert."""
    model = split.model
    every = not (model.experts and BUFFERS[buffer].per_expert)
    return 1.0 if every else min(1.0, rows * model.experts_per_token / model.experts)


def attended(model: ModelSizes, new: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[int, int]:
    """Return two sums over layers and sequences: attention's (query, key) pairs, and the tokens whose K and V are read
    because a new token attends to them. Sequence i has new[i] new tokens, and after[i] tokens in all."""
    pairs, tokens = 0, 0
    for span, layers in model.spans.items():
        before = after - new
        whole = np.clip(span - before, 0, new)  # number of new tokens that attend to all tokens before them
        pairs += layers * int((whole * before + whole * (whole + 1) // 2 + (new - whole) * span).sum())
        tokens += layers * int(np.minimum(after, new + span - 1).sum())
    return pairs, tokens


def _link_bytes(split: Split, rows: int, logit_rows: int) -> float:
    """Return the bytes that each of Y ranks stores on the other ranks, if all shards have equal sizes.

    A layer has two gathers of normalised rows, and two reductions: of the attention output and of the MLP's output.
    Each of the four sends (Y - 1) / Y of `rows` rows of the hidden size. Two options change this. With a replicated O
    projection, there is no first reduction. Instead, each rank sends its own heads of a row, 1 / Y of the row, to the
    row's owner. With a replicated residual, there are no gathers, and the two reductions send their rows to every rank.
    In addition, logit rows are gathered, and their float32 logits are sent to the ranks that sample."""
    others = (split.tp - 1) / split.tp
    copies = split.tp if split.replicated_residual else 1
    gathers = 0 if split.replicated_residual else 1
    attention = split.model.heads * split.model.head_dim / split.tp if split.replicated_o else split.model.hidden
    layer = others * (2 * gathers * split.model.hidden + copies * (attention + split.model.hidden))
    head = others * (gathers * split.model.hidden * itemsize(split.model) + 4 * split.model.vocab / split.tp)
    return rows * layer * split.model.layers * itemsize(split.model) + logit_rows * head


def bound(work: StepWork, ceilings: Ceilings) -> float:
    """The least time of a step in seconds: the longest of the times for arithmetic, memory and links, which overlap."""
    link = work.link_bytes / (ceilings.link_bytes_per_s or math.inf)
    return max(work.bytes / ceilings.read_bytes_per_s, work.flops / ceilings.flops, link)


def fraction_error(fraction: float, ceilings: Ceilings) -> str | None:
    """Return an error message if `fraction`, the fraction of the roofline that a step reached, is above 1, which is
    impossible; otherwise None."""
    if fraction <= 1:
        return None
    return f"{fraction:.2f} of the roofline is impossible: the ceilings ({ceilings.how}) or the time are wrong"


def memory_fit(
    ranks: Sequence[Dims], weight_bytes: float, memory_bytes: float, sequences: int, context: int
) -> dict[str, Any]:
    """Return the memory that a step needs on the rank that needs most: `weight_bytes`, activations, and a KV cache for
    `sequences` sequences of `context` tokens each. `ranks` has the model's and the batch's sizes on each rank.
    Every rank has `memory_bytes`. The result also says whether the step fits, and how many such sequences would fit."""
    one = max(float(d.model.layers * d.split.rank_kv_heads * context * kv_bytes(d.model)) for d in ranks)
    activations = max(_bytes(d, Space.ACTIVATION) + _bytes(d, Space.OUTPUT) for d in ranks)
    needed = weight_bytes + one * sequences + activations
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": one * sequences,
        "activation_bytes": activations,
        "memory_bytes": memory_bytes,
        "sequences_at_most": max(0, int((memory_bytes - weight_bytes - activations) // one)),
        "needed_bytes": needed,
        "fits": needed <= memory_bytes,
    }


def _bytes(dims: Dims, space: Space) -> float:
    specs = (spec for spec in BUFFERS.values() if spec.space is space)
    return float(sum(math.prod(s.shape(dims, 0)) * s.resolve_dtype(dims.model).itemsize for s in specs))
