"""The command line: one console script with a verb for each task."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import logging
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from ..errors import MegakernelError

FAILED, INTERRUPTED = 1, 130
# The verbs (subcommands) under the titles that `--help` gives them: name, what it does, example. A verb of two words,
# such as `bench serve`, belongs to a group.
_VERBS = """
run a model
demo | fetch the default model, answer a question, measure the speed, and write a timeline |
    megakernel demo --prompt "Name three rivers."
pull | download a model into the cache and check its SHA-256; a broken download is resumed |
    megakernel pull smollm2-135m
generate | continue a prompt or answer a message |
    megakernel generate --chat "Name the capital of France." --temperature 0
chat | talk to a model, in this process or on a server | megakernel chat --model smollm2-135m
serve | answer OpenAI API requests over HTTP | megakernel serve --model smollm2-135m --port 8000
understand its speed
bench latency | measure decode and prefill of one sequence | megakernel bench latency --tokens 64
bench throughput | measure the time to finish many prompts offline |
    megakernel bench throughput --num-prompts 64 --dataset random --random-input-len 128
bench serve | benchmark any OpenAI-compatible server: latencies, throughput, and the fraction of the roofline |
    megakernel bench serve --base-url http://127.0.0.1:8000 --num-prompts 64 --max-concurrency 16
timeline | show where the time of a step went, from saved files or by running a model |
    megakernel timeline --model smollm2-135m --phase decode -o step.html
roofline | show a step's least time on a machine and what limits it |
    megakernel roofline --model random:llama-3.1-70b --machine h100x8 --tp 8 --tokens 1024
simulate | predict a step's time on a machine, by default the one that FILE was compiled for |
    megakernel simulate --model random:llama-3.1-70b --machine h100 --tp 8 --tokens 8192 --queue attention
look into programs
compile | compile a model for a machine into a program file, without reading weights |
    megakernel compile --model random:llama-3.1-70b --machine h100 --tokens 2048 -o llama.mkp
disasm | print a program as text | megakernel disasm llama.mkp
verify | prove that a program has no deadlock, race or lost write, or show where it has one |
    megakernel verify --model random:llama-3.2-1b --machine h100 --tokens 512
this machine
doctor | report versions, settings, cores, ceilings and GPUs | megakernel doctor --json
"""
_MODULES = "bench bench_serve chat demo doctor generate programs pull roofline serve simulate timeline"
_GROUP = "measure speed"


class _Help(argparse.HelpFormatter):
    """Shows only required arguments in the usage, because all flags together take twenty lines. Keeps paragraphs, and
    keeps each example on one line, so that it can be copied."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        either = [group for group in groups if group.required]
        among = [action for group in either for action in group._group_actions]
        needed = [action for action in actions if action.required or not action.option_strings or action in among]
        flags = " [FLAGS]" if len(needed) < len(actions) else ""
        return super()._format_usage(usage, needed, either, prefix).rstrip("\n") + f"{flags}\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith("Example") else fill(part, width, indent) for part in parts)


class _VerbHelp(_Help):
    """Lists the verbs in groups, which argparse cannot do. A line of the epilog is a group's title or a verb's use."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(textwrap.fill, width=width)
        return "\n".join(wrap(line, subsequent_indent=" " * 14 * line.startswith(" ")) for line in text.splitlines())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """If a verb does not exist, suggest the most similar one."""
        if found := re.search(r"argument (?:VERB|WHAT): invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"[a-z]+", found[2]), 1)
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them"
            message = f"there is no {self.prog} {found[1]}: {hint}"
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status. For a usage error, argparse ends the process with status 2."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    closed = sys.stdout is None
    # Open /dev/null for those of the descriptors 0, 1 and 2 that are closed. Otherwise, the next file or socket would
    # get such a number, and code that prints to standard output or error would write into that file.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        if closed:
            return _fail("standard output is closed")
        given = sys.argv[1:] if arguments is None else arguments
        args, unknown = parser().parse_known_args([*map(_dashed, given)] or ["--help"])
        if unknown:
            args.parser.error(_about_unknown(unknown, args.parser, getattr(args, "hints", {})))
        logging.basicConfig(level=args.log_level.upper(), format="megakernel: %(levelname)s: %(message)s")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # replace characters that the terminal cannot show
        with on_interrupt(interrupt):
            status: int = args.run(args)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the program that read our output has ended
        return FAILED
    except MegakernelError as e:
        return _fail(str(e))
    except MemoryError:
        return _fail("out of memory: use a smaller model or a smaller --max-model-len")
    except OSError as e:
        _drop_output()
        remedy = ": free some space" if e.errno == errno.ENOSPC else ""
        return _fail(f"{e.filename}: {e.strerror}{remedy}" if e.filename else f"{e.strerror or e}{remedy}")
    except Exception:
        if interrupted:  # some packages turn a KeyboardInterrupt during their import into an error of another type
            return INTERRUPTED
        raise


@contextmanager
def on_interrupt(handler: Callable[..., None]) -> Iterator[None]:
    """Handle Ctrl-C with `handler`, unless this process ignores Ctrl-C or this is not the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _drop_output() -> None:
    """Discard buffered output that cannot be written, because Python would report an error when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dashed(argument: str) -> str:
    """Return a flag with hyphens for underscores, because vLLM accepts both. Other arguments are not changed."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _about_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser, hints: Mapping[str, str]) -> str:
    """Return the error message for the flags in `unknown`, which the verb of `parser` does not have. `hints` says what
    to use instead of some flags. The message has the hint for the first unknown flag."""
    flag = next((text.partition("=")[0] for text in unknown if text.startswith("-")), "")
    near = difflib.get_close_matches(flag, parser._option_string_actions, 1)
    hint = hints.get(flag) or (f"did you mean {near[0]}?" if near else "")
    return f"unrecognized arguments: {' '.join(unknown)}" + (f" ({hint})" if hint else "")


def _fail(text: str) -> int:
    print(f"megakernel: error: {' '.join(text.split())}", file=sys.stderr)
    return FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of a whole command line. Its result `args` has a method `run`, which executes the command."""
    # These modules are imported here, not at the top, so that `main` can handle a Ctrl-C during the imports.
    from importlib.metadata import version

    from ..settings import SETTINGS, lines
    from .options import VERBS, add_flags

    level = SETTINGS["log_level"]
    top = _Parser(
        prog="megakernel",
        description="Compile a language model's forward pass into one program, run it, and see where the time goes.",
        formatter_class=_VerbHelp,
    )
    top.add_argument("-V", "--version", action="version", version=f"megakernel {version('megakernel')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object")
    common.add_argument(
        "--log-level",
        type=level.read,
        default=level.value(),
        metavar="LEVEL",
        help=f"{level.what} (default: {level.default}; {level.env})",
    )
    verbs = top.add_subparsers(metavar="VERB", required=True)
    groups = {"": verbs}
    listed: list[str] = []

    def parser_in(verbs: Any, name: str, what: str, example: str, **more: Any) -> Any:
        text = f"{what[0].upper()}{what[1:]}.\n\nExample: {example}"
        made = verbs.add_parser(name, help=what, description=text, formatter_class=_Help, **more)
        made.set_defaults(parser=made)
        if verbs is groups[""]:
            listed.append(f"  {name:<10}  {what}")
        return made

    for module in _MODULES.split():
        import_module(f".{module}", __package__)
    for line in lines(_VERBS):
        name, *about = line.split(" | ")
        if not about:
            listed.append(f"\n{name}:")
            continue
        group, _, last = name.rpartition(" ")
        if group not in groups:
            made = parser_in(verbs, group, _GROUP, about[1])
            groups[group] = made.add_subparsers(metavar="WHAT", required=True)
        made = parser_in(groups[group], last, *about, parents=[common])
        for flags in VERBS[name].flags:
            add_flags(made, flags) if isinstance(flags, str) else flags(made)
        made.set_defaults(run=VERBS[name].run, **VERBS[name].defaults)
    top.epilog = "\n".join([*listed, "\nStart with: megakernel demo"]).lstrip()
    return top
