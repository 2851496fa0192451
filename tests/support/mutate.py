"""Breaks correct programs by one small mistake each. `KINDS` lists the kinds; a seeded generator chooses the place."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import handmade
import numpy as np

from megakernel.isa import CONTROL, DRAIN, JOIN, Forward, Phase, record
from megakernel.program import SEGMENTS, Program, Segment

PARTS = (*SEGMENTS, "queues")
Rng = np.random.Generator
Mutation = Callable[[Program, Rng], Program | None]  # returns None if the mutation does not apply to the program


Place = tuple[str, int, int, int]  # (name in PARTS, index of the record, index of the word, value of the word)


def _pick(program: Program, rng: Rng, wanted: Callable[[np.ndarray], np.ndarray]) -> Place | None:
    """Return a random one of the words that `wanted` marks in the records of all parts, or None if it marks none."""
    found = [(name, np.argwhere(wanted(getattr(program, name).records))) for name in PARTS]
    found = [(name, at) for name, at in found if len(at)]
    if not found:
        return None
    sizes = np.array([len(at) for _, at in found])
    name, at = found[int(rng.choice(len(found), p=sizes / sizes.sum()))]
    row, word = at[int(rng.integers(len(at)))].tolist()
    return name, row, word, int(getattr(program, name).records[row, word])


def _edited(program: Program, name: str, change: Callable[[np.ndarray], None]) -> Program:
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    change(records)
    return replace(program, **{name: Segment(records, segment.offsets)})


def edit(program: Program, name: str, row: int | list[int], word: int | list[int] | slice, value: int = 0) -> Program:
    """Return the program with `value` in one word, or several words, of one record or several records."""

    def change(records: np.ndarray) -> None:
        records[row, word] = np.array(value & 0xFFFFFFFF, np.uint32).astype(np.int32)

    return _edited(program, name, change)


def edit_operand(program: Program, name: str, row: int | list[int], which: str, value: int) -> Program:
    """Return the program with operand `which` set to `value` in one record, or in several records of one phase."""
    phase = program.forward.by_number[int(np.atleast_1d(getattr(program, name).records[row, 0])[0])]
    return edit(program, name, row, record.OPERAND_WORD + phase.operands.index(which), value)


def rows_of(program: Program, name: str, phase: str, rank: int | None = None) -> list[int]:
    """Return the indices of a phase's records in the program's part `name`, of one rank or (if None) of all ranks."""
    segment: Segment = getattr(program, name)
    per_rank = program.rank_queues if name == "queues" else program.workers
    stream = np.searchsorted(segment.offsets, np.arange(len(segment.records)), side="right") - 1
    here = record.phase_number(segment.records) == program.forward.by_name[phase].number
    return np.nonzero(here & ((stream // per_rank == rank) if rank is not None else True))[0].tolist()


Span = tuple[int, int]  # (index of the first word within its record, number of words)
_WAIT: Span = (record.WAIT_WORD, record.WAITS)
_SIGNAL: Span = (record.SIGNAL_WORD, record.SIGNALS)


def _word(program: Program, rng: Rng, span: Span) -> Place | None:
    """Return a random one of the nonzero words that lie within `span` in their record, or None if all are zero."""

    def wanted(records: np.ndarray) -> np.ndarray:
        words = np.arange(records.shape[1]) - span[0]
        return (records != 0) & (words >= 0) & (words < span[1])

    return _pick(program, rng, wanted)


def _of_word(span: Span, change: Callable[[Program, Rng, Place], Program | None]) -> Mutation:
    def mutate(program: Program, rng: Rng) -> Program | None:
        found = _word(program, rng, span)
        return found and change(program, rng, found)

    return mutate


def drop(program: Program, rng: Rng, place: Place) -> Program:
    return edit(program, *place[:3], 0)


def retarget(program: Program, rng: Rng, place: Place) -> Program | None:
    """Make a wait or a signal name another counter."""
    name, row, word, old = place
    if program.counters < 2:
        return None
    counter = old & record.COUNTER_MASK
    other = 1 + (counter - 1 + int(rng.integers(1, program.counters))) % program.counters
    return edit(program, name, row, word, (old & ~record.COUNTER_MASK) | other)


def duplicate(program: Program, rng: Rng, place: Place) -> Program | None:
    name, row, word, old = place
    first, count = _WAIT if word < record.SIGNAL_WORD else _SIGNAL
    free = np.flatnonzero(getattr(program, name).records[row, first : first + count] == 0)
    return edit(program, name, row, first + int(free[0]), old) if len(free) else None


def weaken_wait(program: Program, rng: Rng, place: Place) -> Program | None:
    """Replace a wait by another instruction's wait, whose counter often reaches its total earlier."""
    other = _word(program, rng, _WAIT)
    return edit(program, *place[:3], other[3]) if other and other[3] != place[3] else None


def weaken_signal(program: Program, rng: Rng, place: Place) -> Program | None:
    """Move a signal to the preceding instruction of the stream, so that it is sent before the work is done."""
    name, row, word, value = place
    segment: Segment = getattr(program, name)
    if row in segment.offsets or value & record.INDEXED:
        return None
    free = np.flatnonzero(segment.records[row - 1, record.SIGNAL_WORD :] == 0)
    if not len(free):
        return None
    return edit(edit(program, name, row, word, 0), name, row - 1, record.SIGNAL_WORD + int(free[0]), value)


def _flip(flag: int) -> Callable[[Program, Rng, Place], Program]:
    return lambda program, rng, place: edit(program, *place[:3], place[3] ^ flag)


def change_owner(program: Program, rng: Rng, place: Place) -> Program | None:
    """Send a signal to another rank, to all ranks, or to the rank that keeps a row block's residual."""
    if program.ranks == 1:
        return None
    name, row, word, old = place
    ranks = [*range(program.ranks), record.ALL_RANKS, record.OWNER]
    now = old >> record.RANK_SHIFT & record.RANK_MASK
    rank = int(rng.choice([r for r in ranks if r != now]))
    return edit(program, name, row, word, old & ~(record.RANK_MASK << record.RANK_SHIFT) | rank << record.RANK_SHIFT)


def change_total(program: Program, rng: Rng) -> Program | None:
    name = str(rng.choice(["totals_first", "totals_middle", "totals_last"]))
    totals = getattr(program, name).copy()
    if name == "totals_middle" and program.dims.model.layers == 1:
        return None
    at = np.argwhere(totals > 0) if rng.random() < 0.8 else np.argwhere(totals >= 0)
    if not len(at):
        return None
    totals[tuple(at[int(rng.integers(len(at)))])] += int(rng.choice([-1, 1, 2]))
    return replace(program, **{name: totals})


def shift_region(program: Program, rng: Rng) -> Program | None:
    """Increase or decrease one operand by 1, 2 or 4."""

    def operands(records: np.ndarray) -> np.ndarray:
        mask = np.zeros(records.shape, dtype=bool)
        for row, words in enumerate(records):
            count = len(program.forward.by_number[int(words[0])].operands)
            mask[row, record.OPERAND_WORD : record.OPERAND_WORD + count] = True
        return mask

    return _moved_by(program, _pick(program, rng, operands), int(rng.choice([-4, -2, -1, 1, 2, 4])))


def _moved_by(program: Program, place: Place | None, amount: int) -> Program | None:
    return place and edit(program, *place[:3], place[3] + amount)


def shrink_buffer(program: Program, rng: Rng) -> Program | None:
    """Reduce one of the sizes in `program.dims`, so that the instructions were compiled for a larger size."""
    name = str(rng.choice(["tokens", "logit_rows", "hidden", "ffn", "vocab", "heads", "head_dim", "row_block"]))
    old = program.dims.flat[name]
    new = old - int(rng.integers(1, max(2, old // 2 + 1)))
    if new < 1 or (name == "heads" and new % program.dims.model.kv_heads):
        return None
    return replace(program, dims=program.dims.changed(**{name: new}))


def _streams(program: Program, rng: Rng, least: int) -> tuple[str, int, int] | None:
    """Choose at random a stream or a queue with at least `least` records. Returns its name in PARTS, and the indices of
    its first record and of the record after its last."""
    found = []
    for name in PARTS:
        offsets = getattr(program, name).offsets.tolist()
        found += [(name, a, b) for a, b in itertools.pairwise(offsets) if b - a >= least]
    return found[int(rng.integers(len(found)))] if found else None


def _reordered(order_of: Callable[[int, Rng], np.ndarray]) -> Mutation:
    def mutate(program: Program, rng: Rng) -> Program | None:
        found = _streams(program, rng, 2)
        if found is None:
            return None
        name, first, end = found
        order = order_of(end - first, rng)

        def change(records: np.ndarray) -> None:
            records[first:end] = records[first:end][order]

        return None if (order == np.arange(end - first)).all() else _edited(program, name, change)

    return mutate


def _swapped(n: int, rng: Rng) -> np.ndarray:
    order = np.arange(n)
    a, b = rng.choice(n, 2, replace=False)
    order[[a, b]] = order[[b, a]]
    return order


def _mixed(n: int, rng: Rng) -> np.ndarray:
    how = int(rng.integers(3))
    order = np.arange(n)[::-1] if how == 0 else np.roll(np.arange(n), int(rng.integers(1, n)))
    return rng.permutation(n) if how == 2 else order


def _moved(copies: int, elsewhere: bool) -> Mutation:
    """Return a mutation that moves an instruction to another stream if `elsewhere` is set. Otherwise it removes the
    instruction (`copies` is 0) or duplicates it (`copies` is 2)."""

    def mutate(program: Program, rng: Rng) -> Program | None:
        found = _streams(program, rng, 1)
        if found is None:
            return None
        name, first, end = found
        segment: Segment = getattr(program, name)
        count = len(segment.offsets) - 1
        streams = [segment.stream(i) for i in range(count)]
        at = int(np.searchsorted(segment.offsets, first, side="right")) - 1
        row = int(rng.integers(end - first))
        one = streams[at][row : row + 1]
        if elsewhere and count < 2:
            return None
        to = (at + int(rng.integers(1, count))) % count if elsewhere else at
        if elsewhere or not copies:
            streams[at] = np.delete(streams[at], row, axis=0)
        place = int(rng.integers(len(streams[to]) + 1)) if elsewhere else row
        if copies:
            streams[to] = np.insert(streams[to], place, one, axis=0)
        return replace(program, **{name: handmade.segment(*streams)})

    return mutate


def change_drain(program: Program, rng: Rng) -> Program | None:
    """Change from which queue a drain instruction claims records, or how many must be claimed before it ends."""

    def wanted(records: np.ndarray) -> np.ndarray:
        mask = np.zeros(records.shape, dtype=bool)
        mask[:, record.OPERAND_WORD : record.OPERAND_WORD + 2] = (records[:, 0] == DRAIN.number)[:, None]
        return mask

    return _moved_by(program, _pick(program, rng, wanted), int(rng.choice([-2, -1, 1, 2])))


def change_phase(program: Program, rng: Rng) -> Program | None:
    """Change the phase number of an instruction, and leave its operands, waits and signals as they are."""
    found = _pick(program, rng, lambda records: np.ones((len(records), 1), dtype=bool))
    if found is None:
        return None
    others = [n for n in program.forward.by_number if n != found[3]]
    return edit(program, *found[:3], int(rng.choice(others)))


def with_phases(program: Program, segments: list[list[Phase]]) -> Program:
    """Return the program with the phases of `segments` instead of its own. A phase in `segments` takes over the
    instructions of the phase in `program` that has the same number. Instructions of a phase that is no longer present
    become joins, which only wait and signal."""
    forward = Forward.of(*map(tuple, segments))
    number = np.full(256, JOIN.number, dtype=np.int32)
    number[[p.number for p in CONTROL]] = [p.number for p in CONTROL]
    number[[p.number for segment in segments for p in segment]] = [p.number for p in forward.phases]
    parts = {}
    for name in PARTS:
        segment: Segment = getattr(program, name)
        records = segment.records.copy()
        records[:, 0] = number[records[:, 0]]
        lost = (records[:, 0] == JOIN.number) & (segment.records[:, 0] != JOIN.number)
        records[lost, record.OPERAND_WORD : record.WAIT_WORD] = 0
        words = records[lost, record.WAIT_WORD :]
        records[lost, record.WAIT_WORD :] = np.where(words & record.INDEXED, 0, words)
        parts[name] = Segment(records, segment.offsets)
    return replace(program, forward=forward, **parts)


def change_buffer(program: Program, rng: Rng) -> Program | None:
    """Replace a buffer that a phase names by None or by the buffer that another phase names in the same field."""
    field = str(rng.choice(["weights", "inputs", "output", "bias", "norm"]))
    phases = program.forward.phases
    changed = phases[int(rng.integers(len(phases)))]
    others = [getattr(p, field) for p in phases if getattr(p, field) is not getattr(changed, field)]
    if not others:
        return None
    new = replace(changed, **{field: others[int(rng.integers(len(others)))]})
    return with_phases(program, [[new if p is changed else p for p in s] for s in program.forward.segments])


def lose_phase(program: Program, rng: Rng) -> Program:
    lost = program.forward.phases[int(rng.integers(len(program.forward.phases)))]
    return with_phases(program, [[p for p in s if p is not lost] for s in program.forward.segments])


def swap_phases(program: Program, rng: Rng) -> Program:
    segments = [list(segment) for segment in program.forward.segments]
    segment = segments[int(rng.integers(len(segments)))]
    a, b = rng.choice(len(segment), 2, replace=False)
    segment[a], segment[b] = segment[b], segment[a]
    return with_phases(program, segments)


KINDS: dict[str, Mutation] = {
    "drop a wait": _of_word(_WAIT, drop),
    "weaken a wait": _of_word(_WAIT, weaken_wait),
    "retarget a wait": _of_word(_WAIT, retarget),
    "duplicate a wait": _of_word(_WAIT, duplicate),
    "flip a wait's INDEXED": _of_word(_WAIT, _flip(record.INDEXED)),
    "drop a signal": _of_word(_SIGNAL, drop),
    "weaken a signal": _of_word(_SIGNAL, weaken_signal),
    "retarget a signal": _of_word(_SIGNAL, retarget),
    "duplicate a signal": _of_word(_SIGNAL, duplicate),
    "flip a signal's NEXT": _of_word(_SIGNAL, _flip(record.NEXT)),
    "change an owner": _of_word(_SIGNAL, change_owner),
    "change a total": change_total,
    "shift a region": shift_region,
    "shrink a buffer": shrink_buffer,
    "swap two instructions": _reordered(_swapped),
    "reorder a segment": _reordered(_mixed),
    "lose an instruction": _moved(0, False),
    "double an instruction": _moved(2, False),
    "move an instruction": _moved(1, True),
    "change a drain": change_drain,
    "change an instruction's phase": change_phase,
    "change a phase's buffer": change_buffer,
    "lose a phase": lose_phase,
    "swap two phases": swap_phases,
}
