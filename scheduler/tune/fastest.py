"""Chooses the compiler's default options: for every option that the caller leaves open, the value with which the
simulated step is fastest.

The cost model adds up the times of phases (operations) as if they ran one after another. Unlike the simulator, it
cannot predict what a queue gains, or which exchanges between ranks take no time because other work runs meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megakernel.errors import MegakernelError
from megakernel.isa import Dims, StepTable, ceil_div
from megakernel.machine import CPU, Machine
from megakernel.program import Program
from megakernel.runtime import even_step
from megakernel.scheduler import Spec, compile_program
from megakernel.scheduler.describe import lowering
from megakernel.scheduler.options import CHOICES, Options
from megakernel.scheduler.search import Change, products, search
from megakernel.scheduler.simulate.run import extrapolated_seconds
from megakernel.scheduler.tasks import Stages

# The simulated program computes logits of at most this many rows, because in an engine most rows need none.
_LOGIT_ROWS = 64
# Dot products on CUDA cores are tried if a step's rows fit into this many of their tiles: with more, they are slow.
_DOT_TILES = 4
# With more rows than this, ranks that replicate the residual would repeat too much of each other's work.
_REPLICATED_ROWS = 1024
# A panel is a group of row blocks (tiles of rows) that share one pass over the weights. With at most this many row
# blocks, a single panel is tried too, because ranks exchange a whole panel at once and then use all links.
_ONE_PANEL = 16
# The panel sizes to try, in this order, because long inputs of larger panels leave the L2 cache too early. The first
# with which a step is predicted to be less than 0.5 % slower replaces the cost model's, to read weights less often.
_PANELS, _CLOSE = (8, 16, 32), 1.005
_CONTEXT = 128  # tokens of each sequence in the KV cache at the end of the simulated step


class Prediction(NamedTuple):
    """The predicted seconds of a step. Infinity means that they are at least `most_s`."""

    seconds: float
    most_s: float

    def answers(self, most_s: float) -> bool:
        """Whether this prediction says how long the step takes, or at least that it takes `most_s` seconds or more."""
        return self.seconds < math.inf or most_s <= self.most_s


Predictions = dict[Options | bytes, Prediction]


class Fastest:
    """Compiles the programs of one engine, which differ in their maximum step size. All other arguments of
    `compile_program` are fixed.

    If `options.queue` is auto, the simulator chooses the queue, interleaving and all other options that are auto, once
    for each number of tokens. Programs for a CPU use the cost model's choices instead: a CPU gains nothing from a
    queue, because a CPU thread runs the instructions of whichever worker is ready.

    All programs of an engine must share the O projection in the same way (sharded or replicated), which `one_class`
    ensures. They must also use the same matmul units, which the engine sets in `options`."""

    def __init__(self, spec: Spec, *, one_class: bool = False) -> None:
        self.spec, self._chosen, self._stages = spec, dict[int, Options](), Stages()
        if one_class and spec.tp > 1 and spec.options.o == "auto":
            program = self.compile(spec.options, 1, 1)  # the choice for `o` does not depend on the size
            self.spec = spec.choosing(o=lowering(program.dims, program.forward)["o"])

    def __call__(self, *, tokens: int, logit_rows: int) -> Program:
        program = self.compile(self.options(tokens), tokens, logit_rows)
        self._stages = Stages()
        return program

    def compile(self, options: Options, tokens: int, logit_rows: int) -> Program:
        spec = replace(self.spec, options=options, tokens=tokens, logit_rows=logit_rows)
        return compile_program(spec, self._stages)

    def seconds(self, options: Options, tokens: int, known: Predictions, most_s: float = math.inf) -> float:
        """Return the predicted seconds of a step, or infinity if these options cannot be combined. The result may also
        be infinity if a step takes at least `most_s` seconds. `known` caches predictions by options and by the
        program's digest, because different options may give the same program."""
        found = known.get(options)
        if found is None or not found.answers(most_s):
            try:
                program = self.compile(options, tokens, min(tokens, _LOGIT_ROWS))
            except MegakernelError:  # rows do not fit in shared memory, but norms inside matmuls need that
                known[options] = Prediction(math.inf, math.inf)
                return math.inf
            found = known.get(digest := program.digest)
            if found is None or not found.answers(most_s):
                found = Prediction(predicted_seconds(program, self.spec.machine, most_s), most_s)
            known[options] = known[digest] = found
        return found.seconds

    def options(self, tokens: int) -> Options:
        if self.spec.options.queue != "auto" or self.spec.machine.tiles.target == CPU:
            return self.spec.options
        if tokens not in self._chosen:
            spec, known = replace(self.spec, tokens=tokens), Predictions()
            start = replace(spec.options, matmul=spec.matmul, queue="body")
            # Search once with a sharded and once with a replicated O projection, which may need other options.
            starts = [replace(start, **o) for o in products("o")] if spec.tp > 1 and start.o == "auto" else [start]

            def predict(options: Options, most_s: float = math.inf) -> float:
                return self.seconds(options, tokens, known, most_s)

            best = min((search(each, self.open(tokens), predict) for each in starts), key=predict)
            sizes = (n for n in _PANELS if not best.panel and n * spec.machine.tiles.rows < tokens)
            panels, most_s = (replace(best, panel=size) for size in sizes), _CLOSE * predict(best)
            self._chosen[tokens] = next((each for each in panels if predict(each, most_s) < most_s), best)
        return self._chosen[tokens]

    def open(self, tokens: int) -> list[list[Change]]:
        """Return the choices that the search may make, each as a list of changes of options to try. Options that depend
        on each other form one choice."""
        open_ = {name for name in CHOICES if getattr(self.spec.options, name) == "auto"}
        open_ |= {"interleave"} if self.spec.options.interleave else set()
        if self.spec.tp == 1:
            open_ -= {"o", "residual"}
        if tokens > _REPLICATED_ROWS:
            open_ -= {"residual"}
        if ceil_div(tokens, self.spec.most_dot_rows) > _DOT_TILES:
            open_ -= {"matmul"}
        together = (["queue"], ["matmul"], ["residual"], ["norm", "interleave"], ["o"])
        choices = [products(*(name for name in names if name in open_)) for names in together]
        blocks = ceil_div(tokens, self.spec.machine.tiles.rows)
        if not self.spec.options.panel and 1 < blocks <= _ONE_PANEL:
            choices.append([{"panel": 0}, {"panel": blocks}])
        return [changes for changes in choices if len(changes) > 1]


def predicted_seconds(program: Program, machine: Machine, most_s: float = math.inf) -> float:
    """Return the predicted seconds of a typical step of `program`, or infinity if the simulation finds early that they
    are at least `most_s`."""
    return extrapolated_seconds(program, machine, usual_step(program.dims), most_s)


@lru_cache(maxsize=4)
def usual_step(dims: Dims) -> StepTable:
    """Return the inputs (step table) of a typical step, which has all rows of the program."""
    return even_step(dims, dims.bucket.tokens, min(_CONTEXT, dims.bucket.max_context))
