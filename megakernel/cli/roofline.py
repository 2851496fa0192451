"""`megakernel roofline`: the least time that the hardware allows for each operation of a step."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from .. import machine as machines
from ..errors import MegakernelError
from ..isa import OperationFamily
from ..roofline import PhasePart, memory_fit, step_roofline
from ..roofline.program_step import rate_of
from ..units import bytes_text, seconds
from . import output, roofline_ask
from .options import STORED, lowering, paper_model, verb
from .this_machine import hardware_of

_FLAGS = f"""
model machine tensor_parallel_size enable_expert_parallel o_lowering residual norm dtype {STORED}
--tokens | count | 1 | rows of a step, one for each sequence
--context | count | 128 | KV tokens of each sequence
"""


@verb("roofline", _FLAGS, roofline_ask.add_ask, queue="auto", matmul="auto")
def run(args: argparse.Namespace) -> int:
    from megakernel.scheduler import Spec
    from megakernel.scheduler.candidates import lowered
    from megakernel.scheduler.describe import lowering as lowering_of
    from megakernel.serving.engine.memory import weight_bytes

    hardware = hardware_of(args.machine)
    if args.tensor_parallel_size > hardware.node.gpus:
        raise MegakernelError(f"--tp must be at most {hardware.node.gpus}, the devices in a node of {hardware.name}")
    context, machine = args.context, machines.load(args.machine)
    config, how = paper_model(args, machine, context)
    how |= dict.fromkeys(("tokens", "logit_rows", "max_seqs"), args.tokens)
    spec = Spec(config, machine, max_context=context, tp=args.tensor_parallel_size, options=lowering(args), **how)
    tasks = lowered(spec)
    forward, ranks = tasks.forward, tasks.dims.ranks
    parts = [
        PhasePart(each.phase, each.columns, ranks[each.rank], runs)
        for segment, runs in zip(tasks.segments, (1, tasks.dims.model.layers, 1), strict=True)
        for each in segment
    ]
    (step, phases), rate = step_roofline(parts, hardware, context), rate_of(tasks.dims.model, hardware)
    step_s, times = max(step.seconds), ("math_s", "vector_s", "memory_s", "comms_s", "latency_s", "comms_measured_s")
    matmuls = [c for phase, c in phases.items() if c.matrix_flops and phase.family is OperationFamily.MATMUL]
    # A weight costs 2 FLOPs per row, so the number of weights is FLOPs / (2 x rows).
    per_weight = 2 * args.tokens * sum(c.memory_bytes for c in matmuls) / sum(c.matrix_flops for c in matmuls)
    weights = max(weight_bytes(forward, dims.split, tied=config.tied) for dims in ranks)
    fit = memory_fit(ranks, weights, hardware.chip.hbm_bytes, args.tokens, context)
    facts = {
        "model": args.model,
        "machine": args.machine,
        "tp": args.tensor_parallel_size,
        "tokens": args.tokens,
        "context": context,
        "dtype": rate,
        "lowering": lowering_of(tasks.dims, forward),
        **{f"t_{name}": getattr(step, name) for name in times},
        "flops": step.matrix_flops,
        "memory_bytes": step.memory_bytes,
        "sent_bytes": step.sent_bytes,
        "bound": step.bound,
        "step_s": step_s,
        "step_without_overlap_s": sum(step.seconds),
        "tokens_per_s": args.tokens / step_s,
        "flops_per_byte": step.matrix_flops / step.memory_bytes,
        "critical_rows": hardware.critical_rows(rate, per_weight),
        "memory": fit,
        "instructions": [
            {"instruction": phase.name, "family": phase.family.name.lower(), **asdict(c), "bound": c.bound}
            | {"message_bytes": c.sent_bytes / c.hops if c.hops else 0.0}
            for phase, c in phases.items()
        ],
    }
    if args.json:
        output.emit(facts)
    else:
        _show_step(facts)
    return 0


def _show_step(facts: dict[str, Any]) -> None:
    memory, gb = facts["memory"], 1e9
    measured = facts["t_comms_measured_s"]
    comms = f"{seconds(facts['t_comms_s'])}, {bytes_text(facts['sent_bytes'])} sent"
    if facts["t_latency_s"]:
        comms += f"; {seconds(facts['t_latency_s'])} of it for hops"
    if measured:
        comms += f"; {seconds(measured)} at the bandwidth measured for such messages"
    fits = "fits" if memory["fits"] else "does not fit"
    output.rows(
        ("model", f"{facts['model']}, {facts['dtype']}"),
        ("machine", f"{facts['machine']}, tp {facts['tp']}"),
        ("lowering", output.lowering_text(facts["lowering"])),
        ("step", f"{facts['tokens']:,} row{'s' * (facts['tokens'] > 1)} with {facts['context']:,} KV tokens each"),
        (
            "at least",
            f"{seconds(facts['step_s'])}, {facts['tokens_per_s']:,.1f} tokens/s, bound by {facts['bound']}",
        ),
        ("  arithmetic", f"{seconds(facts['t_math_s'])}, {facts['flops'] / 1e12:,.3f} TFLOP per rank"),
        ("  memory", f"{seconds(facts['t_memory_s'])}, {bytes_text(facts['memory_bytes'])} per rank"),
        ("  link", comms),
        ("  no overlap", seconds(facts["step_without_overlap_s"])),
        ("critical rows", f"{facts['critical_rows']:,.0f} for arithmetic to take as long as reading the weights"),
        (
            "memory",
            f"{memory['needed_bytes'] / gb:,.2f} of {memory['memory_bytes'] / gb:,.1f} GB, {fits}: weights"
            f" {memory['weight_bytes'] / gb:,.2f}, KV {memory['kv_bytes'] / gb:,.2f}, activations"
            f" {memory['activation_bytes'] / gb:,.2f}; at most {memory['sequences_at_most']:,} such sequences",
        ),
    )
    columns = ["phase", "GFLOP", "MB\nread", "MB\nsent", "math\nus", "memory\nus", "link\nus"]
    table = output.table(*columns, *(["measured\nus"] if measured else []), "bound by")
    for c in facts["instructions"]:
        work = (c["matrix_flops"] + c["vector_flops"]) / 1e9, c["memory_bytes"] / 1e6, c["sent_bytes"] / 1e6
        times = [max(c["math_s"], c["vector_s"]), c["memory_s"], c["comms_s"]]
        times += [c["comms_measured_s"] or 0.0] if measured else []
        cells = [_figure(w, 2) for w in work] + [_figure(t * 1e6, 1) for t in times]
        table.add_row(c["instruction"], *cells, c["bound"] if any(times) else "")
    output.stdout.print(table)


def _figure(value: float, decimals: int) -> str:
    """Format a number so that a line of the table fits into 80 columns. The number 0 gives an empty text."""
    return f"{value:,.{0 if value >= 100 else decimals}f}" if value else ""
