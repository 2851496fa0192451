"""Reads from the CUDA interpreter's machine code how fast its hot loops can run, and what rates this allows for some
programs. Different warps of an SM have different roles: they load data, compute, or store results.

    python benchmarks/calibration/machine_code.py

For each hot path, the script adds up a warp's instructions and their stall counts, in cycles, along the shortest way.
The sum is a lower bound: waits for memory and barriers come on top. The roles of an SM work at the same time, so the
slowest role limits its rate. The simulator reads these figures from the table [paths] of the machine files, and tests
compare that table with the figures of this script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from sass import CODE_LINE, Code, Floor, disassemble, disassembler
from steps import compiled

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Units, cost
from megakernel.isa.operations.matmul import weight_bytes
from megakernel.machine import ONE_ROW, Machine
from megakernel.machine import Path as Seconds
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.runtime.cuda import compile as cuda
from megakernel.scheduler import Options
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.targets.issue import matmul_issue, own_paths
from megakernel.targets.launch import SERVICE_WARPS, THREADS, WARPS
from megakernel.targets.pages import DOT_PIECE, PIECES

GENERIC = cuda.Build(False, Units.DOTS)
CONSUMING = ("dot_pair", "dot_pairs", "dot_row", "dot_unit", "k_step", "sample_step")
SCHEDULERS = 4  # schedulers per SM; each issues one instruction per cycle
CONSUMERS = WARPS - len(SERVICE_WARPS)
LANES = THREADS // WARPS
VECTORS = DOT_PIECE // 8 // LANES  # vectors of 8 elements of an input row that a lane multiplies per page
PRODUCTS = 16  # multiply-adds for one such vector (in VECTORS) and two weight columns
AHEAD = 2  # number of groups of logits that a thread loads in advance
_WAIT = "SYNCS.PHASECHK"
NEAR = 29  # cycles until shared memory delivers (Luo et al., arXiv 2402.13499); shuffles and roots take about as long
FAR = 383  # cycles of an access to the L2 cache: `paths.l2_trip` of the machine file


class Once(NamedTuple):
    """A path that an instruction takes once: its cycles with the waits for shared memory and arithmetic, the lines of
    the instruction cache that hold it, the accesses to L2 that depend on one another, and its machine instructions."""

    cycles: float
    lines: int
    trips: float
    instructions: int = 0

    def __add__(self, other: tuple[float, ...]) -> Once:  # type: ignore[override]
        return Once(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Once) -> Once:
        return Once(*(a - b for a, b in zip(self, other, strict=True)))


class Paths:
    """The hot paths of a compiled kernel, found by their source lines. Methods raise MegakernelError if one is not
    found."""

    def __init__(self, code: Code, build: cuda.Build) -> None:
        self._code, self._units, self._one_row = code, build.units, bool(build.constants)
        self._text = {
            p.name: p.read_text().splitlines() for p in (cuda.source_folder() / "cuda").rglob("*") if p.is_file()
        }

    def _at(self, file: str, text: str, opcode: str = "") -> set[int]:
        """Return the indices of the instructions compiled from source lines that contain `text`, or inlined there."""
        places = {(file, n) for n, line in enumerate(self._text[file], 1) if text in line}
        if not places:
            raise MegakernelError(f"{file} has no line with {text!r}, by which a hot path is found: update this script")
        return {i for i in self._code.find(opcode) if places & self._code.instructions[i].lines}

    def _floor(self, what: str, starts: Iterable[int], *visits: Iterable[int], ends: Iterable[int] = ()) -> Floor:
        found = self._code.floor(starts, *visits, ends=ends)
        if found is None:
            raise MegakernelError(f"the machine code has no path for {what}")
        return found

    def all(self) -> dict[str, Floor]:
        if self._units == Units.TENSOR:
            return {"sample_step": self.sample(), "tile_step": self.tiles(), "k_step": self.step()}
        found = {"sample_step": self.sample(), "pass_page": self.passing(), "weight_page": self.columns()}
        found |= {"dot_pair": self.pair(1), "dot_unit": self.unit()}
        if self._one_row:
            return found
        return found | {
            "input_page": self._input_page(),
            "dot_pairs": self.pair(2),
            "dot_row": self.pair(3) - self.pair(2),
        }

    # The next paths are of loader warps, which fill pages of shared memory, from the wait for one page to the next
    # wait.

    def passing(self) -> Floor:
        """Return the cycles in which one of two loader warps skips a page that the other one fills."""
        waits, here = self._walk()
        return self._floor("passing a page", waits, here & self._at("loaders.h", "p.arrive(block.empty[at.slot])"))

    def tiles(self) -> Floor:
        """Return the cycles in which the weight loader fills its part of a stage for a matmul on tensor cores."""
        pages = (f"load_tiles(p, params, block, {name}" for name in ("first", "second"))
        loads = [self._at("loaders.h", page, "UTMALDG") for page in pages]
        return self._floor("filling a stage", self._at("loaders.h", "p.wait(stage.empty", _WAIT), *loads)

    def _input_page(self) -> Floor:
        return self._filled("p.load_bytes(", "piece += kPieces", PIECES)

    def columns(self) -> Floor:
        """Return the cycles in which a loader warp fills a page with weights for dot products."""
        return self._filled("p.load_columns(", "if (member) x += kPiece")

    def _walk(self) -> tuple[set[int], set[int]]:
        """Return the waits for a free page, and all instructions, of the loop in which a loader warp fills pages."""
        here = self._at("plan.h", "|| dot_pages(d, task, each)")
        return here & self._at("loaders.h", "p.wait(block.empty[at.slot]", _WAIT), here

    def _filled(self, copy: str, text: str, copies: int = 1) -> Floor:
        """Return the cycles in which a loader warp fills a shared-memory page with `copies` asynchronous copies.

        `copy` is a part of the source line that starts a copy, and `text` of the one that advances to the next page."""
        waits, here = self._walk()
        copying = self._at("loaders.h", copy) & {*self._code.find("UBLKCP"), *self._code.find("UTMALDG")}
        page = self._floor("filling a page", waits, here & copying, here & self._at("plan.h", text))
        # The lanes of the warp start one copy each, in turn, so each further copy costs one pass of this loop.
        return page + (self._floor("a copy", here & copying) * (copies - 1) if copies > 1 else Floor(0, 0))

    # The next paths are of consumer warps, which compute on the pages that loader warps have filled.

    def pair(self, rows: int) -> Floor:
        """Return the cycles in which a consumer warp multiplies DOT_PIECE elements of `rows` rows by two pages of
        weights."""
        if rows == 1:
            last, products = self._whole_piece()
            return self._floor("a pair of pages", self._pairs(), *products, last)
        products = self._at("dots.h", "multiply(sum_[r],", "FFMA")
        vector = self._at("dots.h", "first = part(w0, v", "LDS.128"), *[products] * (PRODUCTS * rows)
        inner = self._floor("a vector of a piece", *vector)
        return self._floor("a pair of pages", self._pairs(), *vector) + inner * (VECTORS - 1)

    def unit(self) -> Floor:
        """Return the cycles from a unit's last product to the next unit's first page: the lanes of a warp add up their
        sums and store 8 gated results. (Those for Q, K and V take longer, but have few units.)"""
        page = self._at("dots.h", "first = pages.full(page)", _WAIT)
        last, _ = self._whole_piece()
        return self._waiting("a unit of columns", last, self._shuffles(), self._stores("gated"), ends=page)

    def _waiting(self, what: str, starts: set[int], *visits: set[int], ends: Iterable[int] = ()) -> Floor:
        """Return the cost of a path with its waits for shared memory and arithmetic."""
        path = self._code.path(starts, *visits, ends=ends)
        if not path:
            raise MegakernelError(f"the machine code has no path for {what}")
        return Floor(round(self._code.waited(path, 0, NEAR)), len(path) - 1)

    def _pairs(self) -> set[int]:
        return self._at("dots.h", "second = pages.full(page + 1)", _WAIT)

    def _whole_piece(self) -> tuple[set[int], list[set[int]]]:
        """Return a set with only the last multiply-add for a whole piece of an input row (DOT_PIECE elements), and for
        each of the others the set of multiply-adds that may take its place on the path."""
        products = self._at("dots.h", "multiply(sum_[0],", "FFMA")
        return {max(products)}, [products] * (PRODUCTS * VECTORS - 1)

    def step(self) -> Floor:
        """Return the cycles in which tensor cores advance by one tile of the inner dimension K, for 256 columns."""
        wide = self._at("gemm.h", "multiply<2>(pages, steps, acc)", "HGMMA")
        last = {i for i in wide if "gsb0" in self._code.instructions[i].operands}
        released = self._at("gemm.h", "acc.template settle<1>()", "WARPGROUP.DEPBAR")
        return self._waiting("a k step", last, released, ends=last)

    def sample(self) -> Floor:
        """Return the cycles that a thread takes in sampling to process the logits that it loads in advance."""
        loads = self._logits()
        return self._floor("sampling", {max(loads)}, self._at("sample.h", "expf(held.v[k] - top)", "MUFU.EX2")) * AHEAD

    def sample_entries(self) -> int:
        """Return how many logits of a row all sampling threads together load in advance."""
        words = sum(4 if ".128" in self._code.instructions[i].opcode else 1 for i in self._logits())
        return AHEAD * words * CONSUMERS * LANES

    def _logits(self) -> set[int]:
        """Return the instructions that load a thread's next group of logits, if the whole group lies in the row."""
        whole = self._at("sample.h", "out.v[j] = load_float(z + begin")
        return whole & self._at("sample.h", "after = load(z, begin", "LDG")

    # The next paths are taken once per instruction, so their code and what they read is not in the SM's caches.

    def once(self) -> dict[str, Once]:
        """Return the paths that a consumer warp takes once per instruction, and the hand-off between instructions."""
        begin = self._at("consumer.h", "p.wait(slot.inputs", _WAIT)
        end = self._at("consumer.h", "p.arrive(slot.outputs)", "SYNCS")
        tensor = self._units == Units.TENSOR
        poll = self._at("loaders.h", "wait_words(") & self._at("device.cuh", "load_acquire(need.value", "LDG")
        signals = self._at("storer.h", "signals.send(p)", "REDG")
        warps = [
            self._once(self._at("consumer.h", "p.fence_async()"), ends=end),
            self._once(self._at("storer.h", "p.wait(slot.outputs", _WAIT), ends=signals),
            self._once(poll, ends=self._at("loaders.h", "p.arrive(slot.inputs)", "SYNCS")),
        ]
        # The simulator adds the trips: a fence, a signal and a poll.
        found = {"hand_off": sum(warps, Once(0.0, 0, 0.0))._replace(trips=0.0)}
        attention = self._at("bodies.h", "return attention(p")
        mma, stores = attention & set(self._code.find("HMMA")), {*self._code.find("STG"), *self._code.find("ST.E")}
        queries = self._at("attention_mma.h", "query_[k][w] = load_word(own + first)", "LDG")
        outputs, results = (self._at("attention.h", f"tile.{n}(") for n in ("template values<0>", "store_results"))
        sums, words = self._at("norm.h", "team_.sum(squares)"), self._at("norm.h", "store_words(")
        found["attention_start"] = self._once(begin, queries, ends=mma)
        sent = self._at("pages.h", "signal_item(p_", "REDG")
        whole = self._once(begin, queries, mma, mma & outputs, stores & results, ends=sent)
        # Attention sends its signals, so the hand-off by consumers and storer does not count.
        found["attention_end"] = whole - found["attention_start"] - warps[0] - warps[1]
        found["other"] = self._once(begin, sums, words & stores, ends=end)
        if tensor:
            wide = self._at("gemm.h", "multiply<2>(pages, steps, acc)", "HGMMA")
            last = {i for i in wide if "gsb0" in self._code.instructions[i].operands}
            heads = self._at("gemm.h", "store_heads(acc") & stores
            return found | {
                "tile_start": self._once(begin, ends=wide),
                "tile_end": self._once(last, heads, ends=end),
            }
        page = self._at("dots.h", "first = pages.full(page)", _WAIT)
        last, products = self._whole_piece()
        fetched = self._at("consumer.h", "p.wait_always(slot.fetched", _WAIT)
        rows = self._at("norm.h", "call_.shared->rows", "STS")
        copies, copied = self._at("bodies.h", "copy_row(p, c)"), list[set[int]]()
        prepares = [self._at("norm.h", "prefetch(call.early.norm + k)")]
        if self._one_row:
            copied = [copies & set(self._code.find(name)) for name in ("LDG", "STS", "BAR.SYNC")]
            prepares = [self._at("norm.h", "early.weights.part[h] = read_eight", "LD")]
            prepares += [self._at("attention.h", "own.first = ", "LD"), self._at("bodies.h", "early.page = ", "LD")]
        else:  # whose inputs pass through the ring
            free, here = self._walk()
            copying = here & self._at("loaders.h", "p.load_bytes(", "UBLKCP")
            first = self._once(free, copying, here & self._at("plan.h", "piece += kPieces"), ends=free)
            found["input"] = first._replace(cycles=float(self._input_page().stalls))
        prepared = [self._once(fetched, each, ends=begin) for each in prepares]
        found |= {
            "prepare": max(prepared, key=lambda one: one.cycles + one.trips * FAR),
            "start": self._once(begin, *copied, ends=page),
            "start_normed": self._once(begin, sums, rows, ends=page),
            "dots": self._once(page, *products, ends=last),
        }
        names = _STORES.keys() - ({"partial"} if self._one_row else set())
        ends = {name: self._once(last, self._shuffles(), self._stores(name), ends=end) for name in names}
        return found | {f"end_{name}": one for name, one in ends.items()}

    def layer_code(self) -> Once:
        """Return how many bytes of the instruction cache the paths of a layer take, those of all warps together."""
        self._code.visited.clear()
        dots = self._units == Units.DOTS
        for path in (self.once, *([self.passing, self.columns, self.unit] if dots else [self.tiles, self.step])):
            path()
        return Once(CODE_LINE * self._code.lines(self._code.visited), 0, 0.0)

    def _once(self, starts: set[int], *visits: set[int], ends: set[int]) -> Once:
        path = self._code.path(starts, *visits, ends=ends)
        if not path:
            raise MegakernelError("the machine code has no path that an instruction takes once: update this script")
        near = self._code.waited(path, 0, NEAR)
        trips = (self._code.waited(path, FAR, NEAR) - near) / FAR
        return Once(near, self._code.lines(path), trips, len(path) - 1)

    def _shuffles(self) -> set[int]:
        return self._at("dots.h", "sums.reduce(p, rows)", "SHFL")

    def _stores(self, name: str) -> set[int]:
        return self._at(*_STORES[name])


# By kind of result: the source file and line that stores it, and the opcode.
_STORES = {
    "heads": ("dots.h", "heads.store(p, c, sums, m, unit)", "ST"),
    "residual": ("results.h", ": add_pair(row + col, sums)", "RED"),
    "gated": ("dots.h", "store_dots(p, c, sums, ToGated(c), m, col)", "ST"),
    "logits": ("dots.h", "store_dots(p, c, sums, ToLogits(c), m, col)", "ST"),
    "partial": ("dots.h", "store_dots(p, c, sums, ToPartial(c), m, col)", "ST"),
}


def cycles(name: str, floor: Floor) -> int:
    """Return the cycles that the path `name` takes if all warps of its role execute it. `floor` has its cost in one
    warp.

    Several warps that compute share a scheduler, which issues their instructions in turn. So the number of instructions
    can be the limit instead of the stalls.
    """
    together = CONSUMERS // SCHEDULERS if name in CONSUMING else 1
    return max(floor.stalls, together * floor.instructions)


def cycles_of(codes: dict[cuda.Build, Code]) -> dict[str, float]:
    """Return the cycles of all hot paths, as the machine files should list them.

    They are read from several cubins. If two generic ones differ, the larger number of cycles counts.
    """
    found: dict[str, float] = {}
    for build, code in codes.items():
        for name, floor in Paths(code, build).all().items():
            key = _key(name, build)
            found[key] = max(cycles(name, floor), found.get(key, 0))
    return found


def paths_of(codes: dict[cuda.Build, Code]) -> dict[str, Once]:
    """Return the paths that an instruction takes once, as the machine files should list them. If two generic cubins
    differ, the longer path counts."""
    found: dict[str, Once] = {}
    for build, code in codes.items():
        paths = Paths(code, build)
        for name, one in (paths.once() | {"layer_code": paths.layer_code()}).items():
            key = _key(name, build)
            found[key] = max(one, found.get(key, one))
    return found


def _key(name: str, build: cuda.Build) -> str:
    return ONE_ROW + name if build.constants else name


def compile_codes() -> dict[cuda.Build, Code]:
    """Compile the kernels (cubins) without tracing, for dot products, for tensor cores and for one row of Llama-3.2-1B,
    and return their disassembled code. Raises MegakernelError if a tool is missing."""
    return {build: compile_code(build) for build in (GENERIC, cuda.Build(False, Units.TENSOR), one_row_build())}


def one_row_build() -> cuda.Build:
    case = CASES[0]
    program = compiled(
        load_config(case.model), machines.load(case.machine), case.tokens, context=128, options=Options()
    )
    return cuda.Build.of(program.dims, program.forward)


def compile_code(build: cuda.Build) -> Code:
    """Compile a kernel, and return its disassembled code. Raises MegakernelError if a tool is missing."""
    tool = disassembler()
    if tool is None:
        raise MegakernelError("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "megakernel.cubin"
        file.write_bytes(cuda.compiled(build).code)
        return disassemble(tool, file)


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    machine: str
    tokens: int
    tp: int = 1


CASES = (
    Case("1B", "random:llama-3.2-1b", "h200", 1),
    Case("8B", "random:llama-3.1-8b", "h200", 1),
    Case("70B, tp 8", "random:llama-3.1-70b", "h100", 8192, tp=8),
)


@dataclass(frozen=True)
class Load:
    """The seconds that the matmuls of a step take on an average worker (an SM).

    `weight_loader`, `input_loader` and `consumers` are the times in which the warps with these roles issue
    instructions. `memory` is the time that the SMs together need to read the weights. `matrix` is the time that the
    matrix units need.
    """

    weight_loader: float
    input_loader: float
    consumers: float
    memory: float
    matrix: float

    @property
    def roles(self) -> dict[str, float]:
        return {"weight loader": self.weight_loader, "input loader": self.input_loader, "consumers": self.consumers}


def load(program: Program, machine: Machine, paths: dict[str, Seconds]) -> Load:
    """Return how long a step of `program` occupies each part of `machine`, if `paths` have these times.

    Each weight is read from memory once, at the achievable rate. The matrix units run at the datasheet's rate.
    """
    total, bytes_, flops = np.zeros(3), 0.0, 0.0
    for segment, runs in enumerate((1, program.dims.model.layers, 1)):
        for phase, dims, _, columns in program.by_phase(segment):
            if not phase.is_matmul:
                continue
            roles = matmul_issue(phase, columns["rows"], columns["cols"], dims, own_paths(dims, paths))
            parts = (roles.weight_loader, roles.input_loader, roles.consumers)
            total += runs * np.array([part.sum() for part in parts])
            whole = columns["row"] == columns["row"].min()
            bytes_ += runs * float(weight_bytes(phase, columns["cols"][whole], dims).sum())
            flops += runs * float(cost(phase, columns, dims).matrix_flops.sum())
    workers = program.ranks * program.workers
    memory = bytes_ / program.ranks / costs_of(machine).memory_bytes_per_s
    return Load(*(total / workers).tolist(), memory, flops / program.ranks / machine.matrix_flops)


def report(found_cycles: dict[str, float]) -> None:
    for case in CASES:
        machine = machines.load(case.machine)
        clock = machines.hardware(case.machine).clock_hz
        paths = {name: Seconds(n / clock, n / clock) for name, n in found_cycles.items()}
        options = Options(o="replicated", queue="body") if case.tp > 1 else Options(queue="attention")
        program = compiled(
            load_config(case.model), machine, case.tokens, context=128, seqs=case.tokens, tp=case.tp, options=options
        )
        found = load(program, machine, paths)
        dots = program.dims.worker.units == Units.DOTS
        bound = found.memory if dots else found.matrix
        print(
            f"{case.name}, {case.tokens} rows, {case.machine}: {bound * 1e6:,.0f} us of {'memory' if dots else 'MMA'}"
        )
        for role, seconds in found.roles.items():
            part = bound / seconds
            rate = part * costs_of(machine).memory_bytes_per_s / machine.workers / 1e9
            allowed = f"{rate:.1f} GB/s per SM" if dots else f"MMA in {min(1, part):.0%} of cycles"
            print(f"    {role:14} {seconds * 1e6:10,.0f} us, which allows {allowed}, {part:.2f} of what is needed")


def print_paths(name: str, paths: Paths) -> None:
    print(f"{name}: path, instructions, cycles by stalls, cycles of the role")
    for path, floor in paths.all().items():
        print(f"    {path:14} {floor.instructions:6} {floor.stalls:6} {cycles(path, floor):6}")
    print(f"{name}: path taken once, cycles with waits, lines of code, dependent accesses to L2, instructions")
    for path, one in paths.once().items():
        print(f"    {path:15} {one.cycles:6.0f} {one.lines:6} {one.trips:6.1f} {one.instructions:6}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    codes = compile_codes()
    for build, code in codes.items():
        print_paths(f"{build.units.name.lower()}{', one row' if build.constants else ''}", Paths(code, build))
    report(cycles_of(codes))


if __name__ == "__main__":
    main()
