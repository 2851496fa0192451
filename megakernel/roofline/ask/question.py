"""Defines a question of `megakernel roofline ask`: its inputs, its formula, the formula's source, and its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import MegakernelError
from ...machine import Hardware

# The results of a question by name. A name ends in the unit of its value: _s, _bytes, _bytes_per_s, _flops_per_s or
# _flops. Values without a unit are counts, fractions or words.
Figures = dict[str, float | int | str | bool | None]
Kind = Literal["machine", "count", "amount", "word", "flag"]

BOOK = 'Austin et al., How to Scale Your Model, "How to Think About GPUs" (2025)'
_KINDS: dict[str, Kind] = {"Hardware": "machine", "int": "count", "float": "amount", "str": "word", "bool": "flag"}


NEEDED = inspect.Parameter.empty


@dataclass(frozen=True)
class Input:
    """An argument of a question. If `default` is NEEDED, it is required. If it is None, the function chooses."""

    name: str
    kind: Kind
    default: Any  # NEEDED: none
    what: str


@dataclass(frozen=True)
class Question:
    """A question of `megakernel roofline ask`. `numbers` are those questions in docs/roofline.md that it can answer."""

    name: str
    what: str
    formula: str
    source: str
    numbers: tuple[int, ...]
    inputs: tuple[Input, ...]
    answer: Callable[..., Figures]


QUESTIONS: dict[str, Question] = {}

_MEANINGS = {
    "machine": "a known machine, a node such as h100x8, or a .toml file",
    "bytes": "bytes of the whole array, all shards together",
    "gpus": "members of the collective, or GPUs of the cluster",
    "inner": "ways in which an inner axis already shards the array",
    "in_network": "let the switches do the addition",
    "copies": "maximum GPUs to which each part of the array goes, such as a token's experts (default: all)",
    "nodes": "maximum nodes to which each part of the array goes (default: no limit)",
    "rows": "rows of the left matrix",
    "inner_size": "columns of the left matrix, rows of the right one",
    "cols": "columns of the right matrix",
    "dtype": "type of the operands: bf16, fp8, fp4 or fp32",
    "weight_bytes": "bytes of a weight in memory (default: those of an operand)",
    "elements": "elements of each vector",
    "clock_ghz": "clock of the chip in GHz (default: its boost clock, or the clock that its rate implies)",
    "registers": "registers of a thread",
    "tokens": "tokens of the batch, on all GPUs",
    "hidden": "width of the model, D",
    "ffn": "width of the MLP, or of an expert, F",
    "ways": "model-parallel ways",
    "experts": "all experts, E or Z",
    "active": "experts of a token, k",
    "parameters": "all parameters of the model",
    "utilisation": "fraction of the peak that is reached",
    "stages": "stages of the pipeline",
    "microbatches": "microbatches of a step",
    "hops": "links that a message passes, one after the other",
    "seconds": "measured time in seconds",
}


def question(name: str, *numbers: int, what: str, formula: str, source: str = BOOK) -> Callable[[Any], Any]:
    """Declare that the decorated function answers a question, and that its parameters are the question's inputs."""

    def declare(answer: Callable[..., Figures]) -> Callable[..., Figures]:
        inputs = tuple(
            Input(p.name, _KINDS[p.annotation.removesuffix(" | None")], p.default, _MEANINGS[p.name])
            for p in inspect.signature(answer).parameters.values()
        )
        QUESTIONS[name] = Question(name, what, formula, source, numbers, inputs, answer)
        return answer

    return declare


def known(table: Mapping[str, float], machine: Hardware, what: str) -> Any:
    """The value for `machine` in `table`. Raises MegakernelError if there is none; `what` describes the value."""
    if machine.name not in table:
        raise MegakernelError(f"{what} of {machine.name} is not known: use --machine {' or '.join(table)}")
    return table[machine.name]
