"""What a person can type: one console script, a verb each."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence

from ..errors import MegakernelError

FAILED, INTERRUPTED = 1, 130
LOG_LEVELS = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line. Returns its exit status; usage errors exit with 2 through argparse."""
    try:
        args = parser().parse_args(arguments)
        logging.basicConfig(level=args.log_level.upper(), format="megakernel: %(levelname)s: %(message)s")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left; without this the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MegakernelError as e:
        return _fail(str(e))
    except MemoryError:
        return _fail("out of memory: take a smaller model or --context")
    except OSError as e:
        remedy = ": free some space" if e.errno == errno.ENOSPC else ""
        return _fail(f"{e.filename}: {e.strerror}{remedy}" if e.filename else f"{e.strerror or e}{remedy}")


def _fail(text: str) -> int:
    print(f"megakernel: error: {' '.join(text.split())}", file=sys.stderr)
    return FAILED


def parser() -> argparse.ArgumentParser:
    """The parser of a whole command line; `args.run(args)` executes it."""
    # Imported here, where Ctrl-C already has a handler.
    from importlib.metadata import version

    from ..settings import SETTINGS
    from . import (
        bench,
        bench_serve,
        bench_throughput,
        demo,
        doctor,
        generate,
        programs,
        pull,
        roofline,
        serve,
        simulate,
        timeline,
    )

    level = SETTINGS["log level"]
    if level.value() not in LOG_LEVELS:
        raise MegakernelError(f"{level.env}={level.value()} is none of {', '.join(LOG_LEVELS)}")
    top = argparse.ArgumentParser(
        prog="megakernel",
        description="Compile a Llama forward pass into one program, run it, and see where the time goes.",
        epilog="Start with: megakernel demo",
    )
    top.add_argument("-V", "--version", action="version", version=f"megakernel {version('megakernel')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object; all else goes to standard error")
    common.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=level.value(),
        help=f"{level.what} (default: {level.default}; {level.env})",
    )
    verbs = top.add_subparsers(metavar="VERB", required=True)
    groups = {"": verbs}

    def add(name: str, what: str, example: str) -> argparse.ArgumentParser:
        """A verb, or with a space in its name one of a group's."""
        group, _, verb = name.rpartition(" ")
        if group not in groups:
            text = bench.GROUP
            parent = verbs.add_parser(
                group, help=text, description=text.capitalize() + ".", epilog=f"Example: {example}"
            )
            groups[group] = parent.add_subparsers(metavar="WHAT", required=True)
        return groups[group].add_parser(
            verb,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"Example: {example}",
            parents=[common],
        )

    for room in (
        demo,
        pull,
        generate,
        serve,
        programs,
        simulate,
        bench,
        bench_throughput,
        bench_serve,
        timeline,
        roofline,
        doctor,
    ):
        room.register(add)
    return top
