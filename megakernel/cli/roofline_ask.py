"""`megakernel roofline ask`: computes limits of chips, networks and parallelism from a formula and its inputs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..errors import MegakernelError
from ..roofline.ask import BOOK, EXAMPLES, QUESTIONS, Input, Question
from ..settings import TINY, positive, within
from ..units import bytes_text, milliseconds
from . import output
from .this_machine import hardware_of

_MACHINE = "h100"
_amount = within(float, TINY, 1e30, "a number above 0, up to 1e30")
_UNITS = ("flops_per_s", "bytes_per_s", "per_s", "bytes", "hz", "s")


def add_ask(parser: argparse.ArgumentParser) -> None:
    """Add `megakernel roofline ask`. Each question has its own flags, which are defined only when it is asked."""
    what = "answer a question about chips, collectives or parallelism; alone, list the questions"
    parser.usage = "%(prog)s [ask QUESTION]"
    verbs = parser.add_subparsers(metavar="ask", prog="megakernel roofline")
    ask = verbs.add_parser("ask", help=what, description=what[0].upper() + what[1:] + ".")
    ask.add_argument("words", nargs=argparse.REMAINDER, metavar="QUESTION", help="a question's name and its flags")
    _add_json(ask, argparse.SUPPRESS)
    ask.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    words = args.words
    if words and words[0].isascii() and words[0].isdigit():
        words = _example(words)
    asked = _parser().parse_args([*words, *(["--json"] if args.json else [])])
    if asked.question is None:
        if asked.json:
            output.emit({"questions": [_about(q) for q in QUESTIONS.values()], "examples": EXAMPLES})
        else:
            _list()
        return 0
    question = QUESTIONS[asked.question]
    inputs = {i.name: getattr(asked, i.name) for i in question.inputs}
    machine = {"machine": hardware_of(inputs["machine"])} if "machine" in inputs else {}
    figures = question.answer(**{**inputs, **machine})
    if asked.json:
        output.emit(_about(question) | {"given": inputs, "figures": figures})
        return 0
    shown = ((name, value) for name, value in figures.items() if value is not None)
    output.rows(
        ("question", question.what),
        *((_words(name), _figure(name, value)) for name, value in shown),
        ("formula", question.formula),
        ("source", BOOK),
    )
    return 0


def _example(words: list[str]) -> list[str]:
    """Return the question and the flags that answer an exercise of the book *How to Scale Your Model*.

    words[0] is the exercise's number. Only --json may follow it. Raises MegakernelError for anything else."""
    number, *more = int(words[0][:3]), *words[1:]
    if number not in EXAMPLES or set(more) - {"--json"}:
        raise MegakernelError(
            f"the questions of the book How to Scale Your Model have the numbers 1 to {max(EXAMPLES)}; only --json "
            "may follow such a number"
        )
    output.stderr.print(f"question {number}: megakernel roofline {EXAMPLES[number]}")
    return [*EXAMPLES[number].split()[1:], *more]


def _parser() -> argparse.ArgumentParser:
    numbered = "Instead of QUESTION, give a number to ask the question of the book with that number."
    top = argparse.ArgumentParser(prog="megakernel roofline ask", epilog=numbered)
    _add_json(top, False)
    questions = top.add_subparsers(metavar="QUESTION", dest="question")
    for question in QUESTIONS.values():
        text = question.what[0].upper() + question.what[1:] + "."
        parser = questions.add_parser(question.name, help=question.what, description=text, epilog=question.formula)
        for each in question.inputs:
            _add_input(parser, each)
        _add_json(parser, argparse.SUPPRESS)
    return top


def _add_json(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument("--json", action="store_true", default=default, help="print one JSON object")


def _add_input(parser: argparse.ArgumentParser, one: Input) -> None:
    flag = "--" + one.name.replace("_", "-")
    if one.kind == "flag":
        parser.add_argument(flag, action="store_true", help=one.what)
        return
    default = _MACHINE if one.kind == "machine" else one.default
    needed = one.needed and default is None
    said = one.what if default is None else f"{one.what} (default: {default})"
    read = {"count": positive, "amount": _amount}.get(one.kind, str)
    metavar = {"machine": "NAME", "count": "N"}.get(one.kind, "X")
    parser.add_argument(flag, type=read, required=needed, default=default, metavar=metavar, help=said)


def _about(question: Question) -> dict[str, Any]:
    return {"question": question.name, "source": BOOK, **asdict(question)}


def _list() -> None:
    table = output.table("question", "what", "numbers of the book")
    for question in QUESTIONS.values():
        table.add_row(question.name, question.what, ", ".join(map(str, question.numbers)))
    output.stdout.print(table)
    output.stdout.print(
        f"\nInputs: megakernel roofline ask QUESTION --help. The book's {len(EXAMPLES)} worked questions by number:"
        " megakernel roofline ask 11"
    )


def _words(name: str) -> str:
    unit = next((u for u in _UNITS if name == u or name.endswith("_" + u)), "")
    return (name.removesuffix(unit).rstrip("_") or name).replace("_", " ")


def _figure(name: str, value: float | int | str | bool) -> str:
    if isinstance(value, str | bool):
        return str(value)
    if name == "flops":
        return f"{value:.4g} FLOP"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return bytes_text(value) + "/s"
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_hz"):
        return f"{value / 1e9:,.4g} GHz"
    if name.endswith("_per_s"):
        return f"{value:,.4g}/s"
    if name.endswith("_s"):
        return milliseconds(value) if value >= 1e-4 else f"{value * 1e6:,.4g} us"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
