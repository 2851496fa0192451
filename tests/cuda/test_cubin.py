"""Inspects the machine code of csrc/cuda without a GPU. The compiler must have generated certain instructions for each
source file, and no code may contain certain others."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cubins
import extras
import machine_code
import pytest
import sass

from megakernel.isa import Units
from megakernel.runtime.cuda import compile as cuda
from megakernel.runtime.cuda.compile import Build

# For each source file, the instructions that the compiler must generate from the lines of the file or from code that is
# inlined into these lines. The text after an instruction says what the instruction is for.
BOTH = {
    "megakernel.cu": {
        "USETMAXREG.DEALLOC": "registers given up by the warps that move data",
        "USETMAXREG.TRY_ALLOC": "and taken by those that compute",
    },
    "roles.h": {"UTMACCTL.IV": "tensor maps as the host has left them"},
    "controller.h": {"SYNCS.PHASECHK.TRANS64.TRYWAIT": "waiting for a slot", "ATOMG.E.CAS": "claims from a queue"},
    "loaders.h": {
        "SYNCS.PHASECHK.TRANS64.TRYWAIT": "waiting for a free page",
        "UTMALDG.3D": "bulk loads of tiles",
        "NANOSLEEP": "back-off between polls of a counter",
    },
    "counters.h": {
        "LDG.E.STRONG.GPU": "polls of a counter, past the first-level cache",
        "CCTL.IVALL": "what was loaded before a wait is forgotten",
        "REDG.E.ADD.S32.STRONG.GPU": "signals on the GPU",
        "REDG.E.ADD.S32.STRONG.SYS": "signals to others",
    },
    "pages.h": {"SYNCS.ARRIVE.TRANS64": "freeing pages", "FENCE.VIEW.ASYNC": "ordinary accesses before bulk copies"},
    "gather.h": {"STG.E.128": "rows in whole sectors"},
    "rope.h": {"DFMA": "angles of distant positions, in double"},
    "norm.h": {
        "LDG.E.128.STRONG.GPU": "rows that this launch wrote, past the first-level cache",
        "MUFU.RSQ": "one over the root",
        "BAR.SYNC": "a row's sum over warps",
        "STG.E.128": "rows in whole sectors",
    },
    "reduce.h": {"LDG.E.128.STRONG.GPU": "partials of other ranks", "STG.E.128": "their sum"},
    "attention_mma.h": {
        "HMMA.16816.F32.BF16": "scores and values on the tensor cores",
        "LDSM.16.MT88.4": "keys and values from their pages",
    },
    "softmax.h": {"MUFU.EX2": "powers of two"},
    "results.h": {"F2FP.BF16.F32.PACK_AB": "rounding, once", "MUFU.EX2": "SiLU", "MUFU.RSQ": "norms of heads"},
    "sample.h": {"LDG.E.STRONG.GPU": "logits of other workers", "BAR.SYNC": "a choice by all warps"},
}
TENSOR = BOTH | {
    "gemm.h": {
        "HGMMA.64x256x16.F32.BF16": "matmuls on the tensor cores",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1": "two of their groups in flight",
        "SHFL.BFLY": "a head's squares over the lanes of a row",
    },
    "storer.h": {
        "UTMASTG.3D": "bulk stores of tiles",
        "UTMAREDG.3D.ADD": "bulk additions to the residual",
        "UTMACMDFLUSH": "their end waited for",
    },
}
DOTS = BOTH | {
    "norm.h": BOTH["norm.h"] | {"STS.128": "rows for the block's own matmul"},
    "loaders.h": BOTH["loaders.h"] | {"UBLKCP": "bulk loads of rows", "UTMALDG.5D": "bulk loads of columns"},
    "dots.h": {
        "LDS.128": "rows from their pages",
        "FFMA": "products",
        "SHFL.BFLY": "their sum over lanes",
        "BAR.SYNC": "a head's squares over warps",
    },
}
EXPERTS = {
    "route.h": {"LDG.E.128": "weights of the router", "BAR.SYNC": "logits of all warps"},
    "routes.h": {"VOTE": "rows that have chosen an expert"},
    "combine.h": {"LDG.E.128.STRONG.GPU": "results of experts", "STG.E.128": "their sum"},
    "loaders.h": DOTS["loaders.h"],
}
TABLES = {
    # Llama does not normalise heads, and one GPU signals no others.
    "one-row-dots": {f: {k: v for k, v in own.items() if not re.search("head|others", v)} for f, own in DOTS.items()},
    **{"tensor": TENSOR, "dots": DOTS},
    **{"experts-tensor": TENSOR | EXPERTS, "experts-dots": DOTS | EXPERTS},
    **{"wide-tensor": TENSOR, "wide-dots": DOTS},
}
# The permitted number of instructions that control flow can reach, for each (kind of build, whether it traces). The
# number is limited because a GPU's instruction caches hold only a part of such long code.
INSTRUCTIONS = {
    **{("tensor", False): 19_200, ("tensor", True): 19_800},
    **{("dots", False): 19_200, ("dots", True): 19_800},
    **{("experts-tensor", False): 26_400, ("experts-tensor", True): 27_000},
    **{("experts-dots", False): 23_400, ("one-row-dots", False): 13_600},
    **{("wide-tensor", True): 21_200, ("wide-dots", False): 20_600},
}


def lacking(code: sass.Code, table: dict[str, dict[str, str]]) -> list[str]:
    found: dict[str, list[str]] = {file: [] for file in table}
    for instruction in code.instructions:
        for file in instruction.sources & table.keys():
            found[file].append(f"{instruction.opcode} {instruction.operands}")
    return [
        f"{file}: {opcode} ({what})"
        for file, work in table.items()
        for opcode, what in work.items()
        if not any(line.startswith(opcode) for line in found[file])
    ]


@dataclass(frozen=True)
class Built:
    numerics: str
    traced: bool
    log: str  # the report of the compiler
    code: sass.Code


@pytest.fixture(scope="module", params=[f"{kind}{' traced' * traced}" for kind, traced in INSTRUCTIONS])
def built(request: pytest.FixtureRequest) -> Built:
    """Return the machine code of one build: for tensor cores or dot products; with the code for experts,
    with that for wide heads and norms, or with neither; with or without tracing. Compiling fails if ptxas reports slow
    code, which is a serialised wgmma or an ignored setmaxnreg."""
    numerics, *traced = request.param.split()
    return build(numerics, bool(traced))


def build(numerics: str, traced: bool = False) -> Built:
    if (tool := sass.disassembler()) is None:
        extras.lacks("dev")
    units = Units.DOTS if "dots" in numerics else Units.TENSOR
    generic = Build(traced, units, experts="experts" in numerics, wide="wide" in numerics)
    cubin = cubins.compiled(machine_code.one_row_build() if "one-row" in numerics else generic)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        return Built(numerics, traced, cubin.log, sass.disassemble(tool, Path(file.name)))


@pytest.mark.slow
def test_every_kind_of_work_uses_its_instructions(built: Built) -> None:
    assert lacking(built.code, TABLES[built.numerics]) == []


def budgets() -> dict[str, int]:
    """The number of registers per thread: of service warps, which move data, and of consumers, which compute."""
    text = (cuda.source_folder() / "cuda" / "megakernel.cu").read_text()
    return {name: int(n) for name, n in re.findall(r"#define MK_(\w+)_REGISTERS (\d+)", text)}


@pytest.mark.slow
def test_registers_by_role(built: Built) -> None:
    """Warps that move data have fewer registers than warps that compute. The code of each uses only those it has."""
    code = built.code
    roots = {"SERVICE": code.find("USETMAXREG.DEALLOC"), "CONSUMER": code.find("USETMAXREG.TRY_ALLOC")}
    assert budgets().keys() == roots.keys()
    # A block has 4 service warps and 8 consumer warps. With more registers than an SM has, one would wait for ever.
    assert 32 * (4 * budgets()["SERVICE"] + 8 * budgets()["CONSUMER"]) <= 1 << 16
    assert all(code.comes_back(call) for call in code.find("CALL"))
    runs = {role: code.reachable({root, *code.meetings(root)}) for role, [root] in roots.items()}
    for role, [root] in roots.items():
        assert max(r for i in runs[role] for r in code.instructions[i].registers()) < budgets()[role]
        assert f" 0x{budgets()[role]:x} " in f" {code.instructions[root].operands} "
    assert runs["SERVICE"].isdisjoint(code.find("HMMA")) and runs["CONSUMER"].isdisjoint(code.find("UTMALDG"))
    assert not runs["SERVICE"].isdisjoint(code.find("SYNCS")) and not runs["CONSUMER"].isdisjoint(code.find("HMMA"))


@pytest.mark.slow
def test_nothing_is_spilled_or_traced_without_need(built: Built) -> None:
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", built.log) == [("0", "0")]
    code = built.code
    assert code.find("LDL") + code.find("STL") == []
    assert any("SR_CLOCK" in one.operands for one in code.instructions) == built.traced  # no other build takes times
    assert len(code.reachable([0])) <= INSTRUCTIONS[built.numerics, built.traced]
