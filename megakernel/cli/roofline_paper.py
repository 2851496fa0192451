"""`megakernel roofline --plan` and `--fleet`: computes ways to divide a model among many GPUs, and their cost."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import output
from .options import paper_shape

if TYPE_CHECKING:
    from ..machine import Hardware
    from ..roofline import LayoutTime, Serving, Shape

_SHOWN = 12  # layouts in a table


def run_plan(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import Layout, asked, plan

    shape = _shape(args)
    layout = Layout(**args.layout) if args.layout else None
    gpus = args.gpus or (layout.gpus if layout else hardware.node.gpus)
    if layout and layout.gpus > gpus:
        raise MegakernelError(f"{layout} needs {layout.gpus:,} GPUs, but there are {gpus:,}: raise --gpus")
    step = (args.tokens, args.context)
    found = plan(shape, hardware, gpus, *step, training=args.training)
    loss = asked(shape, hardware, layout, found, *step, training=args.training) if layout else None
    if args.json:
        output.emit(
            {
                "model": args.model,
                "machine": args.machine,
                "gpus": gpus,
                "tokens": args.tokens,
                "context": args.context,
                "training": args.training,
                "layout": _time_json(loss.time, gpus) | {k: v for k, v in asdict(loss).items() if k != "time"}
                if loss
                else None,
                "ranked": [_time_json(t, gpus) for t in found.ranked],
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
    # Layouts that differ only in the sharding of state divide the work in the same way, so only the best is shown.
    cuts = {replace(t.layout, zero=0): t for t in reversed(found.ranked)}
    shown = sorted(cuts.values(), key=found.ranked.index)[:_SHOWN]
    table = output.table("layout", "step", "tokens/s", "math", "memory", "network", "bubble, hops", "GB per GPU", "why")
    for t in shown:
        network = max(t.comms_s.values(), default=0.0)
        seconds = (t.math_s, t.memory_s, network, t.fixed_s)
        table.add_row(
            _name(t, gpus),
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
    if loss:
        extra = output.ms_text(loss.slower_s)
        cause = f", {extra} more: {output.ms_text(loss.cause_s)} more for {loss.cause}" if loss.slower_s > 0 else ""
        output.rows(
            (
                "asked for",
                f"{_name(loss.time, gpus)}: {output.ms_text(loss.time.step_s)}, {loss.factor:.2f} x the best, number"
                f" {loss.rank} of {len(found.ranked)}{cause}",
            ),
            ("", loss.time.why),
        )
    for refusal in found.refused[:_SHOWN]:
        output.stdout.print(f"refused: {refusal.layout}: {refusal.why}")
    if len(found.refused) > _SHOWN:
        output.stdout.print(f"and {len(found.refused) - _SHOWN} more refused")
    return 0


def _name(time: LayoutTime, gpus: int) -> str:
    idle = gpus - time.layout.gpus
    return f"{time.layout}, {idle:,} GPUs idle" if idle else str(time.layout)


def _time_json(time: LayoutTime, gpus: int) -> dict[str, Any]:
    return asdict(time) | {"name": str(time.layout), "step_s": time.step_s, "idle_gpus": gpus - time.layout.gpus}


def _shape(args: argparse.Namespace) -> Shape:
    """Return the model's sizes. The flags give the bytes per weight and the limit of router nodes."""
    shape = paper_shape(args.model)
    if args.router_nodes and shape.experts == 1:
        raise MegakernelError(f"--router-nodes needs a mixture-of-experts model, which {args.model} is not")
    nodes = args.router_nodes or shape.router_nodes
    return replace(shape, weight_bytes=args.weight_bits / 8, router_nodes=nodes)


def run_fleet(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import best, fleet

    shape = _shape(args)
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
        ("model", f"{shape.name}, {args.weight_bits}-bit weights, {args.context:,} KV tokens a sequence"),
        ("fleet", f"{gpus:,} x {hardware.name}, {price}"),
        ("best", f"{_group(chosen)}, {chosen.batch:,} sequences a group, {chosen.tokens_per_s:,.0f} tokens/s{within}"),
    )
    table = output.table(
        "group", "groups", "sequences", "step", "tokens/s", "per GPU", "bound by", "GB per GPU", "USD per M tokens"
    )
    for s in sorted(servings, key=lambda s: (s.tp, s.ep, s.batch)):
        table.add_row(
            _group(s),
            f"{s.replicas:,}",
            f"{s.batch:,}",
            output.ms_text(s.step_s),
            f"{s.tokens_per_s:,.0f}",
            f"{s.tokens_per_s / s.gpus:,.0f}",
            s.bound,
            f"{s.bytes_per_gpu / 1e9:,.1f}",
            f"{s.usd_per_million_tokens(usd or 1.0):,.3f}",
            style="bold" if s == chosen else None,
        )
    output.stdout.print(table)
    return 0


def _group(serving: Serving) -> str:
    """Return the name of a group of GPUs, in the form used for layouts."""
    return f"TP {serving.tp} x EP {serving.ep}" if serving.ep > 1 else f"TP {serving.tp}"


def _serving_json(serving: Serving, hardware: Hardware, usd: float | None) -> dict[str, Any]:
    return asdict(serving) | {
        "gpu_hours_per_million_tokens": serving.usd_per_million_tokens(1.0),
        "usd_per_million_tokens": serving.usd_per_million_tokens(usd) if usd else None,
        "tokens_per_joule": serving.tokens_per_joule(hardware.chip.board_w) if hardware.chip.board_w else None,
    }
