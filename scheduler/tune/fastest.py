"""The default of the compiler: of what the options leave open, what the simulator finds fastest.

The cost model adds up phases one after the other, so it cannot say what a queue gains, or which exchange between ranks
hides behind other work. The simulator can, and a step of a few layers takes it less than a second.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import TARGETS, ceil_div
from ...machine import Machine
from ...model.config import ModelConfig
from ...program import Program
from .. import compile_program, with_matmul
from ..candidates import most_dot_rows
from ..describe import lowering
from ..options import CHOICES, Options, Shape
from .predict import predicted_seconds

# The program is simulated with the logits of as many rows as an engine asks for: those of more are the same for all.
_LOGIT_ROWS = 64
# Rows for which dots are tried against matrix units, in tiles of dots: for more they are many times slower.
_DOT_TILES = 4
# Rows for which a residual on every rank is tried: for more, each rank would normalise and add what all others do.
_REPLICATED_ROWS = 1024
_VALUES: dict[str, tuple[Any, ...]] = {**CHOICES, "interleave": (True, False)}
# Row blocks that are tried as one panel: each rank owns some of a panel then, so its exchange uses all links.
_ONE_PANEL = 16


class Fastest:
    """`compile_program` with everything fixed but the bucket.

    Where `options.queue` is auto, what else is auto, and interleaving, is chosen by the simulator, once for each number
    of tokens. `one_class`: all buckets share the lowering of O, as an engine's must; its matmul it fixes itself. A CPU
    gains nothing from a queue, because a thread runs whichever stream is ready: its programs are the cost model's.
    """

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
        self._fixed, self._chosen = fixed, dict[int, Options]()
        if one_class:
            self._options = self._settled(options)

    def __call__(self, *, tokens: int, logit_rows: int) -> Program:
        return self.compile(self.options(tokens), tokens, logit_rows)

    def _settled(self, options: Options) -> Options:
        """`options` with the lowering of O where auto has a choice: the cost model's, which no bucket changes."""
        if self._tp == 1 or options.o != "auto":
            return options
        return replace(options, o=_o(self.compile(options, 1, 1)))

    def compile(self, options: Options, tokens: int, logit_rows: int) -> Program:
        return compile_program(
            self._config,
            self.machine,
            tokens=tokens,
            logit_rows=logit_rows,
            tp=self._tp,
            options=options,
            **self._fixed,
        )

    def seconds(self, options: Options, tokens: int, known: dict[Options | str, float]) -> float:
        """Predicted seconds of a step, or infinity where these options do not go together. `known` has those that were
        predicted before, by their options and by their program's hash.
        """
        if options not in known:
            try:
                program = self.compile(options, tokens, min(tokens, _LOGIT_ROWS))
            except MegakernelError:  # norms inside, where they do not fit
                known[options] = math.inf
                return math.inf
            if program.hash not in known:
                known[program.hash] = predicted_seconds(program, self.machine)
            known[options] = known[program.hash]
        return known[options]

    def options(self, tokens: int) -> Options:
        """The options of a bucket."""
        if self._options.queue != "auto" or not TARGETS[self.machine.target].pages:
            return self._options
        if tokens not in self._chosen:
            start = with_matmul(self._options, self._config, self.machine, tp=self._tp, tokens=tokens)
            self._chosen[tokens] = self._choose(self._settled(replace(start, queue="body")), tokens)
        return self._chosen[tokens]

    def _choose(self, best: Options, tokens: int) -> Options:
        """One choice after the other, until each has been tried since the last that was better."""
        known: dict[Options | str, float] = {}
        best_s, since = self.seconds(best, tokens, known), 0
        choices = self.open(tokens)
        for changes in itertools.cycle(choices):
            found = best
            for change in changes:
                tried = replace(best, **change)
                seconds = self.seconds(tried, tokens, known)
                if seconds < best_s:
                    found, best_s = tried, seconds
            since = since + 1 if found == best else 1
            best = found
            if since >= len(choices):
                return best
        return best

    def open(self, tokens: int) -> list[list[dict[str, Any]]]:
        """The choices that the options leave open, each with its changes. Some depend on each other."""
        open_ = {name for name in CHOICES if getattr(self._options, name) == "auto"}
        open_ |= {"interleave"} if self._options.interleave else set()
        if self._tp == 1:
            open_ -= {"o", "residual"}
        if tokens > _REPLICATED_ROWS:
            open_ -= {"residual"}
        if tokens <= self.machine.tile_rows:
            open_ -= {"pairs"}
        if ceil_div(tokens, most_dot_rows(self._config, self.machine, self._tp)) > _DOT_TILES:
            open_ -= {"matmul"}
        together = (["queue", "o"], ["matmul"], ["residual"], ["norm", "interleave"], ["pairs"])
        choices = [_products([name for name in names if name in open_]) for names in together]
        blocks = ceil_div(tokens, self.machine.tile_rows)
        if self._options.shape == Shape() and 1 < blocks <= _ONE_PANEL:
            choices.append([{"shape": Shape()}, {"shape": Shape(panel=blocks)}])
        return [changes for changes in choices if len(changes) > 1]


def _o(program: Program) -> str:
    return lowering(program.dims, program.forward)["o"]


def _products(names: list[str]) -> list[dict[str, Any]]:
    """All ways to set some options."""
    values = [[value for value in _VALUES[name] if value != "auto"] for name in names]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
