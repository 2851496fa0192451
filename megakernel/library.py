"""Loads the compiled C++ library for ctypes. The parameters of its functions and the layouts of its structs are read
from the C++ sources, so Python does not declare them again."""

from __future__ import annotations

import ctypes
import functools
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .errors import MegakernelError

_FILE = "megakernel/_native.so"
_NUMBERS: dict[str, Any] = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    **{f"int{bits}_t": getattr(ctypes, f"c_int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)},
}
_CONSTANT = re.compile(r"\b(k\w+) = (\d+)")
_ENUM = re.compile(r"enum class (\w+) : (\w+)")
_MEMBERS = re.compile(r"(?:const )?(\w+)((?:\*| const)*) (.+)", re.DOTALL)
_NAME = re.compile(r"(\w+)(?:\[(\w+)\])?(?: = [-\w.]+)?")
# The sources of the functions that Python calls, and how one begins there.
_INTERFACES = ("cpu/api.cpp", "cuda/plan.cpp", "simulate/engine.cpp", "verify/verify.cpp")
_FUNCTION = re.compile(r"^MK_API ([^(]+?)(\w+)\(([^)]*)\) \{", re.MULTILINE)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the native library and return it. Calls into the library release the GIL."""
    # If the package is imported from a checkout that has no library, the library of an installed package is used.
    installed = (Path(str(found.locate_file(_FILE))) for found in distributions(name="megakernel"))
    for path in (Path(__file__).parents[1] / _FILE, *installed):
        if path.exists():
            try:
                return _declared(ctypes.CDLL(str(path)))
            except OSError as e:
                raise MegakernelError(f"cannot load the native library ({e}): install the package again") from e
    raise MegakernelError("the native library is not built: run `pip install .` in the checkout")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, whose functions now take and return what their sources declare."""
    for source in _INTERFACES:
        for result, name, parameters in _FUNCTION.findall((source_folder() / source).read_text()):
            function = getattr(library, name)
            function.restype = None if result == "void " else _kind(result)
            function.argtypes = [_kind(declared) for declared in parameters.split(",") if declared]
    return library


def _kind(declared: str) -> Any:
    """Return the ctypes class of a parameter or a result, such as "const int32_t* rows"."""
    if "*" in declared:
        return ctypes.c_char_p if "char*" in declared else ctypes.c_void_p
    return _NUMBERS[declared.split()[0]]


def source_folder() -> Path:
    """Return the folder csrc: inside the package if it is installed, otherwise next to it."""
    package = Path(__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "cuda" / "megakernel.cu").is_file():
            return folder
    raise MegakernelError(f"the C++ sources are not in {package}: install the package again")


@functools.cache
def structure(header: str, name: str) -> Any:
    """Return a struct that a header of csrc declares, such as Step in "verify/verify.h", as a ctypes class.

    Its members are numbers, pointers (of any type), other structs, and arrays of these. Functions are left out. Raises
    MegakernelError if there is no such struct, or if it has any other member.
    """
    text = re.sub(r"//.*", "", (source_folder() / header).read_text())
    found = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise MegakernelError(f"csrc/{header} has no struct {name}")
    kinds = _NUMBERS | {enum: _NUMBERS[kind] for enum, kind in _ENUM.findall(text)}
    constants = dict(_CONSTANT.findall(text))
    statements = (statement.strip(" }\n") for statement in found[1].split(";"))
    fields = []
    for statement in statements:
        if not statement or "(" in statement:
            continue
        members = _MEMBERS.fullmatch(statement)
        if members and f"\nstruct {members[1]} {{" in text and members[1] not in kinds:
            kinds[members[1]] = structure(header, members[1])
        names = [_NAME.fullmatch(one.strip()) for one in members[3].split(",")] if members else []
        if not members or None in names or not ("*" in members[2] or members[1] in kinds):
            raise MegakernelError(f"csrc/{header} has a member that Python cannot read: {statement}")
        kind = ctypes.c_void_p if "*" in members[2] else kinds[members[1]]
        for one in filter(None, names):
            length: str = one[2] or ""
            fields.append((one[1], kind * int(constants.get(length, length)) if length else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})
