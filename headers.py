"""Generates C++ headers from the tables that the package declares: `python headers.py`.

csrc/common/isa.h       operations, phases, operand structs, dims, step view, buffers, trace record
csrc/cuda/params.h      sizes of the CUDA interpreter and of its pages of shared memory

setup.py writes them before it builds. Then NumPy may be absent, so what this module computes must not need it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from megakernel import targets, trace
from megakernel.isa import (
    BUFFERS,
    DIM_FIELDS,
    FIXED_SIZES,
    OPERATIONS,
    PHASE_FIELDS,
    STEP_FIELDS,
    Buffer,
    Dims,
    Dtype,
    Operation,
    Result,
    Rows,
    Units,
    dims,
    phases,
    record,
)
from megakernel.isa.dtypes import BLOCKS
from megakernel.isa.operations import experts
from megakernel.isa.phases import NO_BUFFER
from megakernel.targets import launch, pages

_C_TYPES = {"u8": "uint64_t", "u4": "uint32_t", "u2": "uint16_t", "u1": "uint8_t"}


# The constants to generate in C++, grouped by the Python module that defines them. An entry `cpp=python` gives a
# constant another name in C++ than in Python.
_WORDS = "words operand_word wait_word waits signal_word signals counter_mask rank_shift rank_mask all_ranks owner"
_COMMON = (
    (record, _WORDS),
    (dims, "shard_unit kv_unit kv_scale kv_block most_experts all_tokens"),
    (experts, "gate_slope gate_limit"),
    *((phases, "max_phases"), (record, "next indexed")),
    (targets, "most_head_dim"),
    (trace, "trace_prologue=prologue trace_epilogue=epilogue"),
)
_CUDA = (
    (launch, "threads pages page_bytes slots claim_slots"),
    (pages, "tile_rows=page_rows tile_inner=k_step box_rows chunk piece=dot_piece pieces piece_inner dot_input_pages"),
    (pages, "stages step_pages window_pages ahead_pages ahead_ns norm_bytes row_pages copy_bytes maps"),
    (pages, "consumer_warps=units query_tile head_part"),
    (launch, "shared_bytes map_bytes clock_stamps prologue body epilogue queues"),
)


def _constants(groups: tuple[tuple[ModuleType, str], ...]) -> list[str]:
    lines = []
    for module, names in groups:
        for name in names.split():
            cpp, _, python = name.partition("=")
            value = getattr(module, (python or cpp).upper())
            kind, end = ("float", "f") if isinstance(value, float) else ("int32_t", "")
            lines.append(f"constexpr {kind} k{_camel(cpp)} = {value}{end};")
    return lines


# Methods of these dataclasses are translated to C++, so that Python and C++ compute the same sizes. C++ computes the
# sizes in _DERIVED once per program, except those in _QUICK. It computes these and the _FUNCTIONS at each use.
_RECORDS = (dims.ModelSizes, dims.Split, dims.Bucket, Dims)
_DERIVED = (
    *("row_blocks", "pages_per_seq", "own_rows", "own_logit_rows", "mask_words", "kv_row", "group_size", "rank_heads"),
    *("first_head", "first_kv_head", "rank_kv_heads", "first_ffn", "rank_ffn", "first_vocab", "rank_vocab"),
    *("head_ranks", "first_expert", "rank_experts", "by_expert", "places", "routed_experts", "router_rows"),
    *("q_cols", "kv_cols", "qkv_cols", "o_cols", "o_first"),
)
# Derived sizes that C++ does not store, because a GPU's thread block has no shared memory left for them. They are cheap
# to compute (at most a division by a power of two), or needed only for experts.
_QUICK = {"by_expert", "places", "head_ranks", "mask_words", "first_expert", "rank_experts"}
_QUICK |= {"routed_experts", "router_rows"}
_FUNCTIONS = ("span", "query_head", "query_head_end", "owner", "reduce_place", "reduce_row")
_HELPERS = ("ceil_div", "start", "shard")


_SIGNS: dict[type[ast.operator | ast.cmpop], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"},
    **{ast.Lt: "<", ast.Gt: ">", ast.Eq: "=="},
}


def _c(node: ast.expr) -> str:
    """Translate a Python expression over non-negative integers to C++. Each case has an example in Python."""
    match node:
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):  # a + b, a < b
            return f"({_c(left)} {_SIGNS[type(op)]} {_c(right)})"
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), a), ast.FloorDiv(), b)):
            # -(-a // b) is a / b rounded up: Python's // rounds towards minus infinity. C++'s / rounds towards zero.
            return f"(({_c(a)} + {_c(b)} - 1) / {_c(b)})"
        case ast.IfExp(test, yes, no):  # example: yes if test else no
            return f"({_c(test)} ? {_c(yes)} : {_c(no)})"
        case ast.Call(ast.Name(name), arguments):  # min(a, b), ceil_div(a, b)
            names = {"min": "lower_of", "max": "higher_of"}
            return f"{names.get(name, name)}({', '.join(map(_c, arguments))})"
        case ast.Attribute(ast.Name("self") | ast.Attribute(ast.Name("self"), _), name):
            # examples: self.split.tp, a field; self.bucket.row_blocks, a property
            return name if name in dict(DIM_FIELDS) else f"{name}()"
        case ast.Call(ast.Attribute(ast.Name("self"), name), arguments):  # self.owner(row)
            return f"{name}({', '.join(map(_c, arguments))})"
        case ast.Name(name):  # examples: SHARD_UNIT, a constant; row, a parameter
            return f"k{_camel(name.lower())}" if name.isupper() else name
        case ast.Constant(int(value)):  # 2
            return str(value)
    raise AssertionError(f"cannot translate {ast.unparse(node)} to C++")


def _function(source: Callable[..., Any]) -> tuple[str, str]:
    """Translate a Python function to C++, and return the C++ parameters and body. The function may contain only
    `return` statements, each with or without an `if`."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    parameters = ", ".join(f"int32_t {a.arg}" for a in definition.args.args if a.arg != "self")
    lines = []
    for statement in definition.body:
        match statement:
            case ast.Expr(ast.Constant(str())):
                continue
            case ast.If(test, [ast.Return(ast.expr() as value)], []):
                lines.append(f"if ({_c(test)}) return {_c(value)};")
            case ast.Return(ast.expr() as value):
                lines.append(f"return {_c(value)};")
            case _:
                raise AssertionError(f"cannot translate {ast.unparse(statement)} to C++")
    return parameters, " ".join(lines)


def _method(name: str) -> str:
    member: Any = next(getattr(record, name) for record in _RECORDS if hasattr(record, name))
    parameters, body = _function(getattr(member, "fget", member))
    return f"  MK_DIMS_FN int32_t {name}({parameters}) const {{ {body} }}"


def _sizes() -> list[str]:
    """Return the lines of the C++ struct `Sizes`. It inherits from Dims, and stores each derived size that is slow to
    compute. In a build of the CUDA interpreter for steps of one token row, the sizes in `FIXED_SIZES` are compile-time
    constants, so nothing is stored for derived sizes."""
    kept = [name for name in _DERIVED if name not in _QUICK]
    varying = [name for name, _ in DIM_FIELDS if name not in FIXED_SIZES]
    return [
        "#ifdef MK_ONE_ROW",
        "constexpr bool kOneRow = true;",
        "// The sizes as constants, which megakernel/runtime/cuda/compile.py defines, and those that are none.",
        "struct Sizes {",
        *(f"  static constexpr {_kind(name)} {name} = MK_SIZE_{name.upper()};" for name in FIXED_SIZES),
        *(f"  {_kind(name)} {name};" for name in varying),
        *map(_method, (*_DERIVED, *_FUNCTIONS)),
        "};",
        "MK_DIMS_FN inline Sizes sizes_of(const Dims& d) {",
        f"  return {{{', '.join(f'd.{name}' for name in varying)}}};",
        "}",
        "#else",
        "constexpr bool kOneRow = false;",
        "// Dims and the sizes derived from it that need divisions, which are computed only once.",
        "struct Sizes : Dims {",
        *(f"  int32_t {name}_;" for name in kept),
        *(f"  MK_DIMS_FN int32_t {name}() const {{ return {name}_; }}" for name in kept),
        *map(_method, _FUNCTIONS),
        "};",
        "",
        "MK_DIMS_FN inline Sizes sizes_of(const Dims& d) {",
        "  Sizes s;",
        "  static_cast<Dims&>(s) = d;",
        *(f"  s.{name}_ = d.{name}();" for name in kept),
        "  return s;",
        "}",
        "#endif",
    ]


def _helpers() -> list[str]:
    out = [
        "MK_DIMS_FN constexpr int32_t lower_of(int32_t a, int32_t b) { return a < b ? a : b; }",
        "MK_DIMS_FN constexpr int32_t higher_of(int32_t a, int32_t b) { return a < b ? b : a; }",
    ]
    for name in _HELPERS:
        parameters, body = _function(getattr(dims, name))
        out.append(f"MK_DIMS_FN constexpr int32_t {name}({parameters}) {{ {body} }}")
    return out


def _kind(size: str) -> str:
    return "float" if dict(DIM_FIELDS)[size] is float else "int32_t"


def _enum(name: str, values: Iterable[IntEnum]) -> str:
    members = ", ".join(f"k{_camel(v.name)} = {v.value}" for v in values)
    return f"enum class {name} : int32_t {{ {members} }};"


def _block(dtype: Dtype) -> str:
    if (block := BLOCKS.get(dtype)) is None:
        return "{}"
    low, high = (f"{{{', '.join(map(str, fields))}}}" for fields in (block.low, block.high))
    return f"{{{block.bytes}, {low}, {high}}}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.lower().split("_"))


def header() -> str:
    """Return the text of csrc/common/isa.h."""
    layouts = {operation.layout.name: operation.layout.operands for operation in Operation}
    out = [
        "// Generated by `python headers.py` from megakernel/isa and megakernel/trace. Do not edit.",
        "#pragma once",
        '#include "integers.h"',
        "",
        "#ifdef __CUDACC__",
        "#define MK_DIMS_FN __host__ __device__",
        "#else",
        "#define MK_DIMS_FN",
        "#endif",
        "",
        "namespace mk {",
        "",
        *_constants(_COMMON),
        "",
        "enum class Dtype : int32_t { " + ", ".join(f"{d.name} = {d.value}" for d in Dtype) + " };",
        "",
        "// The layouts of quantised blocks, by type. megakernel/isa/dtypes.py explains them.",
        "struct Fields { int32_t offset, width, run; };",
        "struct BlockLayout { int32_t bytes; Fields low, high; };",
        f"constexpr BlockLayout kBlockLayouts[] = {{{', '.join(map(_block, Dtype))}}};",
        "",
        "enum class Buffer : int32_t {",
        f"  kNone = {NO_BUFFER},",
        *(f"  {b.name} = {b.value},  // {BUFFERS[b].what}" for b in Buffer),
        "};",
        f"constexpr int32_t kBuffers = {len(Buffer)};",
        "// Bit b is set if buffer b has a copy for each layer.",
        f"constexpr uint64_t kLayered = {sum(BUFFERS[b].layered << b for b in Buffer):#x};",
        "",
        _enum("Operation", Operation),
        f"constexpr int32_t kOperations = {max(Operation) + 1};",
        "// The operations whose operands pass through shared-memory pages of the CUDA interpreter.",
        _enum("PagedOperation", (operation for operation, spec in OPERATIONS.items() if spec.paged)),
        _enum("Rows", Rows),
        _enum("Result", Result),
        _enum("Units", Units),
        "",
        "// A phase of the program, with its sizes on one rank. An array of phases has kMaxPhases + 1 entries.",
        "struct Phase {",
        *(f"  {f.kind} {f.name};{'  // ' + f.what if f.what else ''}" for f in PHASE_FIELDS),
        "};",
        f"static_assert(sizeof(Phase) == {4 * len(PHASE_FIELDS)});",
        "",
        "// The operands of each operation, which a record stores in its words 1 to 15.",
    ]
    for name, operands in layouts.items():
        body = " ".join(f"int32_t {operand};" for operand in operands)
        out.append(f"struct {name} {{ {body + ' ' if body else ''}}};")
    out += ["", *_helpers(), "", "struct Dims {"]
    out += [f"  {_kind(name)} {name};" for name, _ in DIM_FIELDS]
    out += [*map(_method, (*_DERIVED, *_FUNCTIONS)), "};", "", *_sizes(), ""]
    out += [
        "// Pointers to the fields of the step table, an array of all inputs that differ from step to step.",
        "struct StepView {",
        *(f"  const {'float' if f.is_float else 'int32_t'}* {f.name};  // {f.what}" for f in STEP_FIELDS),
        "};",
        "",
        "template <class D>",
        "MK_DIMS_FN inline StepView step_view(const int32_t* words, const D& d) {",
        "  StepView v;",
    ]
    methods = {"pages_per_seq", "mask_words"}
    for f in STEP_FIELDS:
        cast = "reinterpret_cast<const float*>(words)" if f.is_float else "words"
        length = " * ".join(f"d.{n}{'()' if n in methods else ''}" for n in f.of) or "1"
        length += f" + {f.plus}" if f.plus else ""
        if f.per_rank:
            cast, length = f"words + d.rank * ({length})", f"d.tp * ({length})"
        out += [f"  v.{f.name} = {cast};", f"  words += {length};"]
    out += [
        "  return v;",
        "}",
        "",
        "enum class Role : uint8_t { " + ", ".join(f"{r.name} = {r.value}" for r in trace.Role) + " };",
        "enum class IntervalKind : uint8_t { " + ", ".join(f"{k.name} = {k.value}" for k in trace.IntervalKind) + " };",
        "",
        "struct Interval {",
        *(f"  {_C_TYPES[kind]} {name};{'  // ' + what if what else ''}" for name, kind, what in trace.FIELDS),
        "};",
        'static_assert(sizeof(Interval) == 32, "a trace record must have 32 bytes");',
        "",
        "}  // namespace mk",
        "",
    ]
    return "\n".join(out)


def launch_header() -> str:
    """Return the text of csrc/cuda/params.h."""
    warps = [f"k{role.split()[0].title()}Warp" for role in launch.SERVICE_WARPS]
    out = [
        "// Generated by `python headers.py` from megakernel/targets/{launch,pages}.py. Do not edit.",
        "#pragma once",
        '#include "../common/isa.h"',
        "",
        "namespace mk {",
        "",
        *_constants(_CUDA),
        "",
        "// The number of each warp with a special role; warps from kConsumerWarp on are consumers.",
        f"enum : int32_t {{ {', '.join(warps)}, kConsumerWarp }};",
        "",
        "// The work that a benchmark build of the kernel omits: nothing, the loads of pages, or the computation.",
        f"enum class Ablation : int32_t {{ {', '.join(f'k{a.name.title()}' for a in launch.Ablation)} }};",
        "",
        "// The kind of counter or barrier that a warp waits for. block.h explains the barriers.",
        f"enum class Awaited : int32_t {{ {', '.join(f'k{name.title()}' for name in launch.AWAITED)} }};",
        "",
        "}  // namespace mk",
        "",
    ]
    return "\n".join(out)


def write_headers(root: Path) -> list[str]:
    """Write the C++ headers into the checkout `root`, and return the paths of those that have changed."""
    headers = {"csrc/common/isa.h": header(), "csrc/cuda/params.h": launch_header()}
    stale = [path for path in headers if not (root / path).exists() or (root / path).read_text() != headers[path]]
    for path in stale:
        (root / path).write_text(headers[path])
    return stale


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write the C++ headers that the package's tables declare.").parse_args()
    for path in write_headers(Path(__file__).parent):
        print(f"{path}: written")
