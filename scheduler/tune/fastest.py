"""Chooses the compiler's default options: for every option that the caller leaves open, the value with which the
simulated step is fastest.

The cost model adds up the times of phases (operations) as if they ran one after another. So it cannot predict what a
queue gains, or which exchanges between ranks take no extra time because other work runs meanwhile. The simulator can
predict both, and takes less than a second for a step of a few layers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

from megakernel.errors import MegakernelError
from megakernel.isa import ceil_div
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.scheduler import compile_program, with_matmul
from megakernel.scheduler.candidates import most_dot_rows
from megakernel.scheduler.describe import lowering
from megakernel.scheduler.options import CHOICES, Options
from megakernel.scheduler.tasks import Stages
from megakernel.scheduler.tune.predict import predicted_seconds
from megakernel.targets import TARGETS

# The simulated program computes logits for at most this many rows, as in an engine, where most rows belong to prompts
# and need none. More logit rows would slow all options alike.
_LOGIT_ROWS = 64
# Matmuls as dot products on CUDA cores are tried if all rows fit in at most this many of their tiles. With more rows,
# dot products are many times slower than matrix units.
_DOT_TILES = 4
# A residual that is replicated on every rank is tried up to this many rows. With more rows, each rank would repeat too
# much of the other ranks' work.
_REPLICATED_ROWS = 1024
_VALUES: dict[str, tuple[Any, ...]] = {**CHOICES, "interleave": (True, False)}
# A panel is a group of row blocks (tiles of rows) that share one pass over the weights. With at most this many row
# blocks, a single panel of all row blocks is tried too. Ranks exchange a whole panel at once, and with a single panel
# they use all links.
_ONE_PANEL = 16


class Prediction(NamedTuple):
    """The predicted seconds of a step. Infinity means that they are at least `most_s`."""

    seconds: float
    most_s: float

    def answers(self, most_s: float) -> bool:
        """Whether this prediction says how long a step takes, or that it takes at least `most_s` seconds."""
        return self.seconds < math.inf or most_s <= self.most_s


Predictions = dict[Options | str, Prediction]


class Fastest:
    """Compiles the programs of one engine, which differ in their maximum step size. All other arguments of
    `compile_program` are fixed.

    If `options.queue` is auto, the simulator chooses the queue, interleaving and all other options that are auto, once
    for each number of tokens. Programs for a CPU use the cost model's choices instead: a CPU gains nothing from a
    queue, because a CPU thread runs the instructions of whichever worker is ready.

    All programs of an engine must share the O projection in the same way (sharded or replicated), which `one_class`
    ensures. They must also use the same matmul units, which the engine sets in `options`."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        *,
        tp: int = 1,
        options: Options,
        one_class: bool = False,
        **fixed: Any,
    ) -> None:
        self._config, self.machine, self._tp, self._options = config, machine, tp, options
        self._fixed, self._chosen, self._stages = fixed, dict[int, Options](), Stages()
        if one_class and tp > 1 and options.o == "auto":
            program = self.compile(options, 1, 1)  # the choice for `o` does not depend on the size
            self._options = replace(options, o=lowering(program.dims, program.forward)["o"])

    def __call__(self, *, tokens: int, logit_rows: int) -> Program:
        program = self.compile(self.options(tokens), tokens, logit_rows)
        self._stages = Stages()
        return program

    def compile(self, options: Options, tokens: int, logit_rows: int) -> Program:
        return compile_program(
            self._config,
            self.machine,
            tokens=tokens,
            logit_rows=logit_rows,
            tp=self._tp,
            options=options,
            stages=self._stages,
            **self._fixed,
        )

    def seconds(self, options: Options, tokens: int, known: Predictions, most_s: float = math.inf) -> float:
        """Return the predicted seconds of a step, or infinity if these options cannot be combined. The result may also
        be infinity if a step takes at least `most_s` seconds. `known` caches predictions by options and by the
        program's hash, because different options may give the same program."""
        found = known.get(options)
        if found is None or not found.answers(most_s):
            try:
                program = self.compile(options, tokens, min(tokens, _LOGIT_ROWS))
            except MegakernelError:  # rows do not fit in shared memory to be normalised inside matmuls
                known[options] = Prediction(math.inf, math.inf)
                return math.inf
            found = known.get(program.hash)
            if found is None or not found.answers(most_s):
                found = Prediction(predicted_seconds(program, self.machine, most_s), most_s)
            known[options] = known[program.hash] = found
        return found.seconds

    def options(self, tokens: int) -> Options:
        if self._options.queue != "auto" or not TARGETS[self.machine.target].pages:
            return self._options
        if tokens not in self._chosen:
            start = with_matmul(self._options, self._config, self.machine, tp=self._tp, tokens=tokens)
            start, known = replace(start, queue="body"), Predictions()
            # Search once with a sharded and once with a replicated O projection, which may need other options.
            forms = [form for form in CHOICES["o"] if form != "auto"]
            starts = [replace(start, o=o) for o in forms] if self._tp > 1 and start.o == "auto" else [start]
            found = [self._choose(each, tokens, known) for each in starts]
            self._chosen[tokens] = min(found, key=lambda each: self.seconds(each, tokens, known))
        return self._chosen[tokens]

    def _choose(self, best: Options, tokens: int, known: Predictions) -> Options:
        """Return the best options that a local search finds from `best`. It tries the values of one choice after
        another, and stops when every choice has been tried since the last improvement."""
        best_s, since = self.seconds(best, tokens, known), 0
        choices = self.open(tokens)
        for changes in itertools.cycle(choices):
            found = best
            for change in changes:
                tried = replace(best, **change)
                seconds = self.seconds(tried, tokens, known, best_s)
                if seconds < best_s:
                    found, best_s = tried, seconds
            since = since + 1 if found == best else 1
            best = found
            if since >= len(choices):
                break
        return best

    def open(self, tokens: int) -> list[list[dict[str, Any]]]:
        """Return the choices that the search may make, each as a list of changes of options to try. Options that depend
        on each other form one choice."""
        open_ = {name for name in CHOICES if getattr(self._options, name) == "auto"}
        open_ |= {"interleave"} if self._options.interleave else set()
        if self._tp == 1:
            open_ -= {"o", "residual"}
        if tokens > _REPLICATED_ROWS:
            open_ -= {"residual"}
        if ceil_div(tokens, most_dot_rows(self._config, self.machine, self._tp, self._options)) > _DOT_TILES:
            open_ -= {"matmul"}
        together = (["queue"], ["matmul"], ["residual"], ["norm", "interleave"], ["o"])
        choices = [_products([name for name in names if name in open_]) for names in together]
        blocks = ceil_div(tokens, self.machine.tile_rows)
        if not self._options.panel and 1 < blocks <= _ONE_PANEL:
            choices.append([{"panel": 0}, {"panel": blocks}])
        return [changes for changes in choices if len(changes) > 1]


def _products(names: list[str]) -> list[dict[str, Any]]:
    """Return all combinations of values for the options `names`."""
    values = [[value for value in _VALUES[name] if value != "auto"] for name in names]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
