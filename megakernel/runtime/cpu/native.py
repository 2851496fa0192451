"""The structs and errors of csrc/cpu/api.cpp. Measures this machine's maximum rates."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from ...errors import MegakernelError
from ...isa import Dtype
from ...library import load, structure

CPart, CMatrix = (structure("cpu/packing.h", name) for name in ("Part", "Matrix"))
CPanel, CProgram = structure("cpu/simd/packed.h", "Panel"), structure("cpu/program.h", "ProgramSource")
PANEL_COLUMNS = 16  # a panel: the output columns (weight rows) that a packed matrix stores together


def matrix(stack: int, shape: tuple[int, ...], parts: Sequence[tuple[Dtype, int, int]]) -> ctypes.Structure:
    """Return a C++ struct for `stack` arrays of `shape` [..., rows, k]. Each of `parts` is (type, rows, address)."""
    matrices, rows, k = (1, *shape)[-3:]
    made = (CPart * len(parts))(*(CPart(*part) for part in parts))
    out: ctypes.Structure = CMatrix(stack, matrices, rows, k, len(parts), ctypes.addressof(made))
    out.held = made  # keep the arrays alive as long as the matrix, which has their addresses
    return out


def error() -> MegakernelError:
    """Return an error with the native library's message about the last failed call on this thread."""
    return MegakernelError(load().mk_error().decode())


def requested_simd() -> bytes:
    """The value of MEGAKERNEL_SIMD: portable, avx2, avx512 or avx512bf16; empty means the widest that the CPU has."""
    return os.environ.get("MEGAKERNEL_SIMD", "").encode()


def simd() -> str:
    """Return the name of the instruction set (SIMD) in use."""
    name = load().mk_simd(requested_simd())
    if name is None:
        raise error()
    return str(name.decode())


def probe_read(threads: int, size: int, seconds: float) -> float:
    """Measure the bytes/s at which threads together read `size` bytes of memory, in the best of several passes."""
    return _checked(load().mk_probe_read(requested_simd(), threads, size, seconds))


def probe_fma(threads: int, seconds: float, *, integers: bool = False) -> float:
    """Measure the rate of multiply-adds on `threads` threads, in FLOP/s. Returns the best of several passes.

    The measurement uses the fastest instructions that matmuls use, and float32 sums. If the processor multiplies pairs
    of bfloat16 values, matmuls use these instructions, which are nearly twice as fast. Otherwise, matmuls convert
    weights to float32. With `integers`, operations on 8-bit integers are measured instead.
    """
    return _checked(load().mk_probe_fma(requested_simd(), integers, threads, seconds))


def _checked(rate: float) -> float:
    if rate < 0:
        raise error()
    return rate
