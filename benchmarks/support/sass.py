"""Parses machine code as nvdisasm prints it: instructions, their source lines, control flow, registers, and how long a
warp that has issued an instruction must wait before the next.

This wait is the stall count that the compiler writes into each instruction. The upper bits of an instruction's 128 bits
are for the scheduler (Jia et al., *Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking*, arXiv
1804.06826, section 2.1; the layout has not changed since Volta):

    125-122  reuse of operand caches         115-113  read barrier (7: none)     109      yield
    121-116  barriers to wait for (a mask)   112-110  write barrier (7: none)    108-105  stall, in cycles

A read barrier is released when the instruction has read its operands, a write barrier when its result is available. The
stall count does not include waits for barriers, so the sum of stalls along a path is a lower bound.
"""

from __future__ import annotations

import heapq
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_LABEL = re.compile(r"^(\S+):$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/\s*$")
# Positions, in the upper 64 bits of an instruction, of the stall count and of the barriers.
_STALL_BIT, _RELEASES_BIT, _AWAITS_BIT, _NO_BARRIER = 105 - 64, 110 - 64, 116 - 64, 7
_SOURCE = re.compile(r'"(?:[^"]*/)?([^"/]+)", line (\d+)')
_INDIRECT = re.compile(r"BRANCH_TARGETS ([^\"]*)")
_TARGET = re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b(\.64\b)?")
CODE_LINE = 128  # bytes in a line of the instruction cache
# Instructions that never continue with the next instruction, unless a predicate guards them.
_LEAVES = {"BRA", "BRX", "BRXU", "RET", "EXIT"}


@dataclass(frozen=True)
class Instruction:
    at: int  # offset in the function, in bytes
    opcode: str  # with its suffixes
    operands: str
    guarded: bool  # by a predicate
    targets: tuple[int, ...] = ()  # indices of the instructions to which this one may jump

    # Files and line numbers of the instruction's source line, and of the calls through which that line was inlined.
    lines: frozenset[tuple[str, int]] = frozenset()
    stall: int = 0  # cycles
    awaits: int = 0  # a bit mask of the barriers that must be released before this instruction is issued
    releases: int | None = None  # the barrier that is released when this instruction's result is available

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def sources(self) -> set[str]:
        return {file for file, _ in self.lines}

    def registers(self) -> set[int]:
        """Return the numbers of all registers that an instruction uses, including those of pairs and longer vectors."""
        found: set[int] = set()
        address = re.sub(r"^.*?(?=\[)|(?<=\])[^\[]*", " ", self.operands) if "[" in self.operands else ""
        for register in _REGISTER.finditer(address):
            found.update(range(int(register[1]), int(register[1]) + (2 if register[2] else 1)))
        for place, operand in enumerate(re.sub(r"\[[^\]]*\]", "", self.operands).split(",")):
            for register in _REGISTER.finditer(operand):
                found.update(range(int(register[1]), int(register[1]) + self._width(place)))
        return found

    def _width(self, place: int) -> int:
        """Return how many registers the operand with index `place` occupies, at least one."""
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
                return 1  # one register per operand, because the halves of a 64-bit value are separate operands
        if "128" in suffixes:
            return 4
        wide = {"64", "U64", "S64", "F64", "TRANS64"} & set(suffixes)
        return 2 if wide or self.name in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX") else 1


@dataclass(frozen=True, order=True)
class Floor:
    """A lower bound for a path through the code: a warp's stall counts, in cycles, and its number of instructions."""

    stalls: int
    instructions: int

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.stalls + other.stalls, self.instructions + other.instructions)

    def __sub__(self, other: Floor) -> Floor:
        return self + other * -1

    def __mul__(self, times: int) -> Floor:
        return Floor(self.stalls * times, self.instructions * times)


@dataclass
class Code:
    """All functions of a cubin."""

    instructions: list[Instruction] = field(default_factory=list)
    visited: set[int] = field(default_factory=set)  # the instructions of all paths that `path` has found

    def find(self, opcode: str) -> list[int]:
        return [i for i, instruction in enumerate(self.instructions) if instruction.opcode.startswith(opcode)]

    def after(self, i: int) -> list[int]:
        """Return the instructions that may follow instruction `i`. The instruction to which a RET returns is not
        included.

        A BSYNC continues at the target that its BSSY names, so this target counts as a successor of the BSSY. A call
        has two successors: its target, and the instruction after the call, to which the callee returns.
        """
        instruction = self.instructions[i]
        ends = instruction.name in _LEAVES and not instruction.guarded
        return [*instruction.targets, *([] if ends else [i + 1])]

    def comes_back(self, call: int) -> bool:
        """Whether the function called at `call` can return there: some instruction loads the address after the call."""
        address = f"0x{self.instructions[call + 1].at:x}"
        return any(i.operands.endswith(address) for i in self.instructions if "MOV" in i.opcode)

    def meetings(self, root: int) -> set[int]:
        """Return the instructions at which the lanes of a warp reconverge (after a BSYNC) and continue together.

        A barrier counts only if a BSSY sets it before `root` and its BSYNC can be reached from `root`.
        """

        def by_barrier(name: str) -> dict[str, set[int]]:
            found: dict[str, set[int]] = {}
            for i in self.find(name):
                found.setdefault(self.instructions[i].operands.split(",")[0], set()).add(i)
            return found

        earlier, sets = self.reachable([0], [root]), by_barrier("BSSY")
        left = (b for b, at in by_barrier("BSYNC").items() if at & self.reachable([root], sets.get(b, set())))
        return {target for b in left for i in sets[b] & earlier for target in self.instructions[i].targets}

    def reachable(self, roots: Iterable[int], without: Iterable[int] = ()) -> set[int]:
        """Return the instructions that are reachable from `roots` on paths without an instruction of `without`."""
        seen, todo, closed = set[int](), list(roots), set(without)
        while todo:
            i = todo.pop()
            if i not in seen and i not in closed:
                seen.add(i)
                todo += self.after(i)
        return seen

    def _next(self, i: int) -> list[int]:
        """Return the instructions that may follow instruction `i` in a warp whose lanes never diverge.

        A call is followed by the instruction to which the callee returns, as if the callee had no instructions.
        """
        instruction = self.instructions[i]
        straight = instruction.name in ("BSSY", "CALL", "WARPSYNC") or instruction.opcode.startswith("BRA.DIV")
        return [i + 1] if straight else self.after(i)

    def path(self, starts: Iterable[int], *visits: Iterable[int], ends: Iterable[int] = ()) -> list[int]:
        """Return the instructions of the path with the fewest stalls from one of `starts` to one of `ends`; an empty
        list if there is no such path.

        The path passes through one instruction of each of `visits`, in this order. Without `ends`, the path leads back
        to one of `starts`.
        """
        first, wanted = set(starts), [set(visit) for visit in visits]
        goals = set(ends) or first
        none = (-1, -1)
        todo = [(Floor(0, 0), 0, start, none) for start in sorted(first)]
        before: dict[tuple[int, int], tuple[int, int]] = {}  # of a place on the way: the place before it
        while todo:
            cost, stage, i, place = heapq.heappop(todo)
            if stage == len(wanted) and i in goals and cost.instructions:
                found = [i]
                while place != none:
                    found.append(place[1])
                    place = before[place]
                self.visited.update(found)
                return found[::-1]
            if (stage, i) in before or (i in first and cost.instructions):
                continue
            before[stage, i] = place
            here = (stage, i)
            stage += stage < len(wanted) and i in wanted[stage]
            cost += Floor(max(1, self.instructions[i].stall), 1)
            for j in self._next(i):
                if j < len(self.instructions):
                    heapq.heappush(todo, (cost, stage, j, here))
        return []

    def floor(self, starts: Iterable[int], *visits: Iterable[int], ends: Iterable[int] = ()) -> Floor | None:
        """Return the cost of the path of `path`, or None if there is no such path."""
        found = [self.instructions[i] for i in self.path(starts, *visits, ends=ends)[:-1]]
        return Floor(sum(max(1, one.stall) for one in found), len(found)) if found else None

    def lines(self, path: Iterable[int]) -> int:
        """Return how many lines of the instruction cache hold the instructions of a path."""
        return len({self.instructions[i].at // CODE_LINE for i in path})

    def waited(self, path: Iterable[int], far: float, near: float) -> float:
        """Return the cycles of a path with its waits for results: `far` for each load from global memory, also by a
        generic address, and for each fence of the GPU; `near` for all other results that instructions wait for."""
        now, ready = 0.0, [0.0] * (_NO_BARRIER + 1)
        for one in (self.instructions[i] for i in path):
            now = max([now, *(at for barrier, at in enumerate(ready) if one.awaits >> barrier & 1)])
            if one.releases is not None:
                distant = one.name in ("LD", "LDG", "ATOMG") or one.opcode.startswith("MEMBAR.ALL.GPU")
                ready[one.releases] = max(ready[one.releases], now + (far if distant else near))
            now += max(1, one.stall)
        return now


def disassembler() -> str | None:
    """Return the path of nvdisasm, found in PATH, in /usr/local/cuda or in its wheel; or None if there is none."""
    tool = shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")
    wheels = (str(path) for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/nvdisasm"))
    return tool or next(wheels, None)


def disassemble(tool: str, cubin: Path) -> Code:
    options = ["--print-code", "--print-line-info-inline", "--print-instruction-encoding"]
    return parse(subprocess.run([tool, *options, str(cubin)], capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> Code:
    """Parse the output of `nvdisasm --print-code --print-line-info-inline`, with or without the instructions' encoding,
    which contains the stalls. Raises ValueError for an unknown kind of jump.
    """
    labels: dict[str, int] = {}
    lines: list[tuple[re.Match[str], frozenset[tuple[str, int]]]] = []
    controls: list[int] = []  # of each instruction, the upper 64 bits
    sources, complete = set[tuple[str, int]](), True
    for line in text.splitlines():
        if line.lstrip().startswith("//##"):
            if complete:
                sources, complete = set(), False
            sources.update((file, int(number)) for file, number in _SOURCE.findall(line))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append((instruction, frozenset(sources)))
            controls.append(_NO_BARRIER << _RELEASES_BIT)
            complete = True
        elif controls and (encoding := _ENCODING.search(line)):
            controls[-1] = int(encoding[1], 16)
    code = Code()
    for (match, places), control in zip(lines, controls, strict=True):
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
        released = control >> _RELEASES_BIT & 7
        code.instructions.append(
            Instruction(
                at,
                opcode,
                operands,
                bool(guard) and guard != "PT",
                targets,
                places,
                stall=control >> _STALL_BIT & 0xF,
                awaits=control >> _AWAITS_BIT & 0x3F,
                releases=None if released == _NO_BARRIER else released,
            )
        )
    return code
