"""Declares the flags that choose a benchmark's requests, and makes the requests. Flags that vLLM has too have the same
names as in vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import output
from .options import add_count

if TYPE_CHECKING:
    from megakernel.serving.bench import Workload

_SHAREGPT = "sharegpt"
_UNLESS = {"dataset": _SHAREGPT, "random_input_len": 1024, "random_output_len": 128}


def add_workload(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Add the flags that choose the requests. `args.unless` has the defaults of flags that are not given. A verb may
    change these defaults before it calls `workload`.
    """
    parser.set_defaults(unless=_UNLESS | {"num_prompts": prompts})
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="sharegpt (lengths of public ShareGPT conversations, random ids), random, a ShareGPT-format .json file, "
        f"or a .csv file of prompt and output tokens (default: {_SHAREGPT})",
    )
    add_count(parser, "--num-prompts", None, f"requests (default: {prompts})")
    add_count(parser, "--random-input-len", None, f"random: tokens per prompt (default: {_UNLESS['random_input_len']})")
    add_count(
        parser, "--random-output-len", None, f"random: tokens per answer (default: {_UNLESS['random_output_len']})"
    )
    parser.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="--dataset random: each length differs from the given length by up to this fraction (default: 0)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for choosing, ordering and generating prompts (default: 0)"
    )


def workload(args: argparse.Namespace, vocab: int, encode: Callable[[str], Sequence[int]]) -> Workload:
    """Return the requests that the flags of `add_workload` describe."""
    from megakernel.serving.bench import workload as made

    for name, value in args.unless.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dataset == _SHAREGPT:
        return made.sharegpt_lengths(args.num_prompts, vocab, args.seed)
    if args.dataset == "random":
        lengths = args.random_input_len, args.random_output_len, args.random_range_ratio
        return made.uniform(*lengths, args.num_prompts, vocab, args.seed)
    path = Path(args.dataset)
    if path.suffix == ".csv":
        return made.length_pairs(path, args.num_prompts, vocab, args.seed)
    with output.busy(f"reading {path.name}"):
        return made.sharegpt_file(path, encode, args.num_prompts, args.seed)
