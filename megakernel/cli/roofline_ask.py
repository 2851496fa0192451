"""`megakernel roofline ask`: computes limits of chips, networks and parallelism from a formula and its inputs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..machine import OPERAND_BYTES
from ..roofline.ask import BOOK, EXAMPLES, QUESTIONS, Input, Question
from ..settings import TINY, positive, within
from ..units import figure
from . import output
from .this_machine import hardware_of

_MACHINE = "a known machine, a node such as h100x8, or a .toml file (default: h100)"
_READ = {"count": positive, "amount": within(float, TINY, 1e30, "a number above 0, up to 1e30")}


def add_ask(parser: argparse.ArgumentParser) -> None:
    """Add `megakernel roofline ask`. Each question has its own flags, which are defined only when it is asked."""
    what = "answer a question about chips, collectives or parallelism; alone, list the questions"
    numbered = "Instead of QUESTION, give a number to ask the question of the book with that number."
    parser.usage = "%(prog)s [ask QUESTION]"
    verbs = parser.add_subparsers(metavar="ask", prog="megakernel roofline")
    ask = verbs.add_parser("ask", help=what, description=what[0].upper() + what[1:] + ".", epilog=numbered)
    ask.add_argument("words", nargs=argparse.REMAINDER, metavar="QUESTION", help="a question's name and its flags")
    ask.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    ask.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    as_json, words = args.json or "--json" in args.words, [word for word in args.words if word != "--json"]
    if not words:
        _list(as_json)
        return 0
    if example := EXAMPLES.get(words[0]):
        output.stderr.print(f"question {words[0]}: megakernel roofline ask {example}")
        words[:1] = example.split()
    given = vars(_parser().parse_args(words))
    question = QUESTIONS[given.pop("question")]
    figures = question.answer(**given | {"machine": hardware_of(given["machine"])})
    if as_json:
        output.emit(_about(question) | {"given": given, "figures": figures})
        return 0
    shown = (figure(name, value) for name, value in figures.items() if value is not None)
    output.rows(("question", question.what), *shown, ("formula", question.formula), ("source", BOOK))
    return 0


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="megakernel roofline ask")
    questions = top.add_subparsers(metavar="QUESTION", dest="question", required=True)
    for question in QUESTIONS.values():
        text = question.what[0].upper() + question.what[1:] + "."
        parser = questions.add_parser(question.name, help=question.what, description=text, epilog=question.formula)
        parser.add_argument("--machine", default="h100", metavar="NAME", help=_MACHINE)
        for each in question.inputs:
            _add_input(parser, each)
    return top


def _add_input(parser: argparse.ArgumentParser, one: Input) -> None:
    flag = "--" + one.name.replace("_", "-")
    if one.kind == "flag":
        parser.add_argument(flag, action="store_true", help=one.what)
        return
    said = one.what if one.default is None else f"{one.what} (default: {one.default})"
    parser.add_argument(
        flag,
        type=_READ.get(one.kind, str),
        choices=[*OPERAND_BYTES] if one.kind == "dtype" else None,
        required=one.needed,
        default=one.default,
        metavar="N" if one.kind == "count" else "X",
        help=said,
    )


def _about(question: Question) -> dict[str, Any]:
    return {"question": question.name, "source": BOOK, **asdict(question)}


def _list(as_json: bool) -> None:
    if as_json:
        output.emit({"questions": [_about(q) for q in QUESTIONS.values()], "examples": EXAMPLES})
        return
    table = output.table("question", "what", "numbers of the book")
    for question in QUESTIONS.values():
        table.add_row(question.name, question.what, ", ".join(question.numbers))
    output.stdout.print(table)
    output.stdout.print(
        f"\nInputs: megakernel roofline ask QUESTION --help. The book's {len(EXAMPLES)} worked questions by number:"
        " megakernel roofline ask 11"
    )
