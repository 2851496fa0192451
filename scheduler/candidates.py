"""Chooses how to compute a step on a machine: its tiles, how ranks share the work, and where norms are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megakernel.errors import MegakernelError
from megakernel.isa import KV_BLOCK, Bucket, Buffer, Dims, Dtype, Forward, Phase, Split, Units, Worker, ceil_div
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.model.families import forward
from megakernel.runtime.cuda.pages import DOT_INPUT_PAGES
from megakernel.runtime.targets import TARGETS, target_of
from megakernel.scheduler import passes
from megakernel.scheduler.cost import balanced_rows, panel_blocks, phase_seconds
from megakernel.scheduler.lower import lower
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import LAST_NORM_LAG
from megakernel.scheduler.tasks import PhaseTasks, Tasks

# Limits of attention in the step table. An item is a part of the work, and the items of one instruction form a slot.
# The table can hold one item per row and _ITEMS_PER_SLOT more per slot, so that a step with few rows can divide each
# row's attention by KV head and KV block. At most _SPLIT_ROWS rows with long contexts may be split by KV block at the
# same time, into at most _MAX_PARTIALS partial results.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# The limit of partial results on targets with `any_split`, where as many rows as there are slots may be split.
_MAX_SLOT_PARTIALS = 65536
# The table has room for _BIAS_PER_ROW logit-bias pairs per row, and for at most _MAX_BIAS in total. The OpenAI API
# allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536
# The largest number of logit rows that may have a token mask. A mask has one bit per token of the vocabulary, so 256
# masks take 4 MB for a vocabulary of 128,000 tokens.
MOST_MASKS = 256
# If workers claim attention from a queue, the number of attention instructions per worker, among which the attention of
# a step is divided equally where possible.
_CLAIMS = 4
# The maximum number of row blocks of all ranks of a program. It keeps the time to compile under a minute, and counter
# numbers small enough for a record.
_MAX_BLOCKS = 4096
_DEFAULT = Options()


def with_matmul(options: Options, config: ModelConfig, machine: Machine, *, tp: int, tokens: int) -> Options:
    """Return `options` with `matmul` decided, for an engine whose largest bucket has `tokens` rows. All programs of an
    engine must use the same matmul units, because the units determine the bits of the results. With few rows, dot
    products read weights faster than matrix units do, but dot products must hold all rows of a tile in shared memory.
    So `auto` chooses dot products if one tile holds the whole bucket."""
    units = TARGETS[machine.target].units
    if options.matmul != "auto" or len(units) == 1:
        return options
    chosen = next((u for u in units if tokens <= _tile_rows(config, machine, tp, u)), units[-1])
    return replace(options, matmul=chosen.name.lower())


def resolved(config: ModelConfig, machine: Machine, options: Options, *, tp: int, tokens: int) -> tuple[Machine, Units]:
    """Return the machine as the scheduler sees it, and its matmul units. With `options.pairs`, a worker is two SMs, so
    there are half as many, and tiles may have twice the rows. Tiles of dot products have few rows, and their widths are
    multiples of a different column unit."""
    target = TARGETS[machine.target]
    units = target.chosen(with_matmul(options, config, machine, tp=tp, tokens=tokens).matmul)
    sms = 2 if options.pairs == "on" else 1
    if sms > 1 and units is not Units.TENSOR:
        raise MegakernelError(
            "cannot compile for pairs of SMs: only programs for the matrix units of a GPU can use them"
        )
    if sms > 1 and config.experts:
        raise MegakernelError("cannot compile for pairs of SMs: they do not compute experts")
    if machine.workers % sms:
        raise MegakernelError(f"cannot compile for pairs of SMs: {machine.workers} is an odd number of workers")
    rows = min(sms * machine.tile_rows, _tile_rows(config, machine, tp, units))
    if rows < 1:
        raise MegakernelError(
            f"cannot compile matmuls as dot products: a row of this model takes more than {DOT_INPUT_PAGES} "
            "pages of shared memory; use --matmul tensor"
        )
    unit = target.col_unit[units] or machine.col_unit
    return replace(machine, workers=machine.workers // sms, tile_rows=rows, col_unit=unit), units


def _tile_rows(config: ModelConfig, machine: Machine, tp: int, units: Units) -> int:
    """Return the largest number of rows that every matmul tile of a rank can have, with the O projection either sharded
    or replicated."""
    split = Split(config.sizes(Dtype.BF16), tp, replicated_o=1)
    return TARGETS[machine.target].tile_rows(units, max(config.hidden, split.o_cols, split.rank_ffn))


def most_dot_rows(config: ModelConfig, machine: Machine, tp: int) -> int:
    """Return the largest number of rows of a tile that is computed with dot products."""
    return max(1, min(machine.tile_rows, _tile_rows(config, machine, tp, TARGETS[machine.target].units[0])))


def fastest(
    config: ModelConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
    tp: int = 1,
    options: Options = _DEFAULT,
    weight_bits: Mapping[Buffer, float] | None = None,
    quantised_kv: bool = False,
    q8_activations: bool = False,
) -> Tasks:
    """Return the tasks of the candidate that is predicted to be fastest, among those that `options` leaves open. The
    arguments are those of `compile_program`. The capacity of the step table depends only on the bucket and the number
    of workers."""
    machine, units = resolved(config, machine, options, tp=tp, tokens=tokens)
    most = _MAX_BLOCKS // tp * machine.tile_rows
    for name, value in (("tokens", tokens), ("logit_rows", logit_rows)):
        if value > most:
            raise MegakernelError(f"cannot compile {value} {name} for machine {machine.name}: the limit is {most}")
    kv_blocks = ceil_div(max_context, KV_BLOCK)
    slots = machine.workers * (_CLAIMS if options.claimed else 1)
    any_split = TARGETS[machine.target].any_split
    split_rows, partials = (slots, _MAX_SLOT_PARTIALS) if any_split else (_SPLIT_ROWS, _MAX_PARTIALS)
    split = Split(config.sizes(dtype, quantised_kv=quantised_kv, q8_activations=q8_activations), tp)
    bucket = Bucket(
        kv_block=KV_BLOCK,
        kv_page=machine.kv_page,
        row_block=1,  # `_shared` decides it
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
        items=tokens + _ITEMS_PER_SLOT * slots,
        attention_slots=slots,
        partials=min(config.kv_heads * kv_blocks * min(tokens, split_rows), partials),
        bias_entries=min(_BIAS_PER_ROW * logit_rows, _MAX_BIAS),
        mask_rows=min(logit_rows, MOST_MASKS),
    )
    dims = Dims(split, bucket, Worker(int(units), machine.ring_pages, 2 if options.pairs == "on" else 1))
    one = Candidate(forward(config), weight_bits, dims, machine, options)
    return _normed(_shared(one)).tasks()


@dataclass(frozen=True)
class Candidate:
    """One way to compute a step of `model`, which is the forward pass of one device. A rank's layer is lowered when it
    is first needed, and only once."""

    model: Forward
    weight_bits: Mapping[Buffer, float] | None
    dims: Dims
    machine: Machine
    options: Options
    norm: str = "own"
    _layers: dict[int, list[PhaseTasks]] = field(init=False, default_factory=dict)

    @cached_property
    def forward(self) -> Forward:
        return passes.apply(self.model, self.dims.split, self.norm, self.weight_bits)

    def _lower(self, phases: Iterable[Phase], rank: int) -> list[PhaseTasks]:
        return lower(phases, self.dims.on(rank), self.machine, self.options.panel)

    def _layer(self, rank: int) -> list[PhaseTasks]:
        if rank not in self._layers:
            self._layers[rank] = self._lower(self.forward.body, rank)
        return self._layers[rank]

    @cached_property
    def layer_seconds(self) -> float:
        """The predicted seconds of a layer whose phases run one after another. For attention, only its stores to other
        ranks are counted. A phase lasts as long as it does on the slower of ranks 0 and 1. These two ranks suffice: no
        shard is larger than rank 0's, and if only rank 0 owns rows, all other ranks send to rank 0 as rank 1 does."""
        slowest: dict[int, float] = {}
        for rank in range(min(self.dims.split.tp, 2)):
            for tasks in self._layer(rank):
                d, number = self.dims.on(rank), tasks.phase.number
                predicted = phase_seconds(tasks.phase, tasks.columns, d, self.machine)
                slowest[number] = max(slowest.get(number, 0.0), predicted)
        return sum(slowest.values())

    def tasks(self) -> Tasks:
        ranks = range(self.dims.split.tp)

        def of_ranks(layers: Iterable[list[PhaseTasks]]) -> list[PhaseTasks]:
            return sorted(itertools.chain(*layers), key=lambda tasks: tasks.phase.number)

        prologue, epilogue = (
            of_ranks(self._lower(phases, rank) for rank in ranks)
            for phases in (self.forward.prologue, self.forward.epilogue)
        )
        return Tasks(self.dims, self.forward, self.machine, (prologue, of_ranks(map(self._layer, ranks)), epilogue))


def _best(candidates: list[Candidate]) -> Candidate:
    return candidates[0] if len(candidates) == 1 else min(candidates, key=lambda each: each.layer_seconds)


def _shared(one: Candidate) -> Candidate:
    """Return the candidate with the fastest way to share the O projection and the residual among ranks. Whether the O
    projection is sharded or replicated must not depend on the bucket, because it determines the bits of the results.
    This choice is therefore made for the number of rows at which the machine's arithmetic takes as long as reading the
    weights."""
    dims, machine, options = one.dims, one.machine, one.options
    replicated_o = {"sharded": [0], "replicated": [1], "auto": [0, 1]}[options.o] if dims.split.tp > 1 else [0]
    residual = {"dealt": [0], "replicated": [1], "auto": [0, 1]}[options.residual] if dims.split.tp > 1 else [0]
    if len(replicated_o) > 1:
        typical = dims.changed(tokens=max(1, math.ceil(balanced_rows(dims, machine))), logit_rows=1)
        tried = [replace(one, dims=_divided(typical, machine, o, r)) for o in replicated_o for r in residual]
        replicated_o = [_best(tried).dims.split.replicated_o]
    return _best([replace(one, dims=_divided(dims, machine, replicated_o[0], r)) for r in residual])


def _divided(dims: Dims, machine: Machine, replicated_o: int, replicated_residual: int) -> Dims:
    """Return `dims` with the O projection and the residual either replicated (1) or divided among ranks (0). If the
    rows of the residual are divided, row blocks are so short that each rank owns one, provided that there are enough
    rows. Their length is rounded up to a multiple of the number of rows that the target stores at once, so that no
    store extends into the next block."""
    rows = dims.bucket.tokens if replicated_residual else ceil_div(dims.bucket.tokens, dims.split.tp)
    unit = target_of(dims).row_unit[Units(dims.worker.units)]
    block = min(machine.tile_rows, ceil_div(rows, unit) * unit, dims.bucket.tokens)
    return dims.changed(row_block=block, replicated_o=replicated_o, replicated_residual=replicated_residual)


def _normed(own: Candidate) -> Candidate:
    """Return `own`, or the candidate that computes the norms of a layer elsewhere if that is faster. If rows of the
    residual have owners, a norm sends its rows to all ranks. It then runs during the last stage of the previous layer,
    provided that there are enough row blocks to overlap the norm with that stage. If every rank has all rows, a matmul
    with few rows may normalise its inputs itself."""
    dims, options = own.dims, own.options
    sends = dims.split.tp > 1 and not dims.split.replicated_residual
    inside = not sends and target_of(dims).norm_fits(
        min(dims.bucket.row_block, dims.bucket.tokens), dims.model.hidden, dims
    )
    if options.norm == "inside" and not inside:
        raise MegakernelError(
            "cannot compile norms into matmuls (norm = 'inside'): "
            + ("rows of the residual have owners" if sends else "the matmul units cannot normalise so many rows")
        )
    if options.norm == "own":
        return own
    if options.norm != "auto":
        return replace(own, norm=options.norm)
    if sends and dims.bucket.row_blocks >= LAST_NORM_LAG * panel_blocks(dims, own.machine, options.panel):
        return replace(own, norm="next")
    return _best([replace(own, norm="inside"), own]) if inside else own
