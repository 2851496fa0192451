"""`megakernel roofline`: what the hardware allows, before anything has run."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import MegakernelError
from . import output
from .options import AddVerb, add_setting, paper_dtype, positive

if TYPE_CHECKING:
    from ..machine import Hardware
    from ..model import LlamaConfig
    from ..roofline import InstructionCost, LayoutTime, Part, Point, Serving, Shape, StepRoofline

_CONTEXT, _TRAINING_CONTEXT = 128, 4096
_SHOWN = 12  # layouts in a table


def register(add: AddVerb) -> None:
    parser = add(
        "roofline",
        "least time of a step on a machine and what binds it; ways to share a model over many GPUs; a fleet's cost",
        "megakernel roofline --model random:llama-3.1-70b --machine h100x8 --tp 8 --tokens 1024 --plot roof.svg",
    )
    for name in ("model", "machine", "dtype", "tp", "o lowering", "residual"):
        add_setting(parser, name)
    parser.add_argument(
        "--tokens",
        type=positive,
        default=1,
        metavar="B",
        help="rows of a step, one for each sequence; in a plan for training tokens of a batch (default: 1)",
    )
    parser.add_argument(
        "--context",
        type=positive,
        metavar="C",
        help=f"KV tokens of each sequence (default: {_CONTEXT}), or length of one in training ({_TRAINING_CONTEXT})",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure as .svg or .html")
    parser.add_argument(
        "--achieved",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="add a measured point to the figure: a file with what `bench latency --json` printed",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="rank all ways to share the model over --gpus")
    what.add_argument("--fleet", action="store_true", help="serve with --gpus: tokens per second, what binds, cost")
    parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs of a plan or fleet (default: a node)")
    parser.add_argument("--training", action="store_true", help="plan a step of training")
    parser.add_argument(
        "--usd-per-gpu-hour", type=_price, metavar="USD", help="price that a fleet's tokens are reckoned with"
    )
    parser.add_argument(
        "--token-ms", type=_price, metavar="MS", help="fleet: most milliseconds between a sequence's tokens"
    )
    parser.set_defaults(run=run)


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    _check(args)
    hardware = _hardware(args)
    if args.plan:
        return _plan(args, hardware)
    if args.fleet:
        return _fleet(args, hardware)
    return _step(args, hardware)


def _check(args: argparse.Namespace) -> None:
    """What cannot be said together. Silence about a flag would be a wrong answer."""
    paper = args.plan or args.fleet
    for flag, given, needed, there in (
        ("--gpus", args.gpus, "--plan or --fleet", paper),
        ("--training", args.training, "--plan", args.plan),
        ("--usd-per-gpu-hour", args.usd_per_gpu_hour, "--fleet", args.fleet),
        ("--token-ms", args.token_ms, "--fleet", args.fleet),
        ("--achieved", args.achieved, "--plot", args.plot),
        ("--plot", args.plot and paper, "neither --plan nor --fleet", False),
    ):
        if given and not there:
            raise MegakernelError(f"{flag} needs {needed}")
    if args.plot and args.plot.suffix not in (".svg", ".html"):
        raise MegakernelError(f"cannot plot to {args.plot}: its name must end in .svg or .html")


def _hardware(args: argparse.Namespace) -> Hardware:
    """The machine; this one as measured now."""
    from .. import machine as machines

    if args.machine != machines.HOST:
        return machines.hardware(args.machine)
    from ..serving import ceilings

    with output.busy("measuring this machine's ceilings"):
        measured = ceilings.host_ceilings(machines.cpu_count())
    return machines.host_hardware(measured.flops, measured.read_bytes_per_s)


# -- a step


def _step(args: argparse.Namespace, hardware: Hardware) -> int:
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
    context = args.context or _CONTEXT
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
    comms = f"{_ms(facts['t_comms_s'])}, {output.bytes_text(facts['sent_bytes'])} sent"
    if facts["t_latency_s"]:
        comms += f"; {_ms(facts['t_latency_s'])} of it hops"
    if measured:
        comms += f"; {_ms(measured)} at the bandwidth measured for such messages"
    lowering = facts["lowering"]
    how = f", O {lowering['o']}, residual {lowering['residual']}" if lowering else ""
    fits = "fits" if memory["fits"] else "does not fit"
    output.rows(
        ("model", f"{facts['model']}, {facts['dtype']}"),
        ("machine", f"{facts['machine']}, tp {facts['tp']}{how}"),
        ("step", f"{_rows(facts['tokens'])} with {facts['context']:,} KV tokens each"),
        ("at least", f"{_ms(facts['step_s'])}, {facts['tokens_per_s']:,.1f} tokens/s, bound by {facts['bound']}"),
        ("  arithmetic", f"{_ms(facts['t_math_s'])}, {facts['flops'] / 1e12:,.3f} TFLOP per rank"),
        ("  memory", f"{_ms(facts['t_memory_s'])}, {output.bytes_text(facts['memory_bytes'])} per rank"),
        ("  link", comms),
        ("  no overlap", _ms(facts["step_without_overlap_s"])),
        ("critical rows", f"{facts['critical_rows']:,.0f} for arithmetic to take as long as the weights"),
        (
            "memory",
            f"{memory['needed_bytes'] / gb:,.2f} of {memory['memory_bytes'] / gb:,.1f} GB, {fits}: weights"
            f" {memory['weight_bytes'] / gb:,.2f}, KV {memory['kv_bytes'] / gb:,.2f}, activations"
            f" {memory['activation_bytes'] / gb:,.2f}; at most {memory['sequences_at_most']:,} such sequences",
        ),
    )
    columns = ["instruction", "family", "GFLOP", "MB read", "MB sent", "math", "memory", "link"]
    table = _table(*columns, *(["measured"] if measured else []), "bound by")
    for c in step.instructions:
        work = (c.matrix_flops + c.vector_flops) / 1e9, c.memory_bytes / 1e6, c.sent_bytes / 1e6
        times = [max(c.math_s, c.vector_s), c.memory_s, c.comms_s]
        times += [c.comms_measured_s or 0.0] if measured else []
        cells = [f"{w:,.2f}" if w else "" for w in work] + [_us(t) for t in times]
        table.add_row(c.instruction, c.family.name.lower(), *cells, c.bound if any(times) else "")
    output.stdout.print(table)


# -- many GPUs


def _shape(name: str) -> Shape:
    from ..model import load_config
    from ..roofline import SHAPES, shape_of

    return SHAPES[name] if name in SHAPES else shape_of(name, load_config(name))


def _plan(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import plan

    shape = _shape(args.model)
    context = args.context or (_TRAINING_CONTEXT if args.training else _CONTEXT)
    gpus = args.gpus or hardware.node.gpus
    found = plan(shape, hardware, gpus, args.tokens, context, training=args.training)
    if args.json:
        output.emit(
            {
                "model": args.model,
                "machine": args.machine,
                "gpus": gpus,
                "tokens": args.tokens,
                "context": context,
                "training": args.training,
                "ranked": [_layout_json(t) for t in found.ranked],
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
        ("step", f"{args.tokens:,} {what} ({per_gpu}), sequences of {context:,}"),
    )
    # State that is sharded less takes as long and more memory: one line for each way to cut the work.
    cuts = {replace(t.layout, zero=0): t for t in reversed(found.ranked)}
    shown = sorted(cuts.values(), key=found.ranked.index)[:_SHOWN]
    table = _table("layout", "step", "tokens/s", "math", "memory", "network", "bubble, hops", "GB per GPU", "why")
    for t in shown:
        network = max(t.comms_s.values(), default=0.0)
        seconds = (t.math_s, t.memory_s, network, t.fixed_s)
        table.add_row(
            str(t.layout),
            _ms(t.step_s),
            f"{t.tokens_per_s:,.0f}",
            *(_ms(s) if s else "" for s in seconds),
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


def _layout_json(time: LayoutTime) -> dict[str, Any]:
    return asdict(time) | {"name": str(time.layout), "step_s": time.step_s}


def _fleet(args: argparse.Namespace, hardware: Hardware) -> int:
    from ..roofline import best, fleet

    shape = _shape(args.model)
    context = args.context or _CONTEXT
    gpus = args.gpus or hardware.node.gpus
    servings = fleet(shape, hardware, gpus, context)
    limit_s = args.token_ms / 1e3 if args.token_ms else math.inf
    chosen = best(shape, hardware, gpus, context, limit_s)
    if chosen not in servings:
        servings.append(chosen)
    usd = args.usd_per_gpu_hour or hardware.chip.usd_per_hour
    if args.json:
        output.emit(
            {
                "model": args.model,
                "machine": args.machine,
                "gpus": gpus,
                "context": context,
                "usd_per_gpu_hour": usd,
                "best": _serving_json(chosen, hardware, usd),
                "servings": [_serving_json(s, hardware, usd) for s in servings],
            }
        )
        return 0
    price = f"{usd:g} USD per GPU-hour" if usd else "1 USD per GPU-hour (give --usd-per-gpu-hour)"
    within = f" with at most {args.token_ms:g} ms a token" if args.token_ms else ""
    output.rows(
        ("model", f"{shape.name}, bf16, {context:,} KV tokens a sequence"),
        ("fleet", f"{gpus:,} x {hardware.name}, {price}"),
        ("best", f"tp {chosen.tp}, {chosen.batch:,} sequences a group, {chosen.tokens_per_s:,.0f} tokens/s{within}"),
    )
    table = _table(
        "tp", "groups", "sequences", "step", "tokens/s", "per GPU", "bound by", "GB per GPU", "USD per M tokens"
    )
    sizes = sorted({s.tp for s in servings})
    for tp in sizes:
        for s in sorted((s for s in servings if s.tp == tp), key=lambda s: s.batch):
            table.add_row(
                str(s.tp),
                f"{s.replicas:,}",
                f"{s.batch:,}",
                _ms(s.step_s),
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


# -- text


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(names):
        text = name in ("instruction", "family", "layout", "why", "bound by")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=i == 0)
    return table


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.4g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds else ""
