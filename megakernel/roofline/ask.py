"""The questions that `megakernel roofline ask` answers. questions.toml has their inputs and formulas, which this
module evaluates. Formulas that loop over the levels of a network are functions here.

The formulas keep the factor (N - 1) / N, which the book "How to Scale Your Model" drops. docs/roofline.md lists all
differences from the book."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil as ceil
from pathlib import Path
from typing import Any

from ..errors import MegakernelError
from ..machine import OPERAND_BYTES as OPERAND_BYTES
from ..machine import Hardware, Level
from ..machine.hardware import Chip
from .program_step import measured_s as measured_s

# The results of a question by name. questions.toml says how a name shows the unit of its value.
Figures = dict[str, Any]

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
FACTS: dict[str, dict[str, Any]] = _TABLE["facts"]
EXAMPLES: dict[str, str] = _TABLE["examples"]  # by the number of a question of the book
BOOK = 'Austin et al., How to Scale Your Model, "How to Think About GPUs" (2025)'
SWITCH_PORTS = 64


@dataclass(frozen=True)
class Input:
    """An input of a question, besides the machine. `kind` is dtype, count, amount or flag. An input that is not
    `needed` may be left out; formulas then get its `default`, which may be None."""

    name: str
    kind: str
    needed: bool
    default: Any
    what: str


@dataclass(frozen=True)
class Question:
    """A question of `megakernel roofline ask`. It answers the exercises `numbers` of *How to Scale Your Model*.
    `needs` maps each condition to its error message, and `figures` each result's name to its formula, all in Python."""

    name: str
    what: str
    formula: str
    numbers: tuple[str, ...]
    inputs: tuple[Input, ...]
    needs: dict[str, str]
    figures: dict[str, str]

    def answer(self, machine: Hardware, **given: Any) -> Figures:
        """Compute the results for a machine. `given` has inputs that replace the defaults. Raises MegakernelError if
        the question cannot be answered for these inputs."""
        names = globals() | {one.name: one.default for one in self.inputs} | given | {"machine": machine}
        C, link, network = machine.flops_per_s("bf16"), machine.link.egress_bytes_per_s, machine.node.egress_bytes_per_s
        names |= {"C": C, "link": link, "network": network, "alpha_node": C / link, "alpha_beyond": C / network}
        names |= {"chip": machine.chip, "S": machine.node.gpus}
        for condition, message in self.needs.items():
            if not eval(condition, names):
                raise MegakernelError(message.format(**names))
        found: Figures = {}
        for name, formula in self.figures.items():
            value = eval(formula, names)
            more = value if name == "..." else {name: value}
            names |= more
            found |= more
        return {name: value for name, value in found.items() if not name.startswith("_")}


def times(chip: Chip, math_s: float, moved_bytes: float) -> Figures:
    """Return the seconds of arithmetic and of memory accesses, and the least time, which is the longer of the two."""
    moving_s = moved_bytes / chip.hbm_bytes_per_s
    bound = "arithmetic" if math_s > moving_s else "memory"
    return {"least_s": max(math_s, moving_s), "arithmetic_s": math_s, "memory_s": moving_s, "bound": bound}


def levels(machine: Hardware, gpus: int) -> tuple[Level, ...]:
    if gpus < 2:
        raise MegakernelError("one GPU sends nothing: use --gpus 2 or more")
    return machine.levels(gpus)


def level_seconds(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each level of a network needs for an all-gather or a reduce-scatter. The first level is
    inside a node. The slowest level determines the time.

    A level connects D children (GPUs or groups of GPUs). A child has S GPUs and a link of W bytes/s. The level needs B
    (D - 1) S / (D max(Y, S) W) seconds, where B is `array_bytes`, the size of the whole array. If the array is also
    divided along another axis, Y = `inner` is the number of GPUs along that axis.
    """
    shares = level_shares(array_bytes, levels, inner)
    return [share * (level.degree - 1) / level.degree for share, level in zip(shares, levels, strict=True)]


def level_shares(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each level of a network needs for an all-reduce if switches add arrays. A
    child (a GPU or a group of GPUs) then sends and receives its share of the array once. The arguments are those of
    `level_seconds`."""
    return [array_bytes * x.child_gpus / (max(inner, x.child_gpus) * x.child_bytes_per_s) for x in levels]


def exchange_seconds(array_bytes: float, levels: Sequence[Level], copies: int, nodes: int | None) -> list[float]:
    """Return the seconds that each level of a network needs for an all-to-all. A row of the array goes to at most
    `copies` GPUs, and to at most `nodes` nodes if `nodes` is given. The row enters each group of GPUs only once."""
    seconds, children = [], 1
    for level in reversed(levels):
        children *= level.degree
        sent = min(copies, nodes if nodes and level.child_gpus > 1 else children, children)
        seconds.append(array_bytes * sent * (children - 1) / (children**2 * level.child_bytes_per_s))
    return seconds[::-1]


def slowest(levels: Sequence[Level], seconds: Sequence[float]) -> Figures:
    """Combine the seconds that each level of a network needs. The time of the slowest level is the result."""
    longest = max(range(len(levels)), key=lambda i: seconds[i])
    each = {f"{level.name}_s": s for level, s in zip(levels, seconds, strict=True)}
    return {"least_s": seconds[longest], "bound": f"the {levels[longest].name} level", **each}


def bandwidths(machine: Hardware, gpus: int) -> Figures:
    """Return how many children (GPUs or groups of GPUs) each network level connects, and the level's bandwidths."""
    found: Figures = {}
    for level in levels(machine, gpus):
        rate = level.degree * level.child_bytes_per_s
        found |= {
            f"{level.name}_degree": level.degree,
            f"{level.name}_bytes_per_s": rate,
            f"{level.name}_gather_bytes_per_s": 1 / level_seconds(1.0, [level])[0],
        }
        if level.child_gpus > 1:
            found[f"{level.name}_per_node_bytes_per_s"] = rate * machine.node.gpus / (level.degree * level.child_gpus)
    return found


def _input(text: str) -> Input:
    """Parse an input in questions.toml: `name`, `name?` (it may be missing) or `name=value` (with a default)."""
    name, given, value = text.removesuffix("?").partition("=")
    kind, _, what = _TABLE["inputs"][name].partition(": ")
    read = {"count": int, "amount": float, "flag": bool}.get(kind, str)
    return Input(name, kind, name == text, read(value) if given else None, what)


def _question(name: str, table: dict[str, Any]) -> Question:
    figures = {key: value for key, value in table.items() if key not in ("what", "formula", "inputs", "needs")}
    numbers = tuple(number for number, words in EXAMPLES.items() if words.split()[0] == name)
    inputs = tuple(map(_input, table["inputs"].split()))
    return Question(name, table["what"], table["formula"], numbers, inputs, table.get("needs", {}), figures)


QUESTIONS = {name: _question(name, table) for name, table in _TABLE["questions"].items()}
