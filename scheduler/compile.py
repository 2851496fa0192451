"""Compiles a program for a model, a machine and a maximum step size: lists the phases (operations), cuts them into tile
tasks, lets tasks wait for each other by counters, assigns tasks to workers, and encodes them."""

from __future__ import annotations

from functools import partial

from megakernel.errors import MegakernelError
from megakernel.isa import record as rec
from megakernel.program import Program
from megakernel.scheduler.candidates import lowered
from megakernel.scheduler.cost import panel_blocks
from megakernel.scheduler.derive import derive
from megakernel.scheduler.encode import encode
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import place
from megakernel.scheduler.spec import Spec
from megakernel.scheduler.sync import synchronise
from megakernel.scheduler.tasks import Stages, Tasks

_RANKS, _RANKS_TEXT = (1, 2, 4, 8), "1, 2, 4 or 8"
_DEFAULT = Options()


def compile_program(spec: Spec, stages: Stages | None = None) -> Program:
    """Compile a program for `spec`. The result depends only on `spec`; `stages` keeps intermediate results for later
    calls with other options. The backend that launches the program must have the same limits, types and matmul units.
    So an engine decides `options.matmul` before it compiles its first program. Raises MegakernelError for values out of
    range."""
    if spec.tp not in _RANKS:
        raise MegakernelError(f"cannot compile for tensor parallel size {spec.tp}: it must be {_RANKS_TEXT}")
    if spec.config.layers > rec.MOST_LAYERS:
        raise MegakernelError(f"cannot compile {spec.config.layers} layers: a program holds at most {rec.MOST_LAYERS}")
    if spec.machine.tiles.col_unit % 2:
        raise MegakernelError(
            f"machine {spec.machine.name}: col_unit is {spec.machine.tiles.col_unit}, but must be even, so"
            " that no tile cuts a RoPE pair"
        )
    return build_program(lowered(spec, stages), spec.options, stages)


def build_program(tasks: Tasks, options: Options = _DEFAULT, stages: Stages | None = None) -> Program:
    """Turn tile tasks into a program: add counters for synchronisation, assign tasks to workers, and encode them."""
    stages = stages or Stages()
    sync = stages.once(("sync", tasks), lambda: synchronise(tasks, derive(tasks, stages)))
    blocks = panel_blocks(tasks.dims, tasks.machine, options.panel)
    placed = [
        stages.once(
            (tuple(segment), tasks.dims, blocks, options.interleave),
            partial(place, segment, tasks.dims, tasks.machine, options),
        )
        for segment in tasks.segments
    ]
    return encode(tasks, sync, placed, options.claimed)
