"""`megakernel roofline --fleet`: what many GPUs serve, what binds them, and what a million tokens costs."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import output
from .options import paper_shape

if TYPE_CHECKING:
    from ..machine import Hardware
    from ..roofline import Serving


def run(args: argparse.Namespace, hardware: Hardware) -> int:
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
