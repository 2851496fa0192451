"""Peers: other inference programs that run the same model on the same machine, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from megakernel.errors import MegakernelError
from megakernel.model import gguf_path, open_checkpoint
from megakernel.serving.bench.peers import llama_bench, torch_llama
from megakernel.serving.bench.peers.contest import Contest, Peer, Task, Timed, Trial
from megakernel.serving.bench.peers.process import Process
from megakernel.serving.text.llm import LLM


@dataclass(frozen=True)
class InstalledPeer:
    """A peer (another inference program) that is installed. `gguf` says that it reads the model from a GGUF file."""

    open: Callable[[Task], Peer]
    gguf: bool


def find(names: Sequence[str], build: Path | None, *, batched: bool) -> list[InstalledPeer]:
    """Return the peers (other inference programs) with these names. `build` is the program `llama-bench` or the folder
    of a llama.cpp build; without it, the program on PATH is used. `batched` selects llama.cpp's benchmark for many
    sequences. Raises MegakernelError if a peer is not installed."""
    if build is not None and llama_bench.NAME not in names:
        raise MegakernelError(f"--llama-bench applies only to the peer llama.cpp: add --vs {llama_bench.NAME}")
    found = []
    for name in names:
        if name == llama_bench.NAME:
            program = llama_bench.tool(build and build.expanduser(), batched)
            found.append(InstalledPeer(partial(llama_bench.LlamaBench, program), gguf=True))
        elif name == torch_llama.NAME:
            if missing := [package for package in ("torch", "transformers") if find_spec(package) is None]:
                lacks = ", ".join(missing)
                raise MegakernelError(f"{name} is not installed ({lacks} is missing): pip install torch transformers")
            found.append(InstalledPeer(partial(Process, name, torch_llama.__name__), gguf=False))
        else:
            raise MegakernelError(f"cannot compare with {name!r}: choose from {llama_bench.NAME}, {torch_llama.NAME}")
    return found


@contextmanager
def contests(
    found: Sequence[InstalledPeer], llm: LLM, model: str, weights: str, work: Trial, phases: Sequence[Timed]
) -> Iterator[list[Contest]]:
    """Yield a comparison with each peer (another inference program), which runs the model that `llm` has loaded.
    `weights` is the value of the flag --weights. If it is "auto" and the model is a GGUF file, peers that read GGUF get
    this file. Otherwise these peers get a temporary GGUF file, to which the weights are written."""
    dtype = llm.dtype.name.lower()
    with ExitStack() as stack:
        file, kind = None, next(iter(llm.weight_bytes))  # `kind` is the type that most weights of `llm` have
        if any(one.gguf for one in found):
            file = gguf_path(model) if weights == "auto" else None
            if file is not None:
                kind = f"as in {file.name}"
            else:
                from megakernel.model.gguf_writer import write_gguf
                from megakernel.model.weight_types import WEIGHT_TYPES

                file = Path(stack.enter_context(TemporaryDirectory(prefix="megakernel-"))) / "model.gguf"
                write_gguf(open_checkpoint(model), file, WEIGHT_TYPES[kind])
        gpu = llm.engine.backend.name == "cuda"
        quantised_kv = bool(llm.engine.dims.model.quantised_kv)
        task = Task(model, str(file) if file else None, kind, dtype, llm.threads, gpu, work, quantised_kv)
        opened = []
        for one in found:
            peer = one.open(task)
            stack.callback(peer.close)
            opened.append(Contest(peer, work, phases))
        yield opened
