"""`megakernel roofline --plan` and `--fleet`: a model on many GPUs, on paper: ways to share it, and what it costs."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from . import output
from .options import paper_shape

if TYPE_CHECKING:
    from ..machine import Hardware
    from ..roofline import Serving

_SHOWN = 12  # layouts in a table


def run_plan(args: argparse.Namespace, hardware: Hardware) -> int:
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


def run_fleet(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import best, fleet

    shape = paper_shape(args.model)
    gpus = args.gpus or hardware.node.gpus
    servings = fleet(shape, hardware, gpus, args.context)
    limit_s = args.token_ms / 1e3 if args.token_ms else math.inf
    chosen = best(shape, hardware, gpus, args.context, limit_s)
    if chosen not in servings:
        servings.append(chosen)
    usd = args.usd_per_gpu_hour or hardware.chip.usd_per_hour
    if args.json:
        output.emit(
            {
                "model": args.model,
                "machine": args.machine,
                "gpus": gpus,
                "context": args.context,
                "usd_per_gpu_hour": usd,
                "best": _serving_json(chosen, hardware, usd),
                "servings": [_serving_json(s, hardware, usd) for s in servings],
            }
        )
        return 0
    price = f"{usd:g} USD per GPU-hour" if usd else "1 USD per GPU-hour (give --usd-per-gpu-hour)"
    within = f" with at most {args.token_ms:g} ms a token" if args.token_ms else ""
    output.rows(
        ("model", f"{shape.name}, bf16, {args.context:,} KV tokens a sequence"),
        ("fleet", f"{gpus:,} x {hardware.name}, {price}"),
        ("best", f"tp {chosen.tp}, {chosen.batch:,} sequences a group, {chosen.tokens_per_s:,.0f} tokens/s{within}"),
    )
    table = output.table(
        "tp", "groups", "sequences", "step", "tokens/s", "per GPU", "bound by", "GB per GPU", "USD per M tokens"
    )
    for s in sorted(servings, key=lambda s: (s.tp, s.batch)):
        table.add_row(
            str(s.tp),
            f"{s.replicas:,}",
            f"{s.batch:,}",
            output.ms_text(s.step_s),
            f"{s.tokens_per_s:,.0f}",
            f"{s.tokens_per_s / (s.replicas * s.tp):,.0f}",
            s.bound,
            f"{s.bytes_per_gpu / 1e9:,.1f}",
            f"{s.usd_per_million_tokens(usd or 1.0):,.3f}",
            style="bold" if s == chosen else None,
        )
    output.stdout.print(table)
    return 0


def _serving_json(serving: Serving, hardware: Hardware, usd: float | None) -> dict[str, Any]:
    return asdict(serving) | {
        "gpu_hours_per_million_tokens": serving.usd_per_million_tokens(1.0),
        "usd_per_million_tokens": serving.usd_per_million_tokens(usd) if usd else None,
        "tokens_per_joule": serving.tokens_per_joule(hardware.chip.board_w) if hardware.chip.board_w else None,
    }
