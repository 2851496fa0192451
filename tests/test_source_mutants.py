"""Tests the mutants of source code: what they change, what they never change, and that their descriptions are right."""

import ast

from source_mutants import of_cpp, of_python

PYTHON = '''"""A text with 3 < 4."""
@dataclass(frozen=True)
class A:
    size: Annotated[int, 7] = 3


def f(x: int | None) -> int | None:
    if x is None or x < 10:
        raise ValueError(f"é {x + 1}")
    log("é", 1.5)
    return x + 1
'''


def test_python() -> None:
    found = {(m.line, m.before, m.after) for m in of_python(PYTHON)}
    assert found == {
        (4, "3", "(4)"),
        (4, "3", "(2)"),
        (8, "x is None or x < 10", "(x is None and x < 10)"),
        (8, "x is None", "(x is not None)"),
        (8, "x < 10", "(x <= 10)"),
        (8, "x < 10", "(x >= 10)"),
        (8, "10", "(11)"),
        (8, "10", "(9)"),
        (9, 'raise ValueError(f"é {x + 1}")', "pass"),
        (10, 'log("é", 1.5)', "pass"),
        (10, "1.5", "(3.0)"),
        (10, "1.5", "(0.75)"),
        (11, "return x + 1", "return None"),
        (11, "x + 1", "(x - 1)"),
        (11, "1", "(2)"),
        (11, "1", "(0)"),
    }
    for mutant in of_python(PYTHON):
        assert ast.dump(ast.parse(mutant.applied(PYTHON))) != ast.dump(ast.parse(PYTHON))


CPP = """#include <a-1.h>  // 5 < 6
template <int N> int f(const char* s) {
    if (s[0] == '1' && !done) count += 2;
    total_.add(N);
    return x1 < y ? 7 : sum(s);
}
"""


def test_cpp() -> None:
    found = {(m.line, m.before.strip(), m.after.strip()) for m in of_cpp(CPP)}
    assert found == {
        (3, "==", "!="),
        (3, "&&", "||"),
        (3, "!", ""),
        (3, "+=", "-="),
        (3, "0", "1"),
        (3, "0", "-1"),
        (3, "2", "3"),
        (3, "2", "1"),
        (4, "total_.add(N)", ""),
        (5, "<", "<="),
        (5, "<", ">="),
        (5, "7", "8"),
        (5, "7", "6"),
    }
    assert {m.applied(CPP) == CPP for m in of_cpp(CPP)} == {False}
