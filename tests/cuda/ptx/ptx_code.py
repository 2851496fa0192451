"""Translates the interpreter's PTX into a C++ function that is one GPU thread. Registers become local variables and
branches become gotos. An instruction that involves memory or other threads becomes a call of the runtime (machine.h).

A fault that a test plants is compiled in beside the instruction that it replaces; `planted` selects it at run time.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ptx_faults import Fault
from ptx_table import CPP, TEXTS, meaning

_BYTES = {name: int(re.sub(r"\D", "", name)) // 8 for name in CPP if name != "pred"}
_SPECIAL = {
    "%tid.x": "T.tid",
    "%ctaid.x": "T.ctaid",
    "%laneid": "T.lane",
    "%globaltimer": "T.wall_time()",
    "%clock64": "T.time()",
    "memory": "T.shared_memory()",
    "megakernel_param_0": "T.parameters()",
}
_RMW = {"add": "add(old, {0})", "exch": "{0}", "cas": "old == {0} ? {1} : old"}


@dataclass(frozen=True)
class Statement:
    """`kind`: "open" or "close" of a block, "label", "register" or "instruction". `lines` are the source lines that
    generated it, as file:line, from the innermost function outwards."""

    kind: str
    text: str = ""
    lines: tuple[str, ...] = ()


def statements(ptx: str) -> Iterator[Statement]:
    """Yield the statements of the only kernel."""
    entry = re.search(r"\.visible \.entry megakernel\(.*?\)[^{]*\{(.*?)\n\}\n", ptx, re.S)
    assert entry, "the PTX has no kernel called megakernel"
    files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)}
    text = re.sub(r"//[^\n]*", "", entry[1])
    text = re.sub(r"(\.loc\s[^\n]*)", r"\1;", text)
    callers: dict[str, tuple[str, ...]] = {}
    lines: tuple[str, ...] = ()
    for token in re.finditer(r"\s*(?:([{}])|(\$[\w$]+):|((?:\{[^{}]*\}|[^;{}])*);)", text):
        brace, label, statement = token.groups()
        if brace:
            yield Statement("open" if brace == "{" else "close")
        elif label:
            yield Statement("label", label)
        elif statement.startswith(".loc"):
            told = re.sub(r"\s+", " ", statement) + " inlined_at 0 0 0"
            own, caller = re.findall(r"(?:\.loc|inlined_at)\s+(\d+ \d+ \d+)", told)[:2]
            file, line, _ = own.split()
            lines = (f"{files[file]}:{line}", *callers.get(caller, ()))
            callers[own] = lines
        elif statement.startswith(".reg"):
            yield Statement("register", statement)
        elif not statement.startswith(".pragma"):
            yield Statement("instruction", " ".join(statement.split()), lines)


@dataclass
class Translator:
    """Emits the C++ function. `sources` has the lines of each CUDA source file, by which faults find their place."""

    sources: dict[str, list[str]]
    faults: Sequence[Fault] = ()
    applied: set[Fault] = field(default_factory=set)
    _code: list[str] = field(default_factory=list)
    _types: dict[str, str] = field(default_factory=dict)  # types of registers, by their names without the number
    _used: dict[str, str] = field(default_factory=dict)
    _scopes: list[dict[str, str]] = field(default_factory=list)
    _sites: dict[tuple[str, ...], int] = field(default_factory=dict)
    _copies: list[tuple[str, str]] = field(default_factory=list)  # moves between registers: to, from
    results: set[str] = field(default_factory=set)  # registers that hold results of wgmma

    def translate(self, ptx: str) -> str:
        for statement in statements(ptx):
            self._emit(statement)
        # The code may move results of wgmma to other registers before they are complete.
        while more := {to for to, source in self._copies if source in self.results} - self.results:
            self.results |= more
        by_type: dict[str, list[str]] = {}
        for name, kind in self._used.items():
            by_type.setdefault(kind, []).append(name)
        out = ['#include "machine.h"', "namespace ptx {", "void kernel(Thread& T) {"]
        out += [f"{CPP[kind]} {', '.join(names)};" for kind, names in by_type.items()]
        out.append(f"void* const results[] = {{{', '.join([*(f'&{r}' for r in sorted(self.results)), 'nullptr'])}}};")
        out += ["(void)results;", *self._code, "}"]
        out.append("const char* const kSites[] = {")
        out += [f'"{" < ".join(lines)}",' for lines in self._sites]
        out += ['"none"};', "}  // namespace ptx", ""]
        return "\n".join(out)

    # -- statements

    def _emit(self, statement: Statement) -> None:
        if statement.kind == "open":
            self._scopes.append({})
            self._code.append("{")
        elif statement.kind == "close":
            self._scopes.pop()
            self._code.append("}")
        elif statement.kind == "label":
            self._code.append(f"{_label(statement.text)}:;")
        elif statement.kind == "register":
            self._declare(statement.text)
        else:
            code = self._instruction(statement.text, statement.lines)
            for fault in self.faults:
                edited = fault.edited(statement.text) if self._concerns(fault, statement.lines) else statement.text
                if edited != statement.text:
                    self.applied.add(fault)
                    parts = [part.strip() for part in edited.split(";") if part.strip()]
                    new = " ".join(self._instruction(part, statement.lines) for part in parts)
                    code = f"if (planted == {fault.number}) {{ {new} }} else {{ {code} }}"
            self._code.append(code)

    def _concerns(self, fault: Fault, lines: tuple[str, ...]) -> bool:
        """Whether a fault changes instructions of one of the lines. A `^` in Fault.line means the start of a line."""
        for file, number in (place.split(":") for place in lines):
            if file == fault.file and fault.line in f"^{self.sources[file][int(number) - 1].strip()}":
                return True
        return False

    def _declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        assert match, text
        for name in re.split(r",\s*", match[2]):
            if many := re.fullmatch(r"%(\w+)<\d+>", name):
                self._types[many[1]] = match[1]
            else:
                self._scopes[-1][name] = match[1]
                self._code.append(f"{CPP[match[1]]} {self.name(name)};")

    def _instruction(self, text: str, lines: tuple[str, ...]) -> str:
        match = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
        assert match, text
        negated, predicate, opcode, rest = match.groups()
        # Operands are separated by commas outside of brackets.
        operands = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", rest) if part.strip()]
        entry, chosen = meaning(opcode, len(operands))
        if entry.code in HANDLERS:
            code = HANDLERS[entry.code](self, operands, chosen)
        else:
            sources = operands[1:] if entry.result else operands
            kinds = [chosen.get(kind, kind) for kind in entry.operands]
            values = [self._operand(o, kind) for o, kind in zip(sources, kinds, strict=True)]
            # Operands of kind * are empty texts here. They come first, and are destinations that the code does not use.
            values = values[len(values) - len([v for v in values if v]) :]
            code = entry.code.format(*values, **{name: TEXTS.get(text, text) for name, text in chosen.items()})
            if entry.result:
                code = self.assign(operands[0], code, chosen.get(entry.result, entry.result))
            if opcode.startswith(("mov.", "selp.")):
                registers = [o for o in sources[:2] if o.startswith("%") and o not in _SPECIAL]
                self._copies += [(self.name(operands[0]), self.name(o)) for o in registers]
        if "T." in code:
            code = f"T.site = {self._sites.setdefault(lines, len(self._sites))}; {code}"
        guard = f"if ({negated}{self.name(predicate)}) " if predicate else ""
        return f"{guard}{{ {code}; }}"

    # -- operands

    def _operand(self, operand: str, kind: str) -> str:
        """The C++ text of an operand. ptx_table.py lists the kinds."""
        if kind == "*":
            return ""
        if kind == "label":
            return _label(operand)
        if kind == "box":  # [map, {coordinates}]
            match = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", operand, re.S)
            assert match, operand
            coordinates = [self.value(v, "s32") for v in _list(match[2])]
            return f"{self.value(match[1], 'u64')}, {{{', '.join(coordinates)}}}, {len(coordinates)}"
        return self.value(operand, kind) if kind in CPP else self.address(operand, kind)

    def name(self, register: str) -> str:
        if any(register in scope for scope in self._scopes):
            return f"local_{register.lstrip('%')}"
        self._used[register[1:]] = self._kind(register)
        return register[1:]

    def _kind(self, register: str) -> str:
        own = next((scope[register] for scope in reversed(self._scopes) if register in scope), None)
        return own or self._types[re.sub(r"\d+$", "", register[1:])]

    def value(self, operand: str, kind: str) -> str:
        """A C++ expression of the type `kind` for an operand."""
        cpp = CPP[kind]
        if operand in _SPECIAL:
            return f"as<{cpp}>({_SPECIAL[operand]})"
        if match := re.fullmatch(r"0([fF][0-9a-fA-F]{8}|[dD][0-9a-fA-F]{16})", operand):
            return f"as<{cpp}>(uint{8 * (len(match[1]) // 2)}_t{{0x{match[1][1:]}}})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0) % 2**64
            if kind == "pred":
                return str(int(number != 0))
            return f"as<{cpp}>(uint64_t{{{number}u}})" if kind[0] == "f" else f"({cpp}){number}u"
        name, own = self.name(operand), self._kind(operand)
        if CPP[own] == cpp:
            return name
        # Most conversions are between integers. They are casts, because compilers are slower at templates.
        return f"as<{cpp}>({name})" if {own[0], kind[0]} & {"f", "p"} else f"({cpp}){name}"

    def assign(self, register: str, value: str, kind: str = "") -> str:
        """Assign a C++ expression. `kind` is its type, if it is known."""
        if register == "_":
            return f"(void)({value})"
        own = self._kind(register)
        if kind and (CPP[own] == CPP[kind] or not {own[0], kind[0]} & {"f", "p"}):
            return f"{self.name(register)} = ({CPP[own]})({CPP[kind]})({value})"
        return f"set({self.name(register)}, {value})"

    def address(self, operand: str, space: str) -> str:
        """The address [register + offset]: of 32 bits in shared memory, otherwise of 64."""
        match = re.fullmatch(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match, operand
        kind = "u32" if space == "shared" else "u64"
        return f"({self.value(match[1], kind)} + {CPP[kind]}({match[2] or 0}))"

    def generic(self, operand: str, space: str) -> str:
        """A generic address of 64 bits, which T.read and T.write take."""
        return f"T.generic({self.address(operand, 'shared')})" if space == ".shared" else self.address(operand, space)


def _label(text: str) -> str:
    return "L" + re.sub(r"\W", "_", text)


def _list(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


# -- instructions with operands other than single values


def _fetch(x: Translator, registers: str, at: str, m: dict[str, str]) -> str:
    """Declare `at`, an address, and load the registers from there."""
    names = _list(registers)
    size, cpp = _BYTES[m["t"]], CPP[m["t"]]
    at = at.replace("BYTES", str(size * len(names)))
    loads = "; ".join(x.assign(name, f"get<{cpp}>(at + {i * size})") for i, name in enumerate(names))
    return f"const char* at = {at}; {loads}"


def _parameter(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return _fetch(x, o[0], f"reinterpret_cast<const char*>({x.address(o[1], 'param')})", m)


def _load(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return _fetch(x, o[0], f"T.read({x.generic(o[1], m['space'])}, BYTES, {TEXTS[m['o']]})", m)


def _store(x: Translator, o: list[str], m: dict[str, str]) -> str:
    values = [x.value(v, m["t"]) for v in _list(o[1])]
    size = _BYTES[m["t"]]
    puts = "; ".join(f"put(at + {i * size}, {value})" for i, value in enumerate(values))
    return f"char* at = T.write({x.generic(o[0], m['space'])}, {size * len(values)}, {TEXTS[m['o']]}); {puts}"


def _atomic(x: Translator, o: list[str], m: dict[str, str]) -> str:
    order = TEXTS[m["o"] or ".relaxed.gpu"]
    new = _RMW[m["op"]].format(*(x.value(v, m["t"]) for v in o[2:]))
    cpp = CPP[m["t"]]
    return (
        f"char* at = T.update({x.generic(o[1], m['space'])}, {_BYTES[m['t']]}, {order}); "
        f"const {cpp} old = get<{cpp}>(at); put<{cpp}>(at, {new}); {x.assign(o[0], 'old')}"
    )


def _reduce(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return _atomic(x, ["_", *o], m)


def _shuffle(x: Translator, o: list[str], m: dict[str, str]) -> str:
    to, _, ok = o[0].partition("|")
    arguments = ", ".join(x.value(v, "b32") for v in o[1:])
    also = f"; {x.assign(ok, 'got.ok')}" if ok else ""
    return f"const auto got = T.shuffle({int(m['mode'] == 'bfly')}, {arguments}); {x.assign(to, 'got.value')}{also}"


def _mma(x: Translator, o: list[str], m: dict[str, str]) -> str:
    d, a, b, c = map(_list, o)
    kinds = (("float", "c", c, "f32"), ("uint32_t", "a", a, "b32"), ("uint32_t", "b", b, "b32"))
    parts = [f"{cpp} {name}[] = {{{', '.join(x.value(v, k) for v in values)}}}" for cpp, name, values, k in kinds]
    return "; ".join([*parts, "T.mma(c, a, b)", *(x.assign(r, f"c[{i}]") for i, r in enumerate(d))])


def _ldmatrix(x: Translator, o: list[str], m: dict[str, str]) -> str:
    sets = "; ".join(x.assign(r, f"d[{i}]") for i, r in enumerate(_list(o[0])))
    return f"uint32_t d[4]; T.ldmatrix({x.address(o[1], 'shared')}, d); {sets}"


def _wgmma(x: Translator, o: list[str], m: dict[str, str]) -> str:
    names = [x.name(register) for register in _list(o[0])]
    assert 2 * len(names) == int(m["n"]) and o[4:] == ["1", "1", "0", "0"], o
    x.results.update(names)
    values = f"{x.value(o[1], 'b64')}, {x.value(o[2], 'b64')}, {x.value(o[3], 'pred')}"
    return f"void* const d[] = {{{', '.join(f'&{name}' for name in names)}}}; T.wgmma(d, {m['n']}, {values})"


HANDLERS: dict[str, Callable[[Translator, list[str], dict[str, str]], str]] = {
    function.__name__[1:]: function
    for function in (_parameter, _load, _store, _atomic, _reduce, _shuffle, _mma, _ldmatrix, _wgmma)
}
