"""What the compilers make of csrc/cuda, by their reports and the machine code; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megakernel.runtime.cuda import compile as cuda

# Spilled registers would show as these.
LOCAL_MEMORY = ("LDL", "STL")
# What must be in the kernel, and what it is for.
EXPECTED = {
    "USETMAXREG.DEALLOC": "registers of the warps that move data",
    "USETMAXREG.TRY_ALLOC": "registers of the warps that compute",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT": "waiting at the barriers of pages",
    "SYNCS.ARRIVE.TRANS64": "arriving there",
    "UTMALDG.3D": "bulk loads of tiles",
    "UTMASTG.3D": "bulk stores of tiles",
    "UTMAREDG.3D.ADD": "bulk additions of tiles",
    "UBLKCP": "bulk loads of rows",
    "UTMACMDFLUSH": "groups of bulk stores",
    "HGMMA.64x256x16.F32.BF16": "wgmma over two neighbouring pages",
    "HGMMA.64x128x16.F32.BF16": "wgmma over one page",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "two wgmma groups in flight",
    "HMMA.16816.F32.BF16": "attention",
    "LDSM.16.MT88.4": "its keys and values",
    "LDS.128": "dot products",
    "LDG.E.128.STRONG.GPU": "rows that this launch wrote",
    "RED.E.ADD.STRONG.GPU": "signals on the GPU",
    "RED.E.ADD.STRONG.SYS": "signals to others",
    "FENCE.VIEW.ASYNC": "what was stored before what is copied",
}


@dataclass(frozen=True)
class Built:
    code: bytes
    log: str
    seconds: float
    sass: list[str]  # instructions without address, predicate and operands' spacing

    def count(self, mnemonic: str) -> int:
        return sum(mnemonic in line for line in self.sass)


def _disassembler() -> str:
    """nvdisasm from the PATH, the toolkit or a wheel."""
    found = shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")
    if found:
        return found
    for folder in map(Path, sys.path):
        for path in folder.glob("nvidia/*/bin/nvdisasm"):
            return str(path)
    pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")


def _disassemble(code: bytes, scratch: Path) -> list[str]:
    path = scratch / "kernel.cubin"
    path.write_bytes(code)
    command = [_disassembler(), "--no-dataflow", "--print-code", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text, re.MULTILINE)


def _compilers() -> dict[str, cuda.Compiler]:
    found = {}
    if path := shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"):
        found["nvcc"] = cuda.nvcc(path)
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        found["nvrtc"] = cuda.Compiler(f"NVRTC {major}.{minor}")
    except (ImportError, RuntimeError):
        pass
    return found


@pytest.fixture(scope="module", params=["nvcc", "nvrtc"])
def compiler(request: pytest.FixtureRequest) -> cuda.Compiler:
    found = _compilers().get(request.param)
    if found is None:
        pytest.skip(f"needs {request.param}")
    return found
