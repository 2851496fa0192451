"""Checks that each fact is declared once: names of phases, owners of rows, and whatever Python and C++ share."""

import ast
import ctypes
import re
import runpy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from built_once import library as built_library
from sizes import least_dims

from megakernel import library
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.library import structure
from megakernel.model import KNOWN_SHAPES
from megakernel.model.families import FAMILIES, forward
from megakernel.scheduler import passes

ROOT = Path(__file__).parents[1]
FOLDERS = ("megakernel", "scheduler", "serving", "csrc")
HEADERS = runpy.run_path(str(ROOT / "headers.py"))
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".js", ".html"}


def sources(*, besides: str | tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and not str(path.relative_to(ROOT)).startswith(besides):
                yield path.relative_to(ROOT), path.read_text()


def phase_names() -> set[str]:
    """Return the phase names that consist of several words. Names of one word also have other meanings."""
    config = KNOWN_SHAPES["llama-3.2-1b"]
    dims = least_dims(config, Dtype.BF16)
    programs = [
        passes.apply(forward(replace(config, family=family)), dims.changed(tp=tp).split, norm)
        for family, norm, tp in product(FAMILIES, ("own", "next", "inside"), (1, 2))
    ]
    names = {phase.name for program in programs for phase in program}
    return {name for name in names if "_" in name}


def test_only_model_files_and_passes_name_phases() -> None:
    names = phase_names()
    assert {"qkv_rope", "o_partial", "next_norm"} <= names
    pattern = re.compile(rf"\b({'|'.join(sorted(names))})\b(?!\.weight)")
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources(besides=("megakernel/model/families", "scheduler/passes.py"))
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the owner of a row block", r"(%|::)\s*(d\.|dims\.|self\.|d_\.)?tp\b"),
        ("a row's place in REDUCE", r"/\s*(d\.|dims\.)?row_block\s*//?\s*(d\.|dims\.)?tp"),
    ],
)
def test_facts_of_sharing_are_worked_out_in_dims_alone(what: str, pattern: str) -> None:
    allowed = {"csrc/common/isa.h", "megakernel/isa/dims.py"}
    found = [str(path) for path, text in sources(besides="-") if str(path) not in allowed and re.search(pattern, text)]
    assert found == [], what


HARNESS = """
#include "{isa}"
extern "C" void derived(const mk::Dims* d, int32_t* out) {{
  const mk::Sizes s = mk::sizes_of(*d);
  int i = 0;
  {values}
}}
"""


def test_derived_sizes_are_the_same_in_both_languages(tmp_path: Path) -> None:
    names = HEADERS["_DERIVED"]
    values = "\n  ".join(f"out[i++] = d->{name}(), out[i++] = s.{name}();" for name in names)
    values += "\n  for (int r = 0; r < d->tokens; ++r) out[i++] = s.owner(r), out[i++] = d->reduce_row(d->rank, r);"
    source = tmp_path / "derived.cpp"
    source.write_text(HARNESS.format(isa=ROOT / "csrc" / "common" / "isa.h", values=values))
    built = built_library(source)
    rng = np.random.default_rng(3)
    base = least_dims(KNOWN_SHAPES["smollm2-135m"], Dtype.BF16)
    for _ in range(50):
        tp, kv_heads = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 9))
        most = {"ffn": 3000, "vocab": 3000, "tokens": 50, "row_block": 9, "logit_rows": 20, "max_context": 500}
        sizes = {name: int(rng.integers(1, end)) for name, end in most.items()}
        sizes |= {"heads": kv_heads * int(rng.integers(1, 5)), "kv_heads": kv_heads, "kv_page": 16}
        sizes |= {"tp": tp, "rank": int(rng.integers(0, tp))}
        sizes |= {name: int(rng.integers(0, 2)) for name in ("replicated_o", "replicated_residual")}
        dims = base.changed(**sizes)
        out = np.zeros(2 * (len(names) + dims.bucket.tokens), np.int32)
        built.derived(ctypes.byref(dims.native), ctypes.c_void_p(out.ctypes.data))
        records = (dims, dims.split, dims.bucket, dims.model)
        derived = [next(getattr(r, name) for r in records if hasattr(r, name)) for name in names]
        want = [value for value in derived for _ in range(2)]
        rows = range(dims.bucket.tokens)
        want += [value for row in rows for value in (dims.owner(row), dims.reduce_row(dims.split.rank, row))]
        assert out.tolist() == want


def test_offsets_of_a_launchs_arguments_are_those_of_the_compiler(tmp_path: Path) -> None:
    structs = {name: structure("cuda/launch.h", name) for name in ("Diagnosis", "Params")}
    fields = [(name, field) for name, struct in structs.items() for field, _ in struct._fields_]
    values = ", ".join(f"offsetof(mk::{s}, {f}), sizeof(mk::{s}::{f})" for s, f in fields)
    values += "".join(f", sizeof(mk::{name})" for name in structs)
    header = ROOT / "csrc" / "cuda" / "launch.h"
    source = tmp_path / "offsets.cpp"
    source.write_text(f'#include <stddef.h>\n#include "{header}"\nextern "C" const size_t offsets[] = {{{values}}};\n')
    found = (ctypes.c_size_t * (2 * len(fields) + len(structs))).in_dll(built_library(source), "offsets")
    descriptors = [getattr(structs[s], f) for s, f in fields]
    expected = [value for d in descriptors for value in (d.offset, d.size)]
    assert list(found) == [*expected, *map(ctypes.sizeof, structs.values())]
    assert ctypes.sizeof(structs["Params"]) <= 32764  # the maximum size of kernel parameters since CUDA 12.1


def test_structs_that_python_cannot_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.h").write_text("struct B {\n  std::string s;\n};\n")
    monkeypatch.setattr(library, "source_folder", lambda: tmp_path)
    for name, complaint in (("A", "has no struct A"), ("B", "has a member that Python cannot read: std::string s")):
        with pytest.raises(MegakernelError, match=complaint):
            structure(f"{tmp_path}/b.h", name)


def test_an_expression_that_has_no_translation_is_refused() -> None:
    with pytest.raises(AssertionError, match="cannot translate"):
        HEADERS["_c"](ast.parse("[x for x in y]", mode="eval").body)


def test_tables_of_the_docs_are_current(tmp_path: Path) -> None:
    """A page with another row differs, and writing it gives the page again."""
    fill = runpy.run_path(str(ROOT / "docs" / "tables.py"))["fill"]
    assert fill(ROOT / "docs", check=True) == 0
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "settings.md"
    page.write_text(page.read_text().replace("| `HF_TOKEN`", "| `HF_TOKENS`"))
    assert fill(page.parent, check=True) == 1 and fill(page.parent, check=False) == 0
    assert page.read_text() == (ROOT / "docs" / "settings.md").read_text()
