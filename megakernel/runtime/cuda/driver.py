"""A small interface to the CUDA driver, on top of cuda-python: a GPU, its memory, and a kernel.

Addresses are plain ints. No address needs to say which GPU it belongs to, because the memory of all GPUs and pinned
host memory share one address space.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...targets.launch import MAP_BYTES, SHARED_BYTES, THREADS
from .compile import KERNEL
from .maps import MapLayout

_MAP_ALIGNMENT = 64
_PEEK_S = 1.0
_lost: set[int] = set()  # ordinals of GPUs that do not answer any more

# Error codes of the driver's enumeration CUresult.
_NOT_READY, _OUT_OF_MEMORY, _PEER_ENABLED, _TOO_LARGE = 600, 2, 704, 720


def check(what: str, answer: tuple[Any, ...]) -> Any:
    """Return the value of a driver call, whose purpose is `what`. Raises MegakernelError if the call failed."""
    status, *values = answer
    if int(status) != 0:
        raise MegakernelError(f"{what} failed: the CUDA driver answers {status.name}{_remedy(int(status))}")
    return values[0] if values else None


def _remedy(status: int) -> str:
    if status == _OUT_OF_MEMORY:
        return ": lower --max-model-len or the number of sequences, or free memory of the GPU (nvidia-smi)"
    if status == _TOO_LARGE:
        return ": another process holds a part of the GPU (nvidia-smi)"
    return "" if status < 700 else ": the GPU's context is lost, start the process again"


class Gpu:
    """A GPU with its primary CUDA context, as in CuPy and torch. A thread must call `use` before other methods."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.ordinal = ordinal
        self.check()
        check("starting CUDA", driver.cuInit(0))
        self._device = check("opening the GPU", driver.cuDeviceGet(ordinal))
        self.context = check("opening the GPU", driver.cuDevicePrimaryCtxRetain(self._device))
        self.use()
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = check("making a stream", driver.cuStreamCreate(flag))
        self._side = check("making a stream", driver.cuStreamCreate(flag))
        self._one = self.pinned(np.dtype(np.int32).itemsize)
        self._one.view(np.int32)[:] = 1

    def use(self) -> None:
        """Make this GPU current in the calling thread. Raises MegakernelError if the GPU is lost (see `lose`)."""
        self.check()
        check("using the GPU", self.driver.cuCtxSetCurrent(self.context))

    def lose(self) -> None:
        """Make every later use of the GPU an error, because most driver calls would wait without end."""
        _lost.add(self.ordinal)

    def check(self) -> None:
        """Raise MegakernelError if the GPU has been lost."""
        if self.ordinal in _lost:
            raise MegakernelError(
                f"GPU {self.ordinal} no longer answers this process: end the process and start another one"
            )

    @property
    def sms(self) -> int:
        name = self.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(check("asking the GPU", self.driver.cuDeviceGetAttribute(name, self._device)))

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU's memory."""
        self.use()
        status, free, total = self.driver.cuMemGetInfo()
        check("asking the GPU", (status,))
        return int(free), int(total)

    def reach(self, other: Gpu) -> None:
        """Allow kernels of this GPU to access all memory of `other`, including memory that is allocated later."""
        self.use()
        d = self.driver
        if not check("asking the GPU", d.cuDeviceCanAccessPeer(self._device, other._device)):
            raise MegakernelError(f"GPU {self.ordinal} cannot reach the memory of GPU {other.ordinal}: use --tp 1")
        atomics = d.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        if not check("asking the GPU", d.cuDeviceGetP2PAttribute(atomics, self._device, other._device)):
            raise MegakernelError(
                f"GPU {self.ordinal} cannot signal GPU {other.ordinal}, because their link lacks atomics: use --tp 1"
            )
        answer = d.cuCtxEnablePeerAccess(other.context, 0)
        if int(answer[0]) != _PEER_ENABLED:
            check("mapping a peer's memory", answer)

    # -- memory

    def allocate(self, size: int) -> int:
        """Allocate device memory filled with zeros, and return its address, a multiple of 256 bytes."""
        self.use()
        address = int(check(f"allocating {size / 1e9:.2f} GB", self.driver.cuMemAlloc(size)))
        self.fill(address, 0, size)
        return address

    def free(self, address: int) -> None:
        self.use()
        check("freeing memory", self.driver.cuMemFree(address))

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory filled with zeros, so that copies run at full speed. `unpin` frees it."""
        self.use()
        address = check("allocating pinned memory", self.driver.cuMemHostAlloc(size, 0))
        array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))
        array[:] = 0
        return array

    def unpin(self, pinned: NDArray[np.uint8]) -> None:
        self.use()
        check("freeing pinned memory", self.driver.cuMemFreeHost(pinned.ctypes.data))

    def fill(self, address: int, value: int, size: int) -> None:
        """Set `size` bytes to `value`. As with copies, this happens after all earlier work in `stream`."""
        if size:
            check("filling memory", self.driver.cuMemsetD8Async(address, value, size, self.stream))

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to the device. When the call returns, the array may be changed."""
        whole = np.ascontiguousarray(array)
        if whole.nbytes:
            self._send(address, whole, self.stream)
            self.synchronise()

    def download(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return a copy of `size` bytes of device memory."""
        self.use()
        out = np.empty(size, np.uint8)
        if size:
            self.fetch(out, address)
            self.synchronise()
        return out

    def send(self, address: int, pinned: NDArray[np.uint8], sent: Event) -> None:
        """Start a copy to the device, even while a kernel runs. Later work in `stream` waits for `sent`, the end of the
        copy."""
        self.use()
        self._send(address, pinned, self._side)
        sent.record(self._side)
        check("waiting for a copy", self.driver.cuStreamWaitEvent(self.stream, sent.handle, 0))

    def _send(self, address: int, array: NDArray[Any], stream: Any) -> None:
        answer = self.driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, stream)
        check("copying to the GPU", answer)

    def fetch(self, array: NDArray[Any], address: int, stream: Any = None) -> None:
        """Start a copy from the device, after earlier work in `stream` (by default the stream of launches)."""
        answer = self.driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, stream or self.stream)
        check("copying from the GPU", answer)

    def interrupt(self, address: int) -> None:
        """Set an int32 to 1 while a kernel runs. The 1 is copied, because a fill might need an SM, and none is free."""
        self.use()
        source = self._one.ctypes.data
        check("stopping the launch", self.driver.cuMemcpyHtoDAsync(address, source, self._one.nbytes, self._side))

    def peek(self, pinned: NDArray[np.uint8], address: int) -> None:
        """Copy device memory to `pinned`, even while a kernel runs. If it takes over a second, `pinned` stays zero."""
        self.use()
        pinned[:] = 0
        self.fetch(pinned, address, self._side)
        limit = time.perf_counter() + _PEEK_S
        while not _over(self.driver.cuStreamQuery(self._side)) and time.perf_counter() < limit:
            time.sleep(_PEEK_S / 1000)

    # -- order

    def idle(self) -> bool:
        """Whether all work that was put into the streams has ended."""
        self.use()
        return all(_over(self.driver.cuStreamQuery(stream)) for stream in (self.stream, self._side))

    def synchronise(self) -> None:
        check("waiting for the GPU", self.driver.cuStreamSynchronize(self.stream))

    def close(self) -> None:
        self.use()
        d = self.driver
        d.cuStreamSynchronize(self.stream)
        self.unpin(self._one)
        d.cuStreamDestroy(self._side)
        d.cuStreamDestroy(self.stream)
        d.cuDevicePrimaryCtxRelease(self._device)


def _over(answer: tuple[Any, ...]) -> bool:
    if int(answer[0]) == _NOT_READY:
        return False
    check("the launch", answer)
    return True


class Event:
    """A point in a GPU's stream. `done` says whether all work before the point has ended."""

    def __init__(self, gpu: Gpu) -> None:
        gpu.use()
        self._gpu = gpu
        self.handle = check("making an event", gpu.driver.cuEventCreate(gpu.driver.CUevent_flags.CU_EVENT_DEFAULT))

    def record(self, stream: Any = None) -> None:
        """Move the event to the end of a stream, by default the stream of launches."""
        self._gpu.use()
        check("recording an event", self._gpu.driver.cuEventRecord(self.handle, stream or self._gpu.stream))

    def done(self) -> bool:
        self._gpu.use()
        return _over(self._gpu.driver.cuEventQuery(self.handle))

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two events, both of which must have happened."""
        return float(check("reading a time", self._gpu.driver.cuEventElapsedTime(earlier.handle, self.handle))) / 1e3

    def close(self) -> None:
        self._gpu.use()
        self._gpu.driver.cuEventDestroy(self.handle)


class Kernel:
    """The interpreter's kernel on one GPU. `blocks` thread blocks can be resident at once, at most one per SM."""

    def __init__(self, gpu: Gpu, code: bytes) -> None:
        gpu.use()
        d = gpu.driver
        self.gpu = gpu
        self._module = check("loading the interpreter", d.cuModuleLoadData(code))
        self.function = check("loading the interpreter", d.cuModuleGetFunction(self._module, KERNEL.encode()))
        shared = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("taking shared memory", d.cuFuncSetAttribute(self.function, shared, SHARED_BYTES))
        occupancy = d.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, THREADS, SHARED_BYTES)
        self.blocks = gpu.sms * min(1, int(check("asking for the occupancy", occupancy)))

    def launch(self, blocks: int, params: ctypes.Structure, *, together: bool = True) -> None:
        """Start a launch. If `together`, all blocks are resident at once and may wait for each other."""
        self.gpu.use()
        d, shape, held = self.gpu.driver, (blocks, 1, 1, THREADS, 1, 1), ctypes.c_void_p(ctypes.addressof(params))
        arguments = (self.function, *shape, SHARED_BYTES, self.gpu.stream, ctypes.addressof(held))
        answer = d.cuLaunchCooperativeKernel(*arguments) if together else d.cuLaunchKernel(*arguments, 0)
        check("launching the interpreter", answer)

    def close(self) -> None:
        self.gpu.use()
        self.gpu.driver.cuModuleUnload(self._module)


def encode_map(address: int, layout: MapLayout) -> NDArray[np.uint8]:
    """Return a tensor map for a tensor at `address`. TMA, the GPU's copy engine for tiles, needs this description of
    the tensor. Reads outside the tensor give zeros, and writes outside it do nothing.

    This calls the driver through ctypes, because cuda-python does not ensure the alignment that the driver requires.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    raw = np.zeros(MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _MAP_ALIGNMENT
    out = raw[start : start + MAP_BYTES]
    u64, u32, rank = ctypes.c_uint64, ctypes.c_uint32, len(layout.sizes)
    # The numbers of BFLOAT16 and FLOAT32 in the driver's enumeration CUtensorMapDataType are 9 and 7.
    dtype, swizzle_128, promote_256 = 9 if layout.item == 2 else 7, 3, 3
    status = lib.cuTensorMapEncodeTiled(
        ctypes.c_void_p(out.ctypes.data),
        dtype,
        rank,
        ctypes.c_void_p(address),
        (u64 * rank)(*layout.sizes),
        (u64 * (rank - 1))(*layout.strides),
        (u32 * rank)(*layout.box),
        (u32 * rank)(*[1] * rank),
        0,  # no interleaving
        swizzle_128 if layout.swizzled else 0,
        promote_256,
        0,  # elements outside the tensor are read as zero instead of NaN
    )
    if status:
        raise MegakernelError(f"the CUDA driver refused a tensor map of sizes {layout.sizes}, with CUresult {status}")
    return out.copy()
