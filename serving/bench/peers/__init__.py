"""Other programs on the same model and machine: which there are, and how they get our weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ....errors import MegakernelError
from ....model import gguf_path, open_checkpoint
from ...llm import LLM
from . import llama_cpp, torch_llama
from .contest import Contest, Peer, Phase, Task, Work
from .llama_bench import LlamaBench, tool
from .process import Process

__all__ = ["Contest", "Found", "Phase", "Work", "contests", "find"]

# Name, the packages that run it, and how to install them.
_PACKAGES = {
    llama_cpp.NAME: (("llama_cpp",), "pip install llama-cpp-python, or name a native build with --llama-bench PATH"),
    torch_llama.NAME: (("torch", "transformers"), "pip install torch transformers"),
}


@dataclass(frozen=True)
class Found:
    """A peer that can be opened; `gguf`: it reads the model from such a file."""

    name: str
    open: Callable[[Task], Peer]
    gguf: bool


def find(names: Sequence[str], llama_bench: Path | None, *, batched: bool) -> list[Found]:
    """The peers of these names. `llama_bench`: a native build's program or folder; `batched`: for many sequences.

    Raises MegakernelError where one is missing.
    """
    for name in names:
        if name not in _PACKAGES:
            raise MegakernelError(f"no program {name!r} to compare with: known are {', '.join(_PACKAGES)}")
    if llama_bench is not None and llama_cpp.NAME not in names:
        raise MegakernelError(f"--llama-bench names llama.cpp's own benchmark: add --vs {llama_cpp.NAME}")
    return [_find(name, llama_bench, batched) for name in names]


def _find(name: str, llama_bench: Path | None, batched: bool) -> Found:
    if name == llama_cpp.NAME and llama_bench is not None:
        return Found(name, partial(LlamaBench, tool(llama_bench.expanduser(), batched)), gguf=True)
    packages, remedy = _PACKAGES[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MegakernelError(f"{name} is not installed ({', '.join(missing)} is missing): {remedy}")
    module = llama_cpp if name == llama_cpp.NAME else torch_llama
    return Found(name, partial(Process, name, module.__name__), gguf=module is llama_cpp)


@contextmanager
def contests(
    found: Sequence[Found], llm: LLM, model: str, weights: str, work: Work, phases: Sequence[Phase]
) -> Iterator[list[Contest]]:
    """The peers, ready to run what `llm` has loaded: `model`, with `weights` as the flag of that name says.

    A GGUF file goes to them as it is, if its weights are not converted; anything else is written into one, once.
    """
    dtype = llm.dtype.name.lower()
    with ExitStack() as stack:
        file, kind = None, next(iter(llm.weight_bytes))  # that of most of our bytes
        if any(one.gguf for one in found):
            file = gguf_path(model) if weights == "auto" else None
            if file is not None:
                kind = f"as in {file.name}"
            else:
                from ....model.gguf_writer import write_gguf
                from ....model.stored import WEIGHT_TYPES

                file = Path(stack.enter_context(TemporaryDirectory(prefix="megakernel-"))) / "model.gguf"
                write_gguf(open_checkpoint(model), file, WEIGHT_TYPES[kind])
        gpu = llm.engine.backend.name == "cuda"
        task = Task(model, str(file) if file else None, kind, dtype, llm.threads, gpu, work)
        opened = []
        for one in found:
            peer = one.open(task)
            stack.callback(peer.close)
            opened.append(Contest(peer, work, phases))
        yield opened
