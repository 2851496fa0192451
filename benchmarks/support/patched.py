"""Replaces the code of a loaded module's functions by the code from another version of its source."""

import gc
import inspect
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType

_Key = tuple[str, int]  # name and line


def patch(file: str, good: str, source: str) -> bool:
    """Replace the code of a loaded module's functions by their code in `source`, and return whether this was possible.
    The module was loaded from `file`, whose source was `good`. Returns False if patching cannot have the effect of
    loading `source`: if code that ran while the module was loaded differs, or if a changed function cannot be
    identified. Some functions may have been patched before False is returned."""
    pairs = list(_pairs(compile(good, file, "exec"), compile(source, file, "exec")))
    if any(old is None or new is None for old, new in pairs):
        return False
    keys = Counter((old.co_qualname, old.co_firstlineno) for old, _ in pairs if old)
    changed: dict[_Key, CodeType] = {}
    for old, new in pairs:
        assert old is not None and new is not None
        if not old.co_flags & inspect.CO_OPTIMIZED and _own(old) != _own(new):
            return False  # code of a module or class, which has run already and cannot be replaced
        if _whole(old) != _whole(new):
            key = old.co_qualname, old.co_firstlineno
            if keys[key] > 1:
                return False
            changed[key] = new
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == file:
            new = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if new is not None:
                if new.co_freevars != function.__code__.co_freevars:
                    return False
                function.__code__ = new
    return True


def _nested(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType | None, CodeType | None]]:
    """Yield each code object nested in `old`, and `old` itself, with its counterpart in `new`. Yields (None, None) if
    two counterparts contain different numbers of code objects, so that they cannot be matched."""
    yield old, new
    if len(_nested(old)) != len(_nested(new)):
        yield None, None
    for one, other in zip(_nested(old), _nested(new), strict=False):
        yield from _pairs(one, other)


def _own(code: CodeType) -> tuple[object, ...]:
    constants = [(type(value), value) for value in code.co_consts if not isinstance(value, CodeType)]
    return code.co_code, repr(constants), code.co_names, code.co_varnames, code.co_freevars, code.co_name


def _whole(code: CodeType) -> tuple[object, ...]:
    return *_own(code), *map(_whole, _nested(code))
