"""Declares the functions of csrc/cpu/api.cpp for ctypes, and measures this machine's maximum rates."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

from ...errors import MegakernelError
from ...isa import CDims, Dtype
from ...library import load, structure

_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_I32, _I64, _DOUBLE = ctypes.c_int32, ctypes.c_int64, ctypes.c_double


CPart, CMatrix = (structure("cpu/packing.h", name) for name in ("Part", "Matrix"))
CPanel, CProgram = structure("cpu/simd/packed.h", "Panel"), structure("cpu/program.h", "ProgramSource")
PANEL_COLUMNS = 16  # columns of a packed matrix's panel


def matrix(stack: int, shape: tuple[int, ...], parts: Sequence[tuple[Dtype, int, int]]) -> ctypes.Structure:
    """Describe `stack` matrices of `shape` [..., rows, k], which consist of parts (type, rows, address)."""
    matrices, rows, k = (1, *shape)[-3:]
    made = (CPart * len(parts))(*(CPart(*part) for part in parts))
    out: ctypes.Structure = CMatrix(stack, matrices, rows, k, len(parts), ctypes.addressof(made))
    out.held = made  # keep the arrays alive as long as the matrix, which has their addresses
    return out


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mk_error": (_TEXT, []),
    "mk_simd": (_TEXT, [_TEXT]),
    "mk_create": (_POINTER, [ctypes.POINTER(CDims), _I32, _I32, _TEXT, _I32, _DOUBLE]),
    "mk_destroy": (None, [_POINTER]),
    "mk_weight_bytes": (_I64, [_POINTER]),
    "mk_pack": (_I32, [_POINTER, _I32, _I32, _I32, ctypes.POINTER(CMatrix)]),
    "mk_bind": (None, [_POINTER, _I32, _I32, _I32, _POINTER]),
    "mk_bound": (_POINTER, [_POINTER, _I32, _I32, _I32]),
    "mk_load_program": (_POINTER, [ctypes.POINTER(CProgram)]),
    "mk_unload_program": (None, [_POINTER]),
    "mk_launch_start": (_I32, [_POINTER, _POINTER, _POINTER, _I32]),
    "mk_launch_wait": (_I32, [_POINTER, _I32]),
    "mk_abort": (None, [_POINTER]),
    "mk_reset": (None, [_POINTER, _POINTER]),
    "mk_link_bytes": (_I64, [_POINTER, _I32]),
    "mk_execute": (None, [_POINTER, ctypes.POINTER(CDims), _POINTER, _POINTER, _POINTER, _I32]),
    "mk_fetch_ahead": (None, [_POINTER, _I32]),
    "mk_delay": (None, [_POINTER, _I32, _I32, _I32, _I64]),
    "mk_intervals": (_I64, [_POINTER, _POINTER, ctypes.POINTER(_I64)]),
    "mk_clock_cost": (_DOUBLE, []),
    "mk_probe_read": (_DOUBLE, [_TEXT, _I32, _I64, _DOUBLE]),
    "mk_probe_fma": (_DOUBLE, [_TEXT, _I32, _I32, _DOUBLE]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the native library, which is loaded by the first call. Its functions release Python's GIL."""
    lib = load()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def error() -> MegakernelError:
    """Return an error with the native library's message about the last failed call on this thread."""
    return MegakernelError(library().mk_error().decode())


def requested_simd() -> bytes:
    """The value of MEGAKERNEL_SIMD: portable, avx2, avx512 or avx512bf16; empty means the widest that the CPU has."""
    return os.environ.get("MEGAKERNEL_SIMD", "").encode()


def simd() -> str:
    """Return the name of the instruction set (SIMD) in use."""
    name = library().mk_simd(requested_simd())
    if name is None:
        raise error()
    return str(name.decode())


def clock_cost() -> float:
    """Return the seconds that one read of the clock takes, which traces use."""
    return float(library().mk_clock_cost())


def probe_read(threads: int, size: int, seconds: float) -> float:
    """Measure the bytes/s at which threads together read `size` bytes of memory, in the best of several passes."""
    return _checked(library().mk_probe_read(requested_simd(), threads, size, seconds))


def probe_fma(threads: int, seconds: float, *, integers: bool = False) -> float:
    """Measure the rate of multiply-adds on `threads` threads, in FLOP/s. Returns the best of several passes.

    The measurement uses the fastest instructions that matmuls use, and float32 sums. If the processor multiplies pairs
    of bfloat16 values, matmuls use these instructions, which are nearly twice as fast. Otherwise, matmuls convert
    weights to float32. With `integers`, operations on 8-bit integers are measured instead.
    """
    return _checked(library().mk_probe_fma(requested_simd(), integers, threads, seconds))


def _checked(rate: float) -> float:
    if rate < 0:
        raise error()
    return rate
