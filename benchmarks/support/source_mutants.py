"""Lists the small changes of a source file that tests should notice. Changes of Python are found in its syntax tree,
changes of C++ by regular expressions. Strings, annotations, decorators and preprocessor lines are not changed."""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class SourceMutant:
    """One change of a source file: the text `before`, at a character offset, is replaced by `after`. Only tests that
    execute one of `lines` can notice the change."""

    offset: int
    before: str
    after: str
    kind: str
    line: int
    lines: tuple[int, ...]

    def applied(self, source: str) -> str:
        return source[: self.offset] + self.after + source[self.offset + len(self.before) :]


_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}


def of_python(source: str) -> list[SourceMutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    texts = source.splitlines()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(texts[line - 1].encode()[:column].decode())

    out = []
    for node, statement, kind, after in _changes(ast.parse(source)):
        begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
        header = range(statement.lineno, _header_end(statement) + 1)
        lines = (*dict.fromkeys((*range(node.lineno, (node.end_lineno or 0) + 1), *header)),)
        lines = tuple(n for n in lines if n in header) or (statement.lineno,)
        out.append(SourceMutant(begin, source[begin:end], after, kind, node.lineno, lines))
    return out


def _header_end(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno


_Change = tuple[ast.expr | ast.stmt, ast.stmt, str, str]


def _changes(tree: ast.Module) -> Iterator[_Change]:
    """Yield tuples: the node to replace, the statement that contains it, the kind of change, and the new text."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        yield from ((statement, statement, *found) for found in _of_statement(statement))
        for name, field in ast.iter_fields(statement):
            if name in ("annotation", "returns", "decorator_list", "bases", "keywords", "type_params"):
                continue
            for part in field if isinstance(field, list) else [field]:
                yield from _of_expressions(part, statement)


def _of_expressions(part: object, statement: ast.stmt) -> Iterator[_Change]:
    """Yield the small changes to try in an expression and its parts, but not in statements, f-strings and
    annotations."""
    if not isinstance(part, ast.AST) or isinstance(part, ast.stmt | ast.JoinedStr | ast.excepthandler | ast.match_case):
        return
    if isinstance(part, ast.expr):
        yield from ((part, statement, *found) for found in _of_expression(part))
    for name, field in ast.iter_fields(part):
        if name != "annotation" and not (isinstance(part, ast.Call) and name == "func"):
            for inner in field if isinstance(field, list) else [field]:
                yield from _of_expressions(inner, statement)
        elif name == "func":
            yield from _of_expressions(getattr(field, "value", None), statement)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "statement removed", "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "returns nothing", "return None"
        case ast.Continue():
            yield "statement removed", "pass"
        case ast.Break():
            yield "statement removed", "pass"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    def text(kind: str, **fields: object) -> tuple[str, str]:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return kind, f"({ast.unparse(changed)})"

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in _COMPARISONS[type(op)]:
                    yield text("comparison", ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BinOp(op=op) if type(op) in _OPERATORS and not _of_texts(node):
            yield text("operator", op=_OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield text("condition", op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "operator", f"({ast.unparse(operand)})"
        case ast.IfExp(test=test):
            yield text("condition", test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=float() as value) if value:  # to be off by 1 is no mistake in a measured figure
            yield "constant", f"({2 * value})"
            yield "constant", f"({value / 2})"
        case ast.Constant(value=int() | float() as value):
            yield "constant", f"({value + 1})"
            yield "constant", f"({value - 1})"


def _of_texts(node: ast.BinOp) -> bool:
    parts = [part for part in (node.left, node.right) if isinstance(part, ast.JoinedStr | ast.Constant)]
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in parts)


# -- C++

_HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE
)
_TOKENS: dict[str, tuple[str, ...]] = {
    " < ": (" <= ", " >= "),
    " <= ": (" < ", " > "),
    " > ": (" >= ", " <= "),
    " >= ": (" > ", " < "),
    " == ": (" != ",),
    " != ": (" == ",),
    " && ": (" || ",),
    " || ": (" && ",),
    " + ": (" - ",),
    " - ": (" + ",),
    " * ": (" / ",),
    " / ": (" * ",),
    " % ": (" / ",),
    " += ": (" -= ",),
    " -= ": (" += ",),
    " << ": (" >> ",),
    " >> ": (" << ",),
    " & ": (" | ",),
    " | ": (" & ",),
    "!": ("",),
    "true": ("false",),
    "false": ("true",),
}
_TOKEN = re.compile(
    "|".join((*map(re.escape, sorted(_TOKENS, key=len, reverse=True)[:-3]), r"!(?=[\w(])", r"\btrue\b", r"\bfalse\b"))
)
_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
_STATEMENT = re.compile(
    r"(?<=^)[ \t]+((?:[\w.\[\]]|->|::)+(?:\([^;{}\n]*\)| (?:[-+*|&/]?|<<|>>)= [^;{}\n]*));$", re.MULTILINE
)


def of_cpp(source: str) -> list[SourceMutant]:
    """Return the small changes of a C++ source that tests should notice. Some matched text only looks like an operator.
    Changes there do not compile, or compile to the same machine code."""
    shown = _HIDDEN.sub(lambda m: re.sub(r"[^\n]", "\0", m[0]), source)

    def made(begin: int, before: str, after: str, kind: str) -> SourceMutant:
        line = source.count("\n", 0, begin + 1 - before.startswith("\n")) + 1
        return SourceMutant(begin, before, after, kind, line, (line,))

    out = []
    for match in _TOKEN.finditer(shown):
        kind = "comparison" if match[0].strip() in ("<", "<=", ">", ">=", "==", "!=") else "operator"
        out += [made(match.start(), match[0], after, kind) for after in _TOKENS[match[0]]]
    for match in _NUMBER.finditer(shown):
        out += [made(match.start(), match[0], str(int(match[0]) + by), "constant") for by in (1, -1)]
    for match in _STATEMENT.finditer(shown):
        if not match[1].startswith("return"):
            out.append(made(match.start(1), match[1], "", "statement removed"))
    return out
