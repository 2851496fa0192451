"""Chooses how to compute a step on a machine: the sizes of matmul tiles, how ranks share the work, and whether norms
are computed in the same layer, in the previous one or inside matmuls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megakernel.errors import MegakernelError
from megakernel.isa import KV_BLOCK, Bucket, Buffer, Dims, Dtype, Forward, Phase, Split, Units, Worker, ceil_div
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.model.families import forward
from megakernel.scheduler import passes
from megakernel.scheduler.cost import balanced_rows, panel_blocks, phase_seconds
from megakernel.scheduler.lower import lower
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import LAST_NORM_LAG
from megakernel.scheduler.tasks import PhaseTasks, Stages, Tasks
from megakernel.targets import TARGETS, target_of
from megakernel.targets.pages import DOT_INPUT_PAGES

# How much attention work fits into the step table, the array with the inputs of one step. An attention item is a piece
# of the work: some rows and KV heads of a sequence, and a range of its KV cache. One instruction computes the items of
# one attention slot. The table has room for one item per row and _ITEMS_PER_SLOT more per slot, so that a step with few
# rows can divide each row's attention by KV head and by KV range. At most _SPLIT_ROWS rows may be divided by KV range
# at the same time, into at most _MAX_PARTIALS partial results.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# The maximum number of partial results on targets with `any_split`, where every attention slot may divide one row by KV
# range.
_MAX_SLOT_PARTIALS = 65536
# The step table has room for _BIAS_PER_ROW logit biases per row, and for at most _MAX_BIAS in total. The OpenAI API
# allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536
# The largest number of logit rows that may have a token mask. A mask has one bit per token of the vocabulary, so 256
# masks take 4 MB for a vocabulary of 128,000 tokens.
MOST_MASKS = 256
# With a queue, workers claim attention instructions at run time. There are this many instructions per worker, and a
# step's attention is divided equally among them where possible, so that a worker that finishes early can claim more.
_CLAIMS = 4
# The maximum number of row blocks (groups of token rows that share counters) of a program, over all ranks. This limit
# keeps compilation under a minute, and makes counter indices fit into an encoded instruction.
_MAX_BLOCKS = 4096
_DEFAULT = Options()


def with_matmul(options: Options, config: ModelConfig, machine: Machine, *, tp: int, tokens: int) -> Options:
    """Return `options` with `matmul` decided: whether matmuls run as dot products on CUDA cores or on matrix units. All
    programs of an engine must use the same units, because the units determine the bits of the results. With few rows,
    dot products read weights faster, but all rows of a tile must fit in shared memory. So `auto` chooses dot products
    if one tile can hold `tokens` rows, the rows of the engine's largest program."""
    units = TARGETS[machine.target].units
    if options.matmul != "auto" or len(units) == 1:
        return options
    chosen = next((u for u in units if tokens <= _tile_rows(config, machine, tp, u, options)), units[-1])
    return replace(options, matmul=chosen.name.lower())


def resolved(config: ModelConfig, machine: Machine, options: Options, *, tp: int, tokens: int) -> tuple[Machine, Units]:
    """Return `machine` with the tile sizes that `options` ask for, and the kind of matmul
    units. Tiles for dot products have fewer rows than tiles for matrix units, and widths that are multiples of another
    number."""
    target = TARGETS[machine.target]
    units = target.chosen(with_matmul(options, config, machine, tp=tp, tokens=tokens).matmul)
    rows = min(machine.tile_rows, _tile_rows(config, machine, tp, units, options))
    if rows < 1:
        raise MegakernelError(
            f"cannot compile matmuls as dot products: the inputs of one token take more than {DOT_INPUT_PAGES} "
            "pages of shared memory; use --matmul tensor"
        )
    unit = target.col_unit[units] or machine.col_unit
    return replace(machine, tile_rows=rows, col_unit=unit), units


def _tile_rows(config: ModelConfig, machine: Machine, tp: int, units: Units, options: Options) -> int:
    """Return the largest number of rows that fits every matmul tile of a rank, whether the O projection is sharded or
    replicated."""
    split = Split(config.sizes(Dtype.BF16), tp, replicated_o=1, expert_parallel=int(options.expert_parallel))
    return TARGETS[machine.target].tile_rows(units, max(config.hidden, split.o_cols, split.rank_ffn))


def most_dot_rows(config: ModelConfig, machine: Machine, tp: int, options: Options) -> int:
    """Return the largest number of rows of a matmul tile that is computed with dot products on CUDA cores."""
    return max(1, min(machine.tile_rows, _tile_rows(config, machine, tp, TARGETS[machine.target].units[0], options)))


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
    stages: Stages | None = None,
) -> Tasks:
    """Return the tile tasks of a step. `options` may leave choices open; the combination that the cost model predicts
    to be fastest is used. The arguments are those of `compile_program`. All combinations accept the same steps, because
    the limits on attention, logit biases and masks depend only on the sizes and on the number of workers."""
    machine, units = resolved(config, machine, options, tp=tp, tokens=tokens)
    most = _MAX_BLOCKS // tp * machine.tile_rows
    for name, value in (("tokens", tokens), ("logit_rows", logit_rows)):
        if value > most:
            raise MegakernelError(
                f"cannot compile a program for {value} {name} on machine {machine.name}: the limit is {most}"
            )
    kv_blocks = ceil_div(max_context, KV_BLOCK)
    slots = machine.workers * (_CLAIMS if options.claimed else 1)
    any_split = TARGETS[machine.target].any_split
    split_rows, partials = (slots, _MAX_SLOT_PARTIALS) if any_split else (_SPLIT_ROWS, _MAX_PARTIALS)
    sizes = config.sizes(dtype, quantised_kv=quantised_kv, q8_activations=q8_activations)
    split = Split(sizes, tp, expert_parallel=int(options.expert_parallel))
    if options.expert_parallel and not split.equal_experts:
        raise MegakernelError(
            f"cannot divide {config.experts} experts equally among {tp} ranks: leave out --enable-expert-parallel"
        )
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
    dims = Dims(split, bucket, Worker(int(units), machine.ring_pages))
    one = Candidate(forward(config), weight_bits, dims, machine, options, stages or Stages())
    return _normed(_shared(one)).tasks


@dataclass(frozen=True)
class Candidate:
    """One way to compute a step of `model`, the forward pass as a single device would run it. `stages` keeps the tile
    tasks into which phases are cut, because cutting takes time."""

    model: Forward
    weight_bits: Mapping[Buffer, float] | None
    dims: Dims
    machine: Machine
    options: Options
    stages: Stages
    norm: str = "own"

    @cached_property
    def forward(self) -> Forward:
        return passes.apply(self.model, self.dims.split, self.norm, self.weight_bits)

    @property
    def _blocks(self) -> int:
        return panel_blocks(self.dims, self.machine, self.options.panel)

    def _lower(self, phases: tuple[Phase, ...], rank: int) -> list[PhaseTasks]:
        d = self.dims.on(rank)
        return self.stages.once((phases, d, self._blocks), lambda: lower(phases, d, self.machine, self.options.panel))

    @property
    def layer_seconds(self) -> float:
        """The predicted seconds of a layer whose phases (operations such as the QKV projection) run one after another.
        Only the slower of ranks 0 and 1 counts for each phase. These two ranks suffice: no shard is larger than rank
        0's, and if only rank 0 owns rows, all other ranks send to rank 0 as rank 1 does. The amount of attention
        depends on the step, so only attention's stores to other ranks are counted."""
        return self.stages.once(("seconds", self.forward, self.dims, self._blocks), self._layer_seconds)

    def _layer_seconds(self) -> float:
        slowest: dict[int, float] = {}
        for rank in range(min(self.dims.split.tp, 2)):
            for tasks in self._lower(self.forward.body, rank):
                d, number = self.dims.on(rank), tasks.phase.number
                predicted = phase_seconds(tasks.phase, tasks.columns, d, self.machine)
                slowest[number] = max(slowest.get(number, 0.0), predicted)
        return sum(slowest.values())

    @property
    def tasks(self) -> Tasks:
        return self.stages.once((self.forward, self.dims, self._blocks), self._cut)

    def _cut(self) -> Tasks:
        ranks = range(self.dims.split.tp)
        prologue, body, epilogue = (
            sorted(
                itertools.chain(*(self._lower(phases, rank) for rank in ranks)), key=lambda tasks: tasks.phase.number
            )
            for phases in self.forward.segments
        )
        return Tasks(self.dims, self.forward, self.machine, (prologue, body, epilogue))


def _best(candidates: list[Candidate]) -> Candidate:
    return candidates[0] if len(candidates) == 1 else min(candidates, key=lambda each: each.layer_seconds)


def _shared(one: Candidate) -> Candidate:
    """Return the candidate with the fastest way to share the O projection and the residual among ranks. Sharding and
    replicating the O projection give different bits, so all programs of an engine must make the same choice, whatever
    their number of rows. The choice is therefore made for one fixed number of rows: the number for which the arithmetic
    of a matmul takes as long as reading its weights."""
    dims, machine, options = one.dims, one.machine, one.options
    replicated_o = {"sharded": [0], "replicated": [1], "auto": [0, 1]}[options.o] if dims.split.tp > 1 else [0]
    residual = {"dealt": [0], "replicated": [1], "auto": [0, 1]}[options.residual] if dims.split.tp > 1 else [0]
    if len(replicated_o) > 1:
        typical = dims.changed(tokens=max(1, math.ceil(balanced_rows(dims, machine))), logit_rows=1)
        tried = [replace(one, dims=_divided(typical, machine, o, r)) for o in replicated_o for r in residual]
        replicated_o = [_best(tried).dims.split.replicated_o]
    return _best([replace(one, dims=_divided(dims, machine, replicated_o[0], r)) for r in residual])


def _divided(dims: Dims, machine: Machine, replicated_o: int, replicated_residual: int) -> Dims:
    """Return the sizes `dims` with the O projection and the residual either replicated (1) or divided among ranks (0).
    With a divided residual, row blocks (groups of rows) are so short that each rank owns at least one, if there are
    enough rows. The length of a row block is rounded up to a multiple of the rows that the target stores at once, so
    that no store extends into the next block."""
    rows = dims.bucket.tokens if replicated_residual else ceil_div(dims.bucket.tokens, dims.split.tp)
    unit = target_of(dims).row_unit[Units(dims.worker.units)]
    block = min(machine.tile_rows, ceil_div(rows, unit) * unit, dims.bucket.tokens)
    return dims.changed(row_block=block, replicated_o=replicated_o, replicated_residual=replicated_residual)


def _normed(own: Candidate) -> Candidate:
    """Return `own`, which computes norms where the model has them, or a faster candidate. If each row of the residual
    is stored on one rank only, this rank normalises the row and sends the result to all ranks. With enough row blocks,
    the attention norm then runs at the end of the previous layer, where it overlaps that layer's last matmul. If every
    rank stores all rows, a matmul with few rows may normalise its own inputs."""
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
