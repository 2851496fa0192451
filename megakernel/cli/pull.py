"""`megakernel pull`: downloads a model into the cache."""

from __future__ import annotations

import argparse

from ..model import pull
from . import output
from .options import verb


@verb("pull", lambda parser: parser.add_argument("name", metavar="NAME", help="a known model, such as smollm2-135m"))
def run(args: argparse.Namespace) -> int:
    with output.progress(f"fetching {args.name}", unit="bytes") as advance:
        pulled = pull(args.name, advance)
    if args.json:
        output.emit({"path": str(pulled.path), "sha256": pulled.sha256})
    else:
        output.rows(("path", str(pulled.path)), ("sha256", pulled.sha256))
    return 0
