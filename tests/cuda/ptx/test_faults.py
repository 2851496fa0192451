"""Plants faults in the PTX of the CUDA interpreter, and expects that executing it finds them."""

import ptx_faults
import pytest
from ptx_world import emulated

from megakernel.isa import Units
from megakernel.runtime.cuda.compile import Build

# One fault of each sort.
SAMPLE = {
    "signals release nothing",
    "no syncwarp before an output page is ready",
    "consumers do not fence their reads of pages",
    "stores are not waited for",
    "results are read before wgmma has ended",
    "consumers ask for more registers",
    "fragments of B are exchanged",
    "signals go to the next counter",
}


def check(kind: str) -> None:
    for name, found in ptx_faults.try_all(kind, SAMPLE):
        assert found, name


@pytest.mark.slow
@emulated(Build(False, Units.DOTS), faults=ptx_faults.of_kind("dots"))
def test_a_sample_of_faults_in_dot_products_is_found() -> None:
    check("dots")


@pytest.mark.slow
@emulated(Build(False, Units.TENSOR), faults=ptx_faults.of_kind("tensor"))
def test_a_sample_of_faults_on_tensor_cores_is_found() -> None:
    check("tensor")


def test_each_fault_of_the_sample_is_one_that_was_found() -> None:
    names = {name for _, name, _ in ptx_faults.FAULTS}
    assert names >= SAMPLE and names >= ptx_faults.NOT_FOUND and not SAMPLE & ptx_faults.NOT_FOUND
