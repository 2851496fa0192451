"""Compiles the CUDA interpreter (csrc/cuda) for tests, once for each content of its sources."""

import pickle
from pathlib import Path

from built_once import built_once

from megakernel.runtime.cuda import compile
from megakernel.runtime.cuda.compile import Build, Cubin

_COMPILE = compile.compiled


def compiled(build: Build) -> Cubin:
    """Return what `compile.compiled` returns. Only the first call for these sources compiles it."""

    def make(target: Path) -> None:
        target.write_bytes(pickle.dumps(_COMPILE(build)))

    key = compile.key(compile.compiler(), build)
    cubin: Cubin = pickle.loads(built_once("cubin", key.encode(), make).read_bytes())
    return cubin
