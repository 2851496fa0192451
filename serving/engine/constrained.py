"""Applies constraints, such as grammars, to the sequences of a step.

A token is forced if the constraint allows no other token. `force` adds forced tokens to a step. `write` puts masks of
the permitted tokens into the step table.
"""

from __future__ import annotations

import numpy as np

from megakernel.isa import StepTable
from megakernel.serving.engine.constraint import write_masks
from megakernel.serving.engine.plan import Part, Work, extended
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Sequence
from megakernel.serving.engine.scheduler import Batch
from megakernel.serving.engine.speculation import VERIFIED_ROWS, granted

Forced = dict[Sequence, list[int]]  # a constrained sequence -> the tokens that must come next, often none


def force(work: Work, batch: Batch, programs: Programs, tokens: int) -> Forced:
    """Add as many forced tokens to a step as fit without more padding rows. Returns all forced tokens.

    The step has at most `tokens` tokens in total. Forced tokens that do not fit are not lost: logit rows of this step
    or of later steps output them instead of sampling.
    """
    part, slots = work.part, batch.slots
    turns = part.turns
    chosen = turns.alive(slots) & slots.constrained[turns.slot]
    chosen &= np.bincount(turns.chunk[turns.samples], minlength=len(chosen)) > 0
    forced: Forced = {}
    for sequence in turns.sequence[chosen]:
        forced[sequence] = sequence.constraint.follow(sequence.tokens, len(sequence.request.prompt_ids))
    if not any(forced.values()):
        return forced
    runs = {chunk: forced[one] for chunk in part.extensible(slots).tolist() if (one := turns.sequence[chunk]) in forced}
    room = min(tokens - len(part.tokens), min(programs.most_logit_rows, VERIFIED_ROWS) - len(turns.chunk))
    room = programs.unpadded(len(part.tokens), max(0, min(room, sum(map(len, runs.values())))))
    proposals: dict[int, list[int]] = {}
    for chunk, run in runs.items():
        sequence = turns.sequence[chunk]
        most = min(len(run), room, sequence.length_limit - len(sequence.tokens) - 1)
        if most > 0 and (taken := granted(work, batch, sequence, run[:most])):
            proposals[chunk] = taken
            room -= len(taken)
    if proposals:
        work.part, work.verifies = extended(part, slots, proposals), True
    return forced


def write(table: StepTable, part: Part, forced: Forced) -> list[Sequence]:
    """Write the forced tokens and the masks of permitted tokens into a step table.

    A logit row with a forced token outputs that token instead of sampling. A constrained row that samples gets a mask.
    Returns the sequences that have no valid continuation. The rows of these sequences sample without a mask.
    """
    turns = part.turns
    table.target[: len(turns.target)] = turns.target
    table.mask[:] = 0
    rows: dict[Sequence, list[int]] = {}
    for row in turns.samples.nonzero()[0].tolist():
        rows.setdefault(turns.sequence[turns.chunk[row]], []).append(row)
    masked = []
    for sequence, run in forced.items():
        mine = rows[sequence]
        for row, token in zip(mine, run, strict=False):
            table.target[row] = token
        if len(run) < len(mine) and sequence.constraint and not sequence.stuck:
            masked.append((mine[-1], sequence.constraint))
    write_masks(table.masks, [constraint for _, constraint in masked])
    table.mask_count[:] = len(masked)
    for number, (row, constraint) in enumerate(masked, 1):
        table.mask[row] = 0 if constraint.error else number
    return [sequence for sequence in forced if sequence.stuck]
