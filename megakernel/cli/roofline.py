"""`megakernel roofline`: computes the least time that the hardware allows, without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MegakernelError
from . import roofline_ask, roofline_paper, roofline_step
from .bench import host_ceilings
from .options import AddVerb, above_zero, add_count, add_paper_model, add_setting

if TYPE_CHECKING:
    from ..machine import Hardware

_CONTEXT, _TRAINING_CONTEXT = 128, 4096
_WEIGHT_BITS = 16
_DIGITS = 9  # maximum digits of a number in a layout
_price = above_zero("a positive number")


def register(add: AddVerb) -> None:
    parser = add(
        "roofline",
        "show a step's least time on a machine and what limits it, ways to shard a model over GPUs, or a fleet's cost",
        "megakernel roofline --model random:llama-3.1-70b --machine h100x8 --tp 8 --tokens 1024 --plot roof.svg",
    )
    for name in ("model", "machine", "tp", "o lowering", "residual", "norm"):
        add_setting(parser, name)
    add_paper_model(parser)
    rows = "rows of a step, one for each sequence; with --training, tokens of a batch"
    context = f"KV tokens of each sequence (default: {_CONTEXT}); with --training, its length ({_TRAINING_CONTEXT})"
    add_count(parser, "--tokens", 1, rows, "B")
    add_count(parser, "--context", None, context, "C")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the roofline plot as .svg or .html")
    parser.add_argument(
        "--achieved",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="add a measured point to the figure, from a file with the output of `bench latency --json`",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--plan", action="store_true", help="list all ways to divide the model over --gpus, sorted by time"
    )
    what.add_argument(
        "--fleet",
        action="store_true",
        help="show how many tokens per second the --gpus GPUs serve, what limits this rate, and what a token costs",
    )
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="tp=8,pp=16,dp=128",
        help="with --plan: evaluate this layout too (tp, ep, pp, dp, zero), and explain why it is slower than the best",
    )
    parser.add_argument(
        "--weight-bits",
        type=int,
        choices=(16, 8, 4),
        default=_WEIGHT_BITS,
        help="bits per weight while decoding (default: 16)",
    )
    add_count(parser, "--router-nodes", None, "maximum nodes with a token's experts (default: the model's own limit)")
    add_count(parser, "--gpus", None, "GPUs of a plan or fleet (default: a node)")
    parser.add_argument("--training", action="store_true", help="plan a training step instead of a decoding step")
    parser.add_argument(
        "--usd-per-gpu-hour",
        type=_price,
        metavar="USD",
        help="the price of a GPU-hour, from which the cost of a token is computed",
    )
    parser.add_argument("--token-ms", type=_price, metavar="MS", help="with --fleet: the maximum time per token, in ms")
    parser.set_defaults(run=run)
    roofline_ask.register(parser)


def _layout(text: str) -> dict[str, int]:
    """Parse text such as `tp=8,pp=16,dp=128`. A `Layout` is made from the result later."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        least = 0 if name == "zero" else 1
        if name not in ("tp", "ep", "pp", "dp", "zero") or name in found or not (value.isascii() and value.isdigit()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a layout like tp=8,ep=1,pp=16,dp=128,zero=1")
        found[name] = int(value[:_DIGITS])
        if not least <= found[name] or len(value) > _DIGITS or (name == "zero" and found[name] not in (0, 1, 3)):
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r} is out of range: tp, ep, pp and dp must be at least 1, and zero must be "
                "0, 1 or 3"
            )
    return found


def run(args: argparse.Namespace) -> int:
    from .. import machine as machines

    _check(args)
    hardware = measured_hardware() if args.machine == machines.HOST else machines.hardware(args.machine)
    if args.context is None:
        args.context = _TRAINING_CONTEXT if args.training else _CONTEXT
    if args.plan:
        return roofline_paper.run_plan(args, hardware)
    if args.fleet:
        return roofline_paper.run_fleet(args, hardware)
    return roofline_step.run(args, hardware)


def measured_hardware() -> Hardware:
    """Return a description of this machine with its measured ceilings."""
    from .. import machine as machines

    measured = host_ceilings(machines.cpu_count())
    return machines.host_hardware(measured.flops, measured.read_bytes_per_s)


def _check(args: argparse.Namespace) -> None:
    """Raise an error for flags that cannot be combined, because ignoring one of them would give a wrong answer."""
    paper = args.plan or args.fleet
    decoding = paper and not args.training
    for flag, given, needed, there in (
        ("--gpus", args.gpus, "needs --plan or --fleet", paper),
        ("--training", args.training, "needs --plan", args.plan),
        ("--usd-per-gpu-hour", args.usd_per_gpu_hour, "needs --fleet", args.fleet),
        ("--token-ms", args.token_ms, "needs --fleet", args.fleet),
        ("--layout", args.layout, "needs --plan", args.plan),
        ("--weight-bits", args.weight_bits != _WEIGHT_BITS, "needs --plan or --fleet, without --training", decoding),
        ("--router-nodes", args.router_nodes, "needs --plan or --fleet", paper),
        ("--achieved", args.achieved, "needs --plot", args.plot),
        ("--weights", args.weights != "auto" and paper, "does not go with --plan or --fleet", False),
        ("--plot", args.plot and paper, "does not go with --plan or --fleet", False),
    ):
        if given and not there:
            raise MegakernelError(f"{flag} {needed}")
    if args.plot and args.plot.suffix not in (".svg", ".html"):
        raise MegakernelError(f"cannot plot to {args.plot}: its name must end in .svg or .html")
