"""`megakernel roofline --plan`: all ways to share a model over many GPUs, ranked."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from . import output
from .options import paper_shape

if TYPE_CHECKING:
    from ..machine import Hardware

_SHOWN = 12  # layouts in a table


def run(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import plan

    shape = paper_shape(args.model)
    gpus = args.gpus or hardware.node.gpus
    found = plan(shape, hardware, gpus, args.tokens, args.context, training=args.training)
    if args.json:
        output.emit(
            {
                "model": args.model,
                "machine": args.machine,
                "gpus": gpus,
                "tokens": args.tokens,
                "context": args.context,
                "training": args.training,
                "ranked": [asdict(t) | {"name": str(t.layout), "step_s": t.step_s} for t in found.ranked],
                "refused": [asdict(r) | {"name": str(r.layout)} for r in found.refused],
            }
        )
        return 0
    per_gpu = f"{args.tokens / gpus:,.0f} per GPU" if args.tokens >= gpus else f"on {gpus} GPUs"
    what = "tokens of training" if args.training else "sequences decoding"
    output.rows(
        (
            "model",
            f"{shape.name}, {shape.parameters / 1e9:,.1f} G parameters, {shape.active_parameters / 1e9:,.1f} G used",
        ),
        ("machine", f"{gpus:,} x {hardware.name}"),
        ("step", f"{args.tokens:,} {what} ({per_gpu}), sequences of {args.context:,}"),
    )
    # State that is sharded less takes as long and more memory: one line for each way to cut the work.
    cuts = {replace(t.layout, zero=0): t for t in reversed(found.ranked)}
    shown = sorted(cuts.values(), key=found.ranked.index)[:_SHOWN]
    table = output.table("layout", "step", "tokens/s", "math", "memory", "network", "bubble, hops", "GB per GPU", "why")
    for t in shown:
        network = max(t.comms_s.values(), default=0.0)
        seconds = (t.math_s, t.memory_s, network, t.fixed_s)
        table.add_row(
            str(t.layout),
            output.ms_text(t.step_s),
            f"{t.tokens_per_s:,.0f}",
            *(output.ms_text(s) if s else "" for s in seconds),
            f"{t.bytes_per_gpu / 1e9:,.1f}",
            t.why,
        )
    output.stdout.print(table)
    if len(found.ranked) > len(shown):
        output.stdout.print(
            f"and {len(found.ranked) - len(shown)} that are slower or take more memory (--json has all)"
        )
    for refusal in found.refused[:_SHOWN]:
        output.stdout.print(f"refused: {refusal.layout}: {refusal.why}")
    if len(found.refused) > _SHOWN:
        output.stdout.print(f"and {len(found.refused) - _SHOWN} more refused")
    return 0
