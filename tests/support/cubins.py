"""Cubins of csrc/cuda, each compiled once for all tests of a run."""

from __future__ import annotations

import pickle
from pathlib import Path

from built_once import built_once

from megakernel.isa import Units
from megakernel.isa.launch import Ablation
from megakernel.runtime.cuda.compile import Compiler, Cubin

_COMPILE = Compiler.compile


def compiled(compiler: Compiler, *, trace: bool, units: Units, ablation: Ablation = Ablation.NONE) -> Cubin:
    """What `compiler.compile` returns."""

    def make(target: Path) -> None:
        target.write_bytes(pickle.dumps(_COMPILE(compiler, trace=trace, units=units, ablation=ablation)))

    name = f"{compiler.version} {trace:d} {units:d} {ablation:d}.cubin"
    cubin: Cubin = pickle.loads(built_once(name, make).read_bytes())
    return cubin
