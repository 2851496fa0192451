"""`megakernel roofline`: the least time of a step on a node, by instruction, and the figure."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import output
from .options import paper_dtype

if TYPE_CHECKING:
    from ..machine import Hardware
    from ..model import LlamaConfig
    from ..roofline import InstructionCost, Part, Point, StepRoofline


def run(args: argparse.Namespace, hardware: Hardware) -> int:
    from .. import machine as machines
    from ..model import load_config
    from ..roofline import SHAPES, memory_fit, step_roofline
    from ..roofline.kernels import critical_rows
    from ..roofline.program_step import RATE
    from ..serving.memory import weight_bytes

    if args.model in SHAPES:
        raise MegakernelError(f"{args.model} is known on paper only: add --plan or --fleet")
    if args.tp > hardware.node.gpus:
        raise MegakernelError(f"{hardware.name} has {hardware.node.gpus} devices in a node: lower --tp, or take --plan")
    config = load_config(args.model)
    context = args.context
    if context > config.max_context:
        raise MegakernelError(f"context {context} is more than the {config.max_context} the model was made for")
    dtype = paper_dtype(args.dtype)
    parts = _parts(args, config, machines.load(args.machine), dtype, context)
    dims = parts[0].dims
    ranks = [replace(dims, rank=rank) for rank in range(args.tp)]
    step = step_roofline(parts, hardware, context)
    weights = max(weight_bytes(d, tied=config.tied) for d in ranks)
    fit = memory_fit(ranks, weights, hardware.chip.hbm_bytes, args.tokens, context)
    lowering = None
    if args.tp > 1:
        lowering = {
            "o": "replicated" if dims.replicated_o else "sharded",
            "residual": "replicated" if dims.one_hop else "dealt",
        }
    facts = {
        "model": args.model,
        "machine": args.machine,
        "tp": args.tp,
        "tokens": args.tokens,
        "context": context,
        "dtype": RATE[dtype],
        "lowering": lowering,
        **{key: value for key, value in asdict(step).items() if key != "instructions"},
        "bound": step.bound,
        "step_s": step.step_s,
        "step_without_overlap_s": step.step_without_overlap_s,
        "tokens_per_s": args.tokens / step.step_s,
        "flops_per_byte": step.flops_per_byte,
        "critical_rows": critical_rows(hardware, RATE[dtype]),
        "memory": asdict(fit) | {"needed_bytes": fit.needed_bytes, "fits": fit.fits},
        "instructions": [_cost_json(c) for c in step.instructions],
    }
    if args.plot:
        from ..roofline import render_plot

        title = f"{args.model}, {_rows(args.tokens)} with a context of {context}, tp {args.tp}"
        points = [*_points(step), *(point for path in args.achieved for point in _achieved(path))]
        svg = render_plot(hardware, points, title, RATE[dtype])
        style = "<style>body{margin:0}svg{display:block;width:100vw;height:100vh}</style>"
        page = f"<!doctype html><meta charset=utf-8><title>Roofline</title>{style}{svg}"
        args.plot.write_text(svg if args.plot.suffix == ".svg" else page)
        output.stderr.print(f"wrote {args.plot}")
    if args.json:
        output.emit(facts)
    else:
        _show_step(facts, step)
    return 0


def _cost_json(cost: InstructionCost) -> dict[str, Any]:
    more = {"family": cost.family.name.lower(), "message_bytes": cost.message_bytes, "bound": cost.bound}
    return asdict(cost) | more


def _parts(args: argparse.Namespace, config: LlamaConfig, machine: Any, dtype: Any, context: int) -> list[Part]:
    """The instructions that the compiler would make, each rank's."""
    from ..roofline import Part
    from ..scheduler import Options
    from ..scheduler.choose import choose
    from ..scheduler.lower import lower, program_dims

    dims = program_dims(
        config,
        machine,
        dtype=dtype,
        tokens=args.tokens,
        logit_rows=args.tokens,
        max_seqs=args.tokens,
        max_context=context,
        tp=args.tp,
    )
    tasks = lower(choose(dims, machine, Options(o=args.o_lowering, residual=args.residual)), machine)
    return [
        Part(phase.instruction, phase.columns, replace(tasks.dims, rank=phase.rank), runs)
        for phases, runs in zip(tasks.segments, (1, tasks.dims.layers, 1), strict=True)
        for phase in phases
    ]


def _points(step: StepRoofline) -> list[Point]:
    """What each instruction that reads memory and multiplies may reach, and the whole step."""
    from ..roofline import Mark, Point

    out = []
    for c in step.instructions:
        if c.matrix_flops and c.memory_bytes:
            seconds = max(c.math_s, c.vector_s, c.memory_s, c.comms_s)
            figures = c.matrix_flops / c.memory_bytes, c.matrix_flops / seconds
            out.append(Point(c.instruction, *figures, family=c.family))
    return [*out, Point("whole step", step.flops_per_byte, step.flops / step.step_s, Mark.STEP)]


def _achieved(path: Path) -> list[Point]:
    """Decode and prefill of a benchmark's JSON."""
    from ..roofline import Mark, Point

    try:
        measured = json.loads(path.read_text())
    except OSError as e:
        raise MegakernelError(f"cannot read {path}: {e.strerror}") from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise MegakernelError(f"{path} is not JSON: {e}") from e
    out = []
    decode = measured if isinstance(measured, dict) else {}
    for name, figures in (("", decode), (" prefill", decode.get("prefill"))):
        if not isinstance(figures, dict) or not {"gflops", "read_GBps"} <= set(figures):
            continue
        try:
            flops, read = float(figures["gflops"]), float(figures["read_GBps"])
        except (TypeError, ValueError) as e:
            raise MegakernelError(f"{path}: gflops and read_GBps must be numbers") from e
        out.append(Point(path.stem + name, flops / read if read > 0 else 0.0, flops * 1e9, Mark.ACHIEVED))
    if not out:
        raise MegakernelError(f"{path} has no gflops and read_GBps: take what `megakernel bench latency --json` prints")
    return out


def _show_step(facts: dict[str, Any], step: StepRoofline) -> None:
    memory, gb = facts["memory"], 1e9
    measured = facts["t_comms_measured_s"]
    comms = f"{output.ms_text(facts['t_comms_s'])}, {output.bytes_text(facts['sent_bytes'])} sent"
    if facts["t_latency_s"]:
        comms += f"; {output.ms_text(facts['t_latency_s'])} of it hops"
    if measured:
        comms += f"; {output.ms_text(measured)} at the bandwidth measured for such messages"
    lowering = facts["lowering"]
    how = f", O {lowering['o']}, residual {lowering['residual']}" if lowering else ""
    fits = "fits" if memory["fits"] else "does not fit"
    output.rows(
        ("model", f"{facts['model']}, {facts['dtype']}"),
        ("machine", f"{facts['machine']}, tp {facts['tp']}{how}"),
        ("step", f"{_rows(facts['tokens'])} with {facts['context']:,} KV tokens each"),
        (
            "at least",
            f"{output.ms_text(facts['step_s'])}, {facts['tokens_per_s']:,.1f} tokens/s, bound by {facts['bound']}",
        ),
        ("  arithmetic", f"{output.ms_text(facts['t_math_s'])}, {facts['flops'] / 1e12:,.3f} TFLOP per rank"),
        ("  memory", f"{output.ms_text(facts['t_memory_s'])}, {output.bytes_text(facts['memory_bytes'])} per rank"),
        ("  link", comms),
        ("  no overlap", output.ms_text(facts["step_without_overlap_s"])),
        ("critical rows", f"{facts['critical_rows']:,.0f} for arithmetic to take as long as the weights"),
        (
            "memory",
            f"{memory['needed_bytes'] / gb:,.2f} of {memory['memory_bytes'] / gb:,.1f} GB, {fits}: weights"
            f" {memory['weight_bytes'] / gb:,.2f}, KV {memory['kv_bytes'] / gb:,.2f}, activations"
            f" {memory['activation_bytes'] / gb:,.2f}; at most {memory['sequences_at_most']:,} such sequences",
        ),
    )
    columns = ["instruction", "family", "GFLOP", "MB read", "MB sent", "math", "memory", "link"]
    table = output.table(*columns, *(["measured"] if measured else []), "bound by")
    for c in step.instructions:
        work = (c.matrix_flops + c.vector_flops) / 1e9, c.memory_bytes / 1e6, c.sent_bytes / 1e6
        times = [max(c.math_s, c.vector_s), c.memory_s, c.comms_s]
        times += [c.comms_measured_s or 0.0] if measured else []
        cells = [f"{w:,.2f}" if w else "" for w in work] + [_us(t) for t in times]
        table.add_row(c.instruction, c.family.name.lower(), *cells, c.bound if any(times) else "")
    output.stdout.print(table)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds else ""
