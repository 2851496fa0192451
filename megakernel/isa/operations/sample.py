"""SAMPLE turns each row of logits into one token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..access import Kind
from ..buffers import Buffer, given
from ..context import F32, Context
from ..opcodes import Rows
from .spec import Cut, OperationSpec, box, logits, work

I32 = NDArray[np.int32]
Four = tuple[int, int, int, int]


def _sample(c: Context, row: int, rows: int) -> None:
    t = c.table
    for i in range(row, row + rows):
        token, logprob = 0, np.float32(0.0)
        if t.logit_rows[i] >= 0:
            z = c.read(c.inputs, i)
            token = int(t.target[i]) if t.target[i] >= 0 else _choose(c, i, z)
            logprob = z[token] - log_sum_exp(z)
        c.store(Buffer.TOKENS_OUT, (0,), i, token)
        c.store(Buffer.LOGPROBS_OUT, (0,), i, logprob)
        if t.sample_slot[i] >= 0:
            c.store(Buffer.HISTORY, range(c.dims.split.tp), (t.sample_slot[i], t.sample_position[i]), token)


def _choose(c: Context, i: int, z: F32) -> int:
    """Choose a token for logit row i, whose logits are z. Apply, in this order, penalties, bias, mask, temperature,
    min-p, top-k and top-p. Then draw one token at random."""
    t = c.table
    if t.history_slot[i] >= 0:
        seen = c.buffer(Buffer.HISTORY)[t.history_slot[i], : t.sample_position[i]]
        penalties = {"repetition": t.repetition_penalty, "presence": t.presence_penalty}
        penalties["frequency"] = t.frequency_penalty
        values = {name: float(column[i]) for name, column in penalties.items()}
        z = penalised(z, seen, seen[t.prompt_length[i] :], **values)
    bias = slice(t.bias_begin[i], t.bias_end[i])
    z = z.copy()
    np.add.at(z, t.bias_ids[bias], t.bias_values[bias])
    if t.mask[i] > 0:
        bits = np.unpackbits(t.masks[t.mask[i] - 1].view(np.uint8), bitorder="little")[: len(z)]
        z[bits == 0] = -np.inf
    if t.temperature[i] == 0 or z.max() == -np.inf:
        return int(z.argmax())
    z = z / t.temperature[i]
    ids = kept(z, min_p=float(t.min_p[i]), top_k=int(t.top_k[i]), top_p=float(t.top_p[i]))
    return draw(z, ids, uniform(int(t.seed_low[i]), int(t.seed_high[i]), int(t.sample_position[i]), int(t.choice[i])))


# Constants of the counter-based random number generator Philox4x32: Salmon et al., "Parallel random numbers: as easy as
# 1, 2, 3", SC 2011, section 3.3.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: Four, key: tuple[int, int]) -> Four:
    """Return four random 32-bit numbers for a counter (four 32-bit numbers) and a key (two): Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed_low: int, seed_high: int, position: int, choice: int) -> float:
    """Return the random number for sampling a token: a multiple of 2^-24 in [0, 1). It depends only on the request's
    seed, the token's position and `choice`, the index of the completion within the request. So it does not depend on
    the batch."""
    first = philox((position & _WORD, choice & _WORD, 0, 0), (seed_low & _WORD, seed_high & _WORD))[0]
    return float(first >> 8) * 2.0**-24


def log_sum_exp(z: F32) -> np.float32:
    top = z.max()
    return np.float32(top + np.log(np.exp(z - top).sum(dtype=np.float32)))


def penalised(z: F32, seen: I32, output: I32, *, repetition: float, presence: float, frequency: float) -> F32:
    """Return logits z after three penalties.

    `repetition` divides positive logits of the tokens in `seen` (prompt and output), and multiplies the others. Then
    each logit of a token in `output` decreases by `frequency` per occurrence of the token, and once by `presence`.
    """
    z = z.copy()
    ids = np.unique(seen)
    z[ids] = np.where(z[ids] > 0, z[ids] / np.float32(repetition), z[ids] * np.float32(repetition))
    ids, counts = np.unique(output, return_counts=True)
    z[ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)
    return z


def kept(z: F32, *, min_p: float, top_k: int, top_p: float) -> NDArray[np.intp]:
    """Return the token ids that remain after the filters min-p, top-k and top-p, in this order. The most probable id
    comes first. Of equally probable ids, the smaller comes first.

    z are logits after temperature. min_p = 0, top_k = 0 and top_p = 1 remove nothing. top_p looks only at the ids that
    the other filters have left. Of their total probability, it keeps the fraction top_p, with as few ids as possible.
    """
    order: NDArray[np.intp] = np.argsort(-z, kind="stable")
    p = np.exp(z[order] - z[order[0]])
    order = order[p >= np.float32(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(p[: len(order)], dtype=np.float64)
        order = order[: int(np.searchsorted(mass, np.float32(top_p) * mass[-1])) + 1]
    return order


def draw(z: F32, ids: NDArray[np.intp], u: float) -> int:
    """Return the first of `ids`, in ascending order, at which the cumulative softmax of z exceeds u (0 <= u < 1)."""
    ids = np.sort(ids)
    mass = np.cumsum(np.exp(z[ids] - z[ids].max()), dtype=np.float64)
    return int(ids[np.searchsorted(mass, u * mass[-1], side="right")])


SAMPLE = OperationSpec(
    "chooses a token for the row, unless the step table gives it: applies penalties, bias, mask, temperature, "
    "min-p, top-k and top-p, then samples with a random number from (seed, choice, position). Writes the token to "
    "HISTORY on every rank and to TOKENS_OUT on rank 0, and its raw log-softmax to LOGPROBS_OUT on rank 0",
    Cut.ROWS,
    accesses=lambda p, c, d: [
        box(given(p.inputs), Kind.READ, c, (0, d.model.vocab)),
        box(Buffer.TOKENS_OUT, Kind.WRITE, c, (0, 1), 0),
        box(Buffer.LOGPROBS_OUT, Kind.WRITE, c, (0, 1), 0),
    ],
    cost=lambda p, c, d: work(c, vector=8.0 * c["rows"] * d.model.vocab),
    buffers=lambda p, d: {"inputs": logits(d)},
    execute=_sample,
    rows=lambda p: (Rows.SAMPLED,),
)
