"""Decides compiler options whose value is `auto`: how ranks share the work of a step, and where norms are computed.
Then cuts the step into tile tasks. The cost model predicts how long a layer takes, which is faster than a simulation.
`tune` may have decided the same options before, by simulation."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from megakernel.errors import MegakernelError
from megakernel.isa import Dims, Forward, Phase
from megakernel.model.families import forward
from megakernel.scheduler import passes
from megakernel.scheduler.cost import balanced_rows, panel_blocks, phase_seconds
from megakernel.scheduler.lower import lower
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import LAST_NORM_LAG
from megakernel.scheduler.search import Change, products, search
from megakernel.scheduler.spec import Spec
from megakernel.scheduler.tasks import PhaseTasks, Stages, Tasks
from megakernel.targets.pages import norm_rows


def lowered(spec: Spec, stages: Stages | None = None) -> Tasks:
    """Return the tile tasks of a step, computed in the way that the cost model predicts to be fastest. `stages` keeps
    intermediate results for later calls with other options. Raises MegakernelError for sizes out of range."""
    spec.check()
    stages = stages or Stages()
    return Candidate(_settled(spec, stages), stages).tasks


@dataclass(frozen=True)
class Candidate:
    """One way to compute a step: in `spec.options`, all options that affect its tasks are decided, so none is `auto`.
    `stages` caches the tile tasks into which phases (operations) are cut, because cutting takes time."""

    spec: Spec
    stages: Stages

    @property
    def dims(self) -> Dims:
        return self.spec.dims

    @cached_property
    def forward(self) -> Forward:
        config, norm = self.spec.config, self.spec.options.norm
        model = self.stages.once(config, lambda: forward(config))
        return passes.apply(model, self.dims.split, norm, self.spec.weight_bits)

    @property
    def _blocks(self) -> int:
        return panel_blocks(self.dims, self.spec.tiled, self.spec.options.panel)

    def _lower(self, phases: tuple[Phase, ...], rank: int) -> list[PhaseTasks]:
        d, machine, panel = self.dims.ranks[rank], self.spec.tiled, self.spec.options.panel
        return self.stages.once((phases, d, self._blocks), lambda: lower(phases, d, machine, panel))

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
                d, number = self.dims.ranks[rank], tasks.phase.number
                predicted = phase_seconds(tasks.phase, tasks.columns, d, self.spec.tiled)
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
        return Tasks(self.dims, self.forward, self.spec.tiled, (prologue, body, epilogue))


def _settled(spec: Spec, stages: Stages) -> Spec:
    """Return `spec` with the options matmul, o, residual and norm decided.

    Sharding and replicating the O projection give different bits, so all programs of an engine must make the same
    choice, whatever their number of rows. The choice is therefore made for one fixed number of rows: the number for
    which the arithmetic of a matmul takes as long as reading its weights."""
    open_ = [name for name in ("o", "residual") if spec.tp > 1 and getattr(spec.options, name) == "auto"]
    wanted, spec = spec.options.norm, spec.choosing(matmul=spec.matmul, norm="own")
    if "o" in open_:
        rows = max(1, math.ceil(balanced_rows(spec.dims, spec.tiled)))
        typical = _fastest(replace(spec, tokens=rows, logit_rows=1), products(*open_), stages)
        spec = spec.choosing(o=typical.options.o)
    if "residual" in open_:
        spec = _fastest(spec, products("residual"), stages)
    return _normed(spec, wanted, stages)


def _fastest(spec: Spec, changes: list[Change], stages: Stages) -> Spec:
    """Return `spec`, with that one of `changes` made to its options which the cost model predicts to be fastest."""

    def predict(options: Options, _: float) -> float:
        return Candidate(replace(spec, options=options), stages).layer_seconds

    first, *others = changes
    return replace(spec, options=search(replace(spec.options, **first), [others], predict))


def _normed(own: Spec, wanted: str, stages: Stages) -> Spec:
    """Return the spec `own`, whose norm option is "own", with the norm option `wanted`. "auto" is decided here. If only
    one rank stores a row of the residual, this rank normalises the row and sends the result to all ranks. With
    enough row blocks, "next" is chosen, so that this overlaps the previous layer's last matmul. If every rank stores
    all rows, a matmul with few rows may normalise its inputs itself ("inside")."""
    dims = own.dims
    sends = dims.split.tp > 1 and not dims.split.replicated_residual
    rows = min(dims.bucket.row_block, dims.bucket.tokens)
    inside = not sends and rows <= norm_rows(dims.model.hidden, dims)
    if wanted == "inside" and not inside:
        raise MegakernelError(
            "cannot compile norms into matmuls: norm = 'inside' needs "
            + ("residual = 'replicated'" if sends else f"matmul units that can normalise {rows} rows")
        )
    if wanted != "auto":
        return own.choosing(norm=wanted)
    if sends and dims.bucket.row_blocks >= LAST_NORM_LAG * panel_blocks(dims, own.tiled, own.options.panel):
        return own.choosing(norm="next")
    return _fastest(own, [{"norm": "inside"}, {"norm": "own"}], stages) if inside else own
