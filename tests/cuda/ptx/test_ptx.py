"""Executes the PTX of the CUDA interpreter on the CPU (ptx_world.py), launched by the real backend: whole steps
on one and on two GPUs. Any race, undeclared access or misuse of the hardware is an error."""

import ptx_steps
import pytest
from ptx_table import meaning
from ptx_world import Emulator, emulated

from megakernel.isa import Units
from megakernel.runtime.cuda.compile import Build

DOTS, TENSOR = Build(False, Units.DOTS), Build(False, Units.TENSOR)


@pytest.mark.slow
@emulated(DOTS)
def test_steps_by_dot_products() -> None:
    assert ptx_steps.run("dots", [7], Emulator(), tp=1) == []


@pytest.mark.slow
@emulated(TENSOR)
def test_steps_on_tensor_cores() -> None:
    assert ptx_steps.run("tensor", [5], Emulator(), tp=1) == []


@pytest.mark.slow
@emulated(DOTS, FAKE_CUDA_DEVICES=2)
def test_a_step_on_two_gpus() -> None:
    """Each GPU has a grid of its own, and memory that the other can access."""
    assert ptx_steps.run("dots", [4], Emulator(), tp=2) == []


@pytest.mark.parametrize("opcode", ["add.s16", "ld.acquire.cta.shared.u32", "fence.acq_rel.gpu", "mbarrier.init.b64"])
def test_an_unknown_instruction_is_an_error(opcode: str) -> None:
    with pytest.raises(ValueError, match=f"{opcode} is not in the table"):
        meaning(opcode)
