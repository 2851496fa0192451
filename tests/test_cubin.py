"""The machine code of csrc/cuda, without a GPU: what each kind of work must contain, and what no code may."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sass

from megakernel.errors import MegakernelError
from megakernel.runtime.cuda import compile as cuda

BOTH = {
    "USETMAXREG.DEALLOC": "registers given up by the warps that move data",
    "USETMAXREG.TRY_ALLOC": "and taken by those that compute",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT": "waiting for pages",
    "SYNCS.ARRIVE.TRANS64": "freeing pages",
    "UTMALDG.3D": "bulk loads of tiles",
    "HMMA.16816.F32.BF16": "attention",
    "LDSM.16.MT88.4": "its keys and values",
    "LDG.E.128.STRONG.GPU": "reading what this launch wrote, past the first-level cache",
    "REDG.E.ADD.S32.STRONG.GPU": "signals on the GPU",
    "REDG.E.ADD.S32.STRONG.SYS": "signals to others",
    "FENCE.VIEW.ASYNC": "ordinary accesses before bulk copies",
}
TENSOR = BOTH | {
    "UTMASTG.3D": "bulk stores of tiles",
    "UTMAREDG.3D.ADD": "bulk additions to the residual",
    "HGMMA.64x128x16.F32.BF16": "matmuls on the tensor cores",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "two of their groups in flight",
}
DOTS = BOTH | {
    "UBLKCP": "bulk loads of rows, for dot products",
    "LDS.128": "dot products",
}
# That may run, at most; the instruction caches hold a part of them.
INSTRUCTIONS = 18_500


def disassemble(cubin: Path) -> str:
    tool = shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")
    wheels = (str(path) for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/nvdisasm"))
    tool = tool or next(wheels, None)
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return subprocess.run([tool, "--print-code", str(cubin)], capture_output=True, text=True, check=True).stdout


def lacking(sass: str, expected: dict[str, str]) -> dict[str, str]:
    return {name: what for name, what in expected.items() if name not in sass}


@pytest.fixture(scope="module", params=["tensor", "dots", "tensor traced", "dots traced"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, cuda.Cubin, str]:
    """A numerics class, its code, traced or not, and that in words. Compiling fails on what ptxas calls slow: wgmma
    serialised, setmaxnreg ignored. Each compiler that is here has one class: NVRTC, as at first use, and nvcc."""
    numerics, *traced = request.param.split()
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    try:
        compiler = cuda.nvcc(nvcc) if nvcc and numerics == "tensor" else cuda.compiler()
    except MegakernelError as e:
        pytest.skip(str(e))
    cubin = compiler.compile(trace=bool(traced), dots=numerics == "dots")
    file = Path(tmp_path_factory.mktemp("cubin")) / "megakernel.cubin"
    file.write_bytes(cubin.code)
    return numerics, cubin, disassemble(file)


def test_every_kind_of_work_uses_its_instructions(built: tuple[str, cuda.Cubin, str]) -> None:
    assert lacking(built[2], TENSOR if built[0] == "tensor" else DOTS) == {}


def test_a_table_that_no_code_meets_fails() -> None:
    assert len(lacking("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]", TENSOR)) == len(TENSOR) - 1


def budgets() -> dict[str, int]:
    """Registers of a thread of each role."""
    text = (cuda.source_folder() / "cuda" / "megakernel.cu").read_text()
    return {name: int(n) for name, n in re.findall(r"#define MK_(\w+)_REGISTERS (\d+)", text)}


def test_registers_by_role(built: tuple[str, cuda.Cubin, str]) -> None:
    """What either role's warps may run names no register that they do not have."""
    code = sass.parse(built[2])
    roots = {"SERVICE": code.find("USETMAXREG.DEALLOC"), "CONSUMER": code.find("USETMAXREG.TRY_ALLOC")}
    assert budgets().keys() == roots.keys()
    assert all(code.comes_back(call) for call in code.find("CALL"))
    runs = {role: code.reachable({root, *code.meetings(root)}) for role, [root] in roots.items()}
    for role, [root] in roots.items():
        assert max(r for i in runs[role] for r in code.instructions[i].registers()) < budgets()[role]
        assert f" 0x{budgets()[role]:x} " in f" {code.instructions[root].operands} "
    assert runs["SERVICE"].isdisjoint(code.find("HMMA")) and runs["CONSUMER"].isdisjoint(code.find("UTMALDG"))
    assert not runs["SERVICE"].isdisjoint(code.find("SYNCS")) and not runs["CONSUMER"].isdisjoint(code.find("HMMA"))


def test_nothing_is_spilled(built: tuple[str, cuda.Cubin, str]) -> None:
    """Neither in loops nor elsewhere does a thread use memory of its own."""
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", built[1].log) == [("0", "0")]
    code = sass.parse(built[2])
    assert code.find("LDL") + code.find("STL") == []
    assert len(code.reachable([0])) <= INSTRUCTIONS
