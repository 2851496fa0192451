"""Compiles the CUDA interpreter (csrc/cuda) for tests. Each variant is compiled only once per test run."""

from __future__ import annotations

import pickle
from pathlib import Path

from built_once import built_once

from megakernel.isa import Units
from megakernel.runtime.cuda.compile import Compiler, Cubin
from megakernel.runtime.cuda.params import Ablation

_COMPILE = Compiler.compile


def compiled(
    compiler: Compiler, *, trace: bool, units: Units, sms: int = 1, ablation: Ablation = Ablation.NONE
) -> Cubin:
    """Return the cubin that `compiler.compile` returns. Only the first call in a test run compiles this cubin.

    Later calls, also in other processes of the test run, read it from a file.
    """

    def make(target: Path) -> None:
        target.write_bytes(pickle.dumps(_COMPILE(compiler, trace=trace, units=units, sms=sms, ablation=ablation)))

    name = f"{compiler.version} {trace:d} {units:d} {sms} {ablation:d}.cubin"
    cubin: Cubin = pickle.loads(built_once(name, make).read_bytes())
    return cubin
