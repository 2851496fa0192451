"""The command line: one console script with a verb for each task."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..errors import MegakernelError

FAILED, INTERRUPTED = 1, 130
# The modules that register the verbs. A verb with a space in its name, such as `bench serve`, is in a group.
_VERBS = (
    "demo", "pull", "generate", "chat", "serve", "programs", "simulate", "bench", "bench_serve",
    "timeline", "roofline", "doctor", "completion",
)  # fmt: skip
_GROUP = "measure speed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status. Usage errors exit with status 2 through argparse."""
    try:
        args = parser().parse_args(arguments)
        logging.basicConfig(level=args.log_level.upper(), format="megakernel: %(levelname)s: %(message)s")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # replace characters that the terminal cannot show
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The program that read our output has ended. Without this redirection, Python would report an error when it
        # flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MegakernelError as e:
        return _fail(str(e))
    except MemoryError:
        return _fail("out of memory: use a smaller model or a smaller --context")
    except OSError as e:
        remedy = ": free some space" if e.errno == errno.ENOSPC else ""
        return _fail(f"{e.filename}: {e.strerror}{remedy}" if e.filename else f"{e.strerror or e}{remedy}")


def _fail(text: str) -> int:
    print(f"megakernel: error: {' '.join(text.split())}", file=sys.stderr)
    return FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of a whole command line. `args.run(args)` executes the parsed arguments `args`."""
    # These modules are imported here and not at the top, so that `main` handles a Ctrl-C during the imports.
    from importlib.metadata import version

    from ..settings import SETTINGS

    level = SETTINGS["log level"]
    top = argparse.ArgumentParser(
        prog="megakernel",
        description="Compile a language model's forward pass into one program, run it, and see where the time goes.",
        epilog="Start with: megakernel demo",
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

    def parser_in(verbs: Any, name: str, what: str, example: str, **more: Any) -> Any:
        text = what[0].upper() + what[1:] + "."
        return verbs.add_parser(name, help=what, description=text, epilog=f"Example: {example}", **more)

    def add(name: str, what: str, example: str) -> Any:
        group, _, verb = name.rpartition(" ")
        if group not in groups:
            groups[group] = parser_in(verbs, group, _GROUP, example).add_subparsers(metavar="WHAT", required=True)
        return parser_in(groups[group], verb, what, example, parents=[common])

    for module in _VERBS:
        import_module(f".{module}", __package__).register(add)
    return top
