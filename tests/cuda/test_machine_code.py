"""Tests that hot paths of csrc/cuda take as many issue cycles in machine code as the hardware descriptions declare."""

from collections.abc import Iterator
from dataclasses import replace

import cubins
import extras
import machine_code
import pytest
import sass

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.machine import ONE_ROW, Path
from megakernel.runtime.cuda.compile import Build
from megakernel.targets.issue import SAMPLE_GROUP

# The limits for cycles found in machine code, divided by the declared cycles. Compilers differ a little; beyond these
# limits, the declared figure is out of date.
LOWEST, HIGHEST = 0.9, 1.05


@pytest.fixture(scope="module")
def codes() -> Iterator[dict[Build, sass.Code]]:
    if sass.disassembler() is None:
        extras.lacks("dev")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code.cuda, "compiled", cubins.compiled)
        yield machine_code.compile_codes()


def declared_paths() -> dict[str, tuple[float, ...]]:
    declared = machines.hardware("h100").paths or {}
    return {name: path[:3] for name, path in declared.items()} | {ONE_ROW + n: p[3:] for n, p in declared.items()}


@pytest.mark.slow
def test_no_hot_path_is_slower_than_declared(codes: dict[Build, sass.Code]) -> None:
    declared = declared_paths()
    ratios = {name: found / declared[name][0] for name, found in machine_code.cycles_of(codes).items()}
    assert {name: ratio for name, ratio in ratios.items() if not LOWEST <= ratio <= HIGHEST} == {}


@pytest.mark.slow
def test_the_paths_of_an_instruction_are_as_long_as_declared(codes: dict[Build, sass.Code]) -> None:
    declared = declared_paths()
    assert declared["l2_trip"] == (machine_code.FAR,)
    for name, found in machine_code.paths_of(codes).items():
        cycles, *others = (*declared[name], 0.0)[:3]
        assert found.cycles == pytest.approx(cycles, rel=0.1), name
        assert found[1:3] == pytest.approx(others, rel=0.2, abs=0.25), name  # NVRTCs differ more in these
    groups = [machine_code.Paths(code, build).sample_entries() for build, code in codes.items()]
    assert min(groups) == SAMPLE_GROUP


@pytest.mark.slow
def test_a_path_that_is_lost_is_an_error(codes: dict[Build, sass.Code]) -> None:
    code = codes[machine_code.GENERIC]
    paths = machine_code.Paths(code, machine_code.GENERIC)
    with pytest.raises(MegakernelError, match=r"dots\.h has no line with 'no such text'"):
        paths._at("dots.h", "no such text")
    copies = {*code.find("UBLKCP"), *code.find("UTMALDG")}
    without = [replace(each, opcode="NOP") if i in copies else each for i, each in enumerate(code.instructions)]
    with pytest.raises(MegakernelError, match="no path for filling a page"):
        machine_code.Paths(sass.Code(without), machine_code.GENERIC).all()


def test_what_a_program_asks_of_its_roles() -> None:
    """In a step with one row of Llama 3.2 1B, the weight loaders fill each page of weights once, and the consumers
    multiply each pair of these pages once."""
    machine = machines.load("h200")
    config, options = machine_code.load_config("random:llama-3.2-1b"), machine_code.Options()
    program = machine_code.compiled(config, machine, 1, context=128, options=options)
    assert machine.paths is not None
    nothing, one = dict.fromkeys(machine.paths, Path(0.0, 0.0)), Path(1.0, 1.0)
    pages = machine_code.load(program, machine, nothing | {ONE_ROW + "weight_page": one})
    weights = 16 * (2048 * (3072 + 2048) + 3 * 2048 * 8192) + 2048 * 128256
    assert weights / 8192 / 132 <= pages.weight_loader < 1.1 * weights / 8192 / 132
    assert (pages.input_loader, pages.consumers) == (0, 0)
    assert pages.memory == pytest.approx(2 * weights / machine_code.costs_of(machine).memory_bytes_per_s)
    pairs = machine_code.load(program, machine, nothing | {ONE_ROW + "dot_pair": one, "dot_row": Path(9.0, 9.0)})
    assert pairs.consumers == pytest.approx(pages.weight_loader / 2)
