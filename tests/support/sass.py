"""Machine code as nvdisasm prints it: instructions, where they come from and control goes, and registers they name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_LABEL = re.compile(r"^(\S+):$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_SOURCE = re.compile(r'"(?:[^"]*/)?([^"/]+)", line')
_INDIRECT = re.compile(r"BRANCH_TARGETS ([^\"]*)")
_TARGET = re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b(\.64\b)?")
# Who go on elsewhere: never to the instruction behind, if no predicate guards them.
_LEAVES = {"BRA", "BRX", "BRXU", "RET", "EXIT"}


@dataclass(frozen=True)
class Instruction:
    at: int  # bytes from the function's first
    opcode: str  # with its suffixes
    operands: str
    guarded: bool  # by a predicate
    targets: tuple[int, ...] = ()  # indices of instructions
    sources: frozenset[str] = frozenset()  # names of the files with its line and the lines that this is inlined at

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    def registers(self) -> set[int]:
        """All that it names, pairs and longer runs included."""
        found: set[int] = set()
        address = re.sub(r"^.*?(?=\[)|(?<=\])[^\[]*", " ", self.operands) if "[" in self.operands else ""
        for register in _REGISTER.finditer(address):
            found.update(range(int(register[1]), int(register[1]) + (2 if register[2] else 1)))
        for place, operand in enumerate(re.sub(r"\[[^\]]*\]", "", self.operands).split(",")):
            for register in _REGISTER.finditer(operand):
                found.update(range(int(register[1]), int(register[1]) + self._width(place)))
        return found

    def _width(self, place: int) -> int:
        """Registers of an operand, in front of which are `place` others; at least as many as it has."""
        suffixes = self.opcode.split(".")[1:]
        match self.name:
            case "HGMMA":
                return int(suffixes[0].split("x")[1]) // 2
            case "HMMA":
                return 4
            case "LDSM":
                return int(suffixes[-1])
            case "IMAD" | "LEA" if "WIDE" in suffixes:
                return 2 if place in (0, 3) else 1
            case "CS2R":
                return 1 if "32" in suffixes else 2
            case "SHF":
                return 1  # of 64 bits the halves are operands of their own
        if "128" in suffixes:
            return 4
        wide = {"64", "U64", "S64", "F64", "TRANS64"} & set(suffixes)
        return 2 if wide or self.name in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX") else 1


@dataclass
class Code:
    """Of all functions of a cubin."""

    instructions: list[Instruction] = field(default_factory=list)

    def find(self, opcode: str) -> list[int]:
        return [i for i, instruction in enumerate(self.instructions) if instruction.opcode.startswith(opcode)]

    def after(self, i: int) -> list[int]:
        """Where control may go from instruction `i` on, other than back to a caller. A BSYNC goes where the BSSY
        says, so that is already after the BSSY; a call comes back behind itself, so it goes to both."""
        instruction = self.instructions[i]
        ends = instruction.name in _LEAVES and not instruction.guarded
        return [*instruction.targets, *([] if ends else [i + 1])]

    def comes_back(self, call: int) -> bool:
        """Whether someone hands out the address behind the call, for the callee to return to."""
        address = f"0x{self.instructions[call + 1].at:x}"
        return any(i.operands.endswith(address) for i in self.instructions if "MOV" in i.opcode)

    def meetings(self, root: int) -> set[int]:
        """Where those go on who meet in code from `root` on, at a barrier that was set before they came to `root`."""

        def by_barrier(name: str) -> dict[str, set[int]]:
            found: dict[str, set[int]] = {}
            for i in self.find(name):
                found.setdefault(self.instructions[i].operands.split(",")[0], set()).add(i)
            return found

        earlier, sets = self.reachable([0], [root]), by_barrier("BSSY")
        left = (b for b, at in by_barrier("BSYNC").items() if at & self.reachable([root], sets.get(b, set())))
        return {target for b in left for i in sets[b] & earlier for target in self.instructions[i].targets}

    def reachable(self, roots: Iterable[int], without: Iterable[int] = ()) -> set[int]:
        """Indices of the instructions that may run from those at `roots` on, not passing those `without`."""
        seen, todo, closed = set[int](), list(roots), set(without)
        while todo:
            i = todo.pop()
            if i not in seen and i not in closed:
                seen.add(i)
                todo += self.after(i)
        return seen


def parse(text: str) -> Code:
    """Of `nvdisasm --print-code --print-line-info-inline`. Raises ValueError for a jump that it does not understand."""
    labels: dict[str, int] = {}
    lines: list[tuple[re.Match[str], frozenset[str]]] = []
    sources, complete = set[str](), True
    for line in text.splitlines():
        if line.lstrip().startswith("//##"):
            if complete:
                sources, complete = set(), False
            sources.update(_SOURCE.findall(line))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append((instruction, frozenset(sources)))
            complete = True
    code = Code()
    for match, files in lines:
        at, guard, opcode, operands = int(match[1], 16), match[2], match[3], match[4]
        name = opcode.split(".")[0]
        names = _TARGET.findall(operands)
        if name in ("BRX", "BRXU"):
            indirect = _INDIRECT.search(operands)
            if indirect is None:
                raise ValueError(f"{opcode} without targets")
            names = indirect[1].split(",")
        elif name == "RET":
            names = []
        elif name in ("JMP", "JMX", "BPT", "LEPC") or (name in ("BRA", "CALL") and not names):
            raise ValueError(f"{opcode} {operands}")
        elif name not in ("BRA", "CALL", "BSSY", "WARPSYNC"):
            names = []
        targets = tuple(labels[name] for name in names)
        code.instructions.append(Instruction(at, opcode, operands, bool(guard) and guard != "PT", targets, files))
    return code
