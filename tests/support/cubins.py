"""Compiles the CUDA interpreter (csrc/cuda) for tests, once for each content of its sources."""

import pickle
from pathlib import Path

from built_once import built_once

from megakernel.runtime.cuda.compile import Build, Compiler, Cubin, key

_COMPILE = Compiler.compile


def compiled(compiler: Compiler, build: Build) -> Cubin:
    """Return the cubin that `compiler.compile` returns. Only the first call for these sources compiles it."""

    def make(target: Path) -> None:
        target.write_bytes(pickle.dumps(_COMPILE(compiler, build)))

    cubin: Cubin = pickle.loads(built_once("cubin", key(compiler, build).encode(), make).read_bytes())
    return cubin
