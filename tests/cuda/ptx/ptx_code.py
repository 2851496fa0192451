"""Translates the interpreter's PTX into a C++ function that is one GPU thread. Registers become local variables and
branches become gotos. An instruction that involves memory or other threads becomes a call of the runtime (machine.h).

A fault that a test plants is compiled in beside the instruction that it replaces; `planted` selects it at run time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword

from ptx_table import CPP, MEANINGS, meaning

_BYTES = {name: int(re.sub(r"\D", "", name)) // 8 for name in CPP if name != "pred"}
_SPECIAL = {
    "%tid.x": "T.tid",
    "%ctaid.x": "T.ctaid",
    "%laneid": "T.lane",
    "%globaltimer": "T.time()",
    "%clock64": "T.time()",
}
_ORDERS = {
    "": "kWeak",
    ".volatile": "Order{kSystem}",
    ".relaxed.gpu": "Order{kGpu}",
    ".relaxed.sys": "Order{kSystem}",
    ".acquire.gpu": "Order{kGpu, kAcquire}",
    ".acquire.sys": "Order{kSystem, kAcquire}",
    ".release.gpu": "Order{kGpu, kRelease}",
    ".release.sys": "Order{kSystem, kRelease}",
    ".acq_rel.gpu": "Order{kGpu, kAcquire | kRelease}",
}
_RMW = {"add": "add(old, {0})", "exch": "{0}", "cas": "old == {0} ? {1} : old"}


@dataclass(frozen=True)
class Fault:
    """An edit of the PTX: within the instructions that `file` and `line` (a part of the source line) generate, also by
    inlining, replaces the first `most` matches of `pattern` in an instruction's text by `to`. An empty result omits
    the instruction."""

    file: str
    line: str
    pattern: str
    to: str = ""
    most: int = 1_000_000


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
            own, caller = re.findall(
                r"(?:\.loc|inlined_at)\s+(\d+ \d+ \d+)", re.sub(r"\s+", " ", statement) + " inlined_at 0 0 0"
            )[:2]
            file, line, _ = own.split()
            lines = (f"{files[file]}:{line}", *callers.get(caller, ()))
            callers[own] = lines
        elif statement.startswith(".reg"):
            yield Statement("register", statement)
        elif not statement.startswith(".pragma"):
            yield Statement("instruction", " ".join(statement.split()), lines)


@dataclass
class Translator:
    """Emits the C++ function. `sources` are the lines of each source file, in which faults look for their lines."""

    sources: dict[str, list[str]]
    faults: Sequence[Fault] = ()
    applied: dict[int, int] = field(default_factory=dict)  # how many instructions each fault has changed
    _code: list[str] = field(default_factory=list)
    _types: dict[str, str] = field(default_factory=dict)  # the register classes that the kernel declares
    _used: dict[str, str] = field(default_factory=dict)
    _scopes: list[dict[str, str]] = field(default_factory=list)
    _sites: dict[tuple[str, ...], int] = field(default_factory=dict)
    _copies: list[tuple[str, str]] = field(default_factory=list)  # moves between registers: to, from
    _results: set[str] = field(default_factory=set)  # registers that hold results of wgmma

    def translate(self, ptx: str) -> str:
        cluster = re.search(r"\.reqnctapercluster (\d+)", ptx)
        for statement in statements(ptx):
            self._emit(statement)
        results = self._wgmma_registers()
        by_type: dict[str, list[str]] = {}
        for name, kind in self._used.items():
            by_type.setdefault(kind, []).append(name)
        out = ['#include "machine.h"', "namespace ptx {", "void kernel(Thread& T) {"]
        out += [f"{CPP[kind]} {', '.join(names)};" for kind, names in by_type.items()]
        out.append(f"void* const results[] = {{{', '.join([*(f'&{r}' for r in results), 'nullptr'])}}};")
        out += ["(void)results;", *self._code, "}"]
        out.append(f"const int kClusterBlocks = {cluster[1] if cluster else 1};")
        out.append("const char* const kSites[] = {")
        out += [f'"{" < ".join(lines)}",' for lines in self._sites]
        out += ['"none"};', "}  // namespace ptx", ""]
        return "\n".join(out)

    def _wgmma_registers(self) -> list[str]:
        """The registers to which results of wgmma may have been moved before they were complete."""
        found = set(self._results)
        while more := {to for to, source in self._copies if source in found} - found:
            found |= more
        return sorted(found)

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
            for number, fault in enumerate(self.faults, 1):
                if self.applied.get(number, 0) < fault.most and self._concerns(fault, statement.lines):
                    changed = re.sub(fault.pattern, fault.to, statement.text)
                    if changed != statement.text:
                        self.applied[number] = self.applied.get(number, 0) + 1
                        parts = [part.strip() for part in changed.split(";") if part.strip()]
                        new = " ".join(self._instruction(part, statement.lines) for part in parts)
                        code = f"if (planted == {number}) {{ {new} }} else {{ {code} }}"
            self._code.append(code)

    def _concerns(self, fault: Fault, lines: tuple[str, ...]) -> bool:
        for place in lines:
            file, _, line = place.partition(":")
            if file == fault.file and fault.line in self.sources[file][int(line) - 1]:
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
        entry, chosen = meaning(opcode)
        operands = _split(rest)
        if entry.code in HANDLERS:
            code = HANDLERS[entry.code](self, operands, chosen)
        else:
            types = [chosen.get(kind, kind) for kind in entry.operands]
            sources = operands[1:] if entry.result else operands
            values = [self.value(o, kind) if kind in CPP else "" for o, kind in zip(sources, types, strict=True)]
            code = entry.code.format(*values, **{name: CPP.get(text, text) for name, text in chosen.items()})
            if entry.result:
                kind = chosen.get(entry.result, entry.result)
                code = self.assign(operands[0], code, kind)
                if opcode.startswith("mov.") or opcode.startswith("selp."):
                    self._copies += [
                        (self.name(operands[0]), self.name(o))
                        for o in sources[:2]
                        if o.startswith("%") and o not in _SPECIAL
                    ]
        if "T." in code:
            code = f"T.site = {self._sites.setdefault(lines, len(self._sites))}; {code}"
        guard = f"if ({negated}{self.name(predicate)}) " if predicate else ""
        return f"{guard}{{ {code}; }}"

    # -- operands

    def name(self, register: str) -> str:
        """The C++ variable of a register."""
        if any(register in scope for scope in self._scopes):
            return f"local_{register.lstrip('%')}"
        kind = self._types[re.sub(r"\d+$", "", register[1:])]
        self._used[register[1:]] = kind
        return register[1:]

    def value(self, operand: str, kind: str) -> str:
        """A C++ expression of the type `kind` for an operand."""
        cpp = CPP[kind]
        if operand in _SPECIAL:
            return f"as<{cpp}>({_SPECIAL[operand]})"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"as<{cpp}>(uint32_t{{0x{match[1]}}})"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return f"as<{cpp}>(uint64_t{{0x{match[1]}}})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0) % 2**64
            if kind == "pred":
                return str(int(number != 0))
            return f"as<{cpp}>(uint64_t{{{number}u}})" if kind[0] == "f" else f"({cpp}){number}u"
        if operand == "memory":
            return f"as<{cpp}>(T.shared_memory())"
        if operand.startswith("megakernel_param_0"):
            return f"as<{cpp}>(T.parameters())"
        name = self.name(operand)
        own = self._kind(operand)
        if own == kind or CPP[own] == cpp:
            return name
        # Conversions between integers are the bulk of the code, which a compiler reads faster without templates.
        return (
            f"({cpp}){name}" if own[0] == kind[0] == "b" or not {own[0], kind[0]} & {"f", "p"} else f"as<{cpp}>({name})"
        )

    def assign(self, register: str, value: str, kind: str = "") -> str:
        """Assign a C++ expression. `kind` is its type, if it is known."""
        if register == "_":
            return f"(void)({value})"
        own = self._kind(register)
        if kind and (CPP[own] == CPP[kind] or not {own[0], kind[0]} & {"f", "p"}):
            return f"{self.name(register)} = ({CPP[own]})({CPP[kind]})({value})"
        return f"set({self.name(register)}, {value})"

    def _kind(self, register: str) -> str:
        for scope in reversed(self._scopes):
            if register in scope:
                return scope[register]
        return self._types[re.sub(r"\d+$", "", register[1:])]

    def address(self, operand: str, space: str = "shared") -> str:
        """The address [register + offset]: of 32 bits in shared memory, otherwise of 64."""
        match = re.fullmatch(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match, operand
        kind = "u32" if space == "shared" else "u64"
        return f"({self.value(match[1], kind)} + {CPP[kind]}({match[2] or 0}))"

    def generic(self, operand: str, space: str) -> str:
        """An address for T.read and T.write."""
        return f"T.generic({self.address(operand)})" if space == ".shared" else self.address(operand, "generic")

    def results(self, registers: Iterable[str]) -> str:
        """A list of the addresses of registers that a wgmma writes."""
        names = [self.name(register) for register in registers]
        self._results.update(names)
        return ", ".join(f"&{name}" for name in names)


def _label(text: str) -> str:
    return "L" + re.sub(r"\W", "_", text)


def _split(operands: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", operands)
    return [part.strip() for part in parts if part.strip()]


def _list(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


# -- instructions whose operands are more than values

Handler = Callable[[Translator, list[str], dict[str, str]], str]


def _fetch(x: Translator, registers: str, at: str, m: dict[str, str]) -> str:
    """Declare `at`, an address, and load the registers from there."""
    names = _list(registers) if m["v"] else [registers]
    size, cpp = _BYTES[m["t"]], CPP[m["t"]]
    at = at.replace("BYTES", str(size * len(names)))
    loads = "; ".join(x.assign(name, f"get<{cpp}>(at + {i * size})") for i, name in enumerate(names))
    return f"const char* at = {at}; {loads}"


def _parameter(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return _fetch(x, o[0], f"reinterpret_cast<const char*>({x.address(o[1], 'param')})", m)


def _load(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return _fetch(x, o[0], f"T.read({x.generic(o[1], m['space'])}, BYTES, {_ORDERS[m['o']]})", m)


def _store(x: Translator, o: list[str], m: dict[str, str]) -> str:
    values = [x.value(v, m["t"]) for v in (_list(o[1]) if m["v"] else [o[1]])]
    size = _BYTES[m["t"]]
    puts = "; ".join(f"put(at + {i * size}, {value})" for i, value in enumerate(values))
    return f"char* at = T.write({x.generic(o[0], m['space'])}, {size * len(values)}, {_ORDERS[m['o']]}); {puts}"


def _atomic(x: Translator, o: list[str], m: dict[str, str]) -> str:
    order = _ORDERS[m["o"] or ".relaxed.gpu"]
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


def _box(x: Translator, operand: str, n: str) -> str:
    """The operand [map, {coordinates}], as C++: the map's address, and the coordinates."""
    match = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", operand, re.S)
    assert match, operand
    coordinates = [x.value(v, "s32") for v in _list(match[2])]
    assert len(coordinates) == int(n[0]), operand
    return f"{x.value(match[1], 'u64')}, {{{', '.join(coordinates)}}}, {n[0]}"


def _load_box(x: Translator, o: list[str], m: dict[str, str]) -> str:
    mask = x.value(o[3], "u16") if len(o) > 3 else "0"
    return f"T.load_box({x.address(o[0])}, {_box(x, o[1], m['n'])}, {x.address(o[2])}, {mask})"


def _load_bytes(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.load_bytes({x.address(o[0])}, {x.address(o[1], 'global')}, {x.value(o[2], 'u32')}, {x.address(o[3])})"


def _store_box(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.store_box({_box(x, o[0], m['n'])}, {x.address(o[1])}, false)"


def _add_box(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.store_box({_box(x, o[0], m['n'])}, {x.address(o[1])}, true)"


def _prefetch_box(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.prefetch_box({_box(x, o[0], m['n'])})"


def _barrier(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.barrier({x.value(o[0], 'u32')}, {x.value(o[1], 'u32') if len(o) > 1 else 0})"


def _acquire_map(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.acquire_map({x.address(o[0], 'global')}, {x.value(o[1], 'u32')})"


def _barrier_init(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.init({x.address(o[0])}, {x.value(o[1], 'u32')})"


def _barrier_arrive(x: Translator, o: list[str], m: dict[str, str]) -> str:
    count = x.value(o[2], "u32") if len(o) > 2 else "1"
    return f"T.arrive({x.address(o[1])}, {count}, 0, {_scope(m)}, {str(m['o'] == 'release').lower()})"


def _barrier_expect(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.arrive({x.address(o[1])}, 1, {x.value(o[2], 'u32')}, {_scope(m)}, true)"


def _barrier_wait(x: Translator, o: list[str], m: dict[str, str]) -> str:
    acquire = str(m["o"] == "acquire").lower()
    return x.assign(o[0], f"T.wait({x.address(o[1])}, {x.value(o[2], 'u32')}, {_scope(m)}, {acquire})")


def _scope(m: dict[str, str]) -> str:
    return f"k{m['scope'].capitalize()}"


def _mma(x: Translator, o: list[str], m: dict[str, str]) -> str:
    d, a, b, c = map(_list, o)
    parts = [
        f"{cpp} {name}[] = {{{', '.join(x.value(v, kind) for v in values)}}}"
        for cpp, name, values, kind in (
            ("float", "c", c, "f32"),
            ("uint32_t", "a", a, "b32"),
            ("uint32_t", "b", b, "b32"),
        )
    ]
    return "; ".join([*parts, "T.mma(c, a, b)", *(x.assign(r, f"c[{i}]") for i, r in enumerate(d))])


def _ldmatrix(x: Translator, o: list[str], m: dict[str, str]) -> str:
    sets = "; ".join(x.assign(r, f"d[{i}]") for i, r in enumerate(_list(o[0])))
    return f"uint32_t d[4]; T.ldmatrix({x.address(o[1])}, d); {sets}"


def _wgmma(x: Translator, o: list[str], m: dict[str, str]) -> str:
    registers = _list(o[0])
    assert len(registers) == 64 and o[4:] == ["1", "1", "0", "0"], o
    values = f"{x.value(o[1], 'b64')}, {x.value(o[2], 'b64')}, {x.value(o[3], 'pred')}"
    return f"void* const d[] = {{{x.results(registers)}}}; T.wgmma(d, {values})"


def _wgmma_wait(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.wgmma_wait({x.value(o[0], 'u32')}, results)"


def _registers(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"T.set_registers({str(m['way'] == 'inc').lower()}, {x.value(o[0], 'u32')})"


def _jump(x: Translator, o: list[str], m: dict[str, str]) -> str:
    return f"goto {_label(o[0])}"


HANDLERS: dict[str, Handler] = {
    code: globals()[f"_{code}"]
    for code in {entry.code for entry in MEANINGS}
    if code.isidentifier() and not iskeyword(code)
}
