"""Applies constraints, such as grammars, to the sequences of a step. A token is forced if the constraint allows no
other token. `force` chooses forced tokens that a step computes together with their sequence's last token. `write` puts
forced tokens and masks of the permitted tokens into the step table, the inputs of the launch."""

from __future__ import annotations

import numpy as np

from megakernel.isa import StepTable
from megakernel.serving.engine.grammars import Constraint, write_masks
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import PlannedRows, Sequence
from megakernel.serving.engine.scheduler import Batch

Forced = dict[Sequence, list[int]]  # a constrained sequence -> the tokens that are forced next, often none


def follow(part: PlannedRows, batch: Batch) -> Forced:
    """Return, for each sequence, the tokens that its constraint (such as a grammar) forces next. A sequence has an
    entry only if a planned step samples a token for it and its constraint now limits something."""
    turns, slots = part.turns, batch.slots
    chosen = turns.alive(slots) & slots.constrained[turns.slot]
    chosen &= np.bincount(turns.chunk[turns.samples], minlength=len(chosen)) > 0
    forced = {}
    slot = turns.slot[chosen]
    newest = slots.tokens[slot, slots.known[slot] - 1].tolist()
    for sequence, token in zip(turns.sequence[chosen], newest, strict=True):
        if sequence.constraint.waits(token):
            continue
        run = sequence.constraint.follow(slots.known_tokens(sequence.slot)[len(sequence.request.prompt_ids) :])
        if not sequence.constraint.idle:
            forced[sequence] = run
    return forced


def force(part: PlannedRows, batch: Batch, forced: Forced, programs: Programs, *, room: int) -> dict[int, list[int]]:
    """Return forced tokens that a planned step computes as additional rows, so that they need no steps later. There are
    at most `room` such tokens, and only as many as replace padding rows or fill a larger program. The result maps the
    index of a sequence in the step (its chunk) to tokens whose KV pages are allocated. The remaining forced tokens are
    not lost: this step or later steps output them instead of sampling."""
    if not any(forced.values()):
        return {}
    turns, known = part.turns, batch.slots.known
    wanted = {
        chunk: forced[one]
        for chunk in part.extensible(batch.slots).tolist()
        if (one := turns.sequence[chunk]) in forced
    }
    room = programs.unpadded(len(part.tokens), max(0, min(room, sum(map(len, wanted.values())))))
    runs: dict[int, list[int]] = {}
    for chunk, run in wanted.items():
        sequence = turns.sequence[chunk]
        most = min(room, sequence.length_limit - int(known[sequence.slot]) - 1)
        if granted := batch.grant(sequence, run[: max(0, most)]):
            runs[chunk] = granted
            room -= len(granted)
    return runs


def write(table: StepTable, part: PlannedRows, batch: Batch, forced: Forced) -> list[Sequence]:
    """Write the forced tokens and the masks of permitted tokens into a step table. A row with a forced token outputs
    that token instead of sampling. Any other constrained row that samples gets a mask. Returns the sequences whose
    constraint allows no token at all. The rows of these sequences sample without a mask."""
    turns = part.turns
    table.target[: len(turns.target)] = turns.target
    table.mask[:] = table.mask_count[:] = 0
    if not forced:
        return []
    rows: dict[Sequence, list[int]] = {}
    for row in turns.samples.nonzero()[0].tolist():
        rows.setdefault(turns.sequence[turns.chunk[row]], []).append(row)
    masked: dict[Sequence, tuple[int, Constraint]] = {}
    for sequence, run in forced.items():
        mine = rows[sequence]
        for row, token in zip(mine, run, strict=False):
            table.target[row] = token
        limit = sequence.constraint.limit if sequence.constraint else None
        if len(run) < len(mine) and limit and not limit.error:
            masked[sequence] = mine[-1], limit
    number = 0
    for group in batch.mask_time.groups(masked, alone=batch.alone):
        write_masks(table.masks[number:], [masked[sequence][1] for sequence in group])
        for row, constraint in map(masked.__getitem__, group):
            number += 1
            table.mask[row] = 0 if constraint.error else number
    table.mask_count[:] = number
    return [sequence for sequence in forced if sequence.stuck]
