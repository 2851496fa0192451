"""Finds out whether this machine can run the CUDA interpreter, and what is missing if it cannot.

The check first looks for the CUDA driver, through ctypes. Only then does it import CUDA packages, which fail or hang
without a driver.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from importlib.util import find_spec

from ...errors import MegakernelError
from ...machine import MACHINES, Machine

CAPABILITY = (9, 0)  # the interpreter is compiled for sm_90a, which no other GPU runs
DRIVER = 13000  # oldest driver, as a CUDA version, that loads code of a CUDA 13 compiler
DRIVER_NAME = "580"
INSTALL = "pip install 'megakernel[cuda]'"

# CUdevice_attribute
_SMS, _MAJOR, _MINOR = 16, 75, 76


@dataclass(frozen=True)
class Device:
    """A GPU as the driver describes it. `ordinal` numbers the GPUs that CUDA_VISIBLE_DEVICES makes visible."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """What the driver reports. `missing` says in one sentence why no GPU can be used; it is None if one can."""

    version: int  # the driver's CUDA version, 1000 * major + 10 * minor; 0 without a driver
    devices: tuple[Device, ...]  # all GPUs, also those that cannot be used
    missing: str | None

    @property
    def usable(self) -> list[Device]:
        return [d for d in self.devices if d.capability == CAPABILITY]


@functools.cache
def driver() -> Driver:
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(0, (), f"there is no NVIDIA driver (libcuda.so.1): install driver {DRIVER_NAME} or newer")
    value = ctypes.c_int()
    lib.cuDriverGetVersion(ctypes.byref(value))
    version = value.value
    status = lib.cuInit(0) or lib.cuDeviceGetCount(ctypes.byref(value))
    if status:
        return Driver(version, (), f"the NVIDIA driver answers with error {status}: check that nvidia-smi works")
    devices = tuple(_device(lib, ordinal) for ordinal in range(value.value))
    lack = None
    if not devices:
        lack = "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    elif all(d.capability != CAPABILITY for d in devices):
        major, minor = devices[0].capability
        has = f"the GPU, {devices[0].name}, has compute capability {major}.{minor}"
        lack = f"{has}: the interpreter is written for 9.0 (H100, H200)"
    elif version < DRIVER:
        have = f"{version // 1000}.{version % 1000 // 10}"
        lack = f"the NVIDIA driver is for CUDA {have}: install driver {DRIVER_NAME} or newer"
    return Driver(version, devices, lack)


def _device(lib: ctypes.CDLL, ordinal: int) -> Device:
    handle, value, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(96)
    lib.cuDeviceGet(ctypes.byref(handle), ordinal)
    lib.cuDeviceGetName(name, len(name), handle)
    lib.cuDeviceTotalMem_v2(ctypes.byref(size), handle)

    def attribute(number: int) -> int:
        lib.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    return Device(
        ordinal, name.value.decode(), (attribute(_MAJOR), attribute(_MINOR)), attribute(_SMS), int(size.value)
    )


@functools.cache
def missing() -> str | None:
    """Return one sentence that says why the cuda backend cannot run here, and what to do; None if it can run."""
    if (lack := driver().missing) is not None:
        return lack
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return f"cuda-python is not installed: {INSTALL}"
    from .compile import compiler

    try:
        compiler()
    except MegakernelError as e:
        return str(e)
    return None


def require() -> None:
    """Raise MegakernelError if the cuda backend cannot run here."""
    if (lack := missing()) is not None:
        raise MegakernelError(f"the cuda backend cannot run here: {lack}")


def machine(ranks: int) -> Machine:
    """Return one rank's device: a GPU if there is one for each rank, otherwise equally many SMs of the first GPU."""
    require()
    devices = driver().usable
    device = devices[0]
    parts = 1 if ranks <= len(devices) else ranks
    kind = MACHINES["h200" if "H200" in device.name else "h100"]
    return replace(
        kind,
        workers=device.sms // parts,
        matrix_flops=kind.matrix_flops / parts,
        vector_flops=kind.vector_flops / parts,
        memory_bytes_per_s=kind.memory_bytes_per_s / parts,
        memory_bytes=device.memory_bytes / parts,
    )
