"""`megakernel completion`: prints a script with which a shell completes verbs and flags."""

from __future__ import annotations

import argparse
import sys

from .options import AddVerb

SHELLS = ("bash", "zsh", "tcsh")


def register(add: AddVerb) -> None:
    parser = add(
        "completion",
        "print a script with which a shell completes verbs and flags",
        "megakernel completion bash > ~/.local/share/bash-completion/completions/megakernel",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell for which the script is written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import shtab

    from . import output, parser

    script = shtab.complete(parser(), args.shell)
    if args.json:
        output.emit({"shell": args.shell, "script": script})
    else:
        sys.stdout.write(script + "\n")
    return 0
