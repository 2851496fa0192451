"""Tests the compilation of csrc/cuda: when the cache is used, which code is refused, and that all sources are
installed."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from compiled import SMOLLM2, compiled

from megakernel.errors import MegakernelError
from megakernel.isa import Units
from megakernel.machine import MACHINES
from megakernel.runtime.cuda import compile
from megakernel.runtime.cuda.compile import Build

ROOT = Path(__file__).parents[2]
TENSOR, DOTS = Units.TENSOR, Units.DOTS


class Counting:
    """A stand-in for the compiler. Its list `asked` has (traced, matmul units, SMs) of each requested build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.asked: list[tuple[bool, Units, int]] = []
        self.log = ""
        (folder / "csrc" / "cuda").mkdir(parents=True)
        (folder / "csrc" / "common").mkdir()
        self.source = folder / "csrc" / "cuda" / "megakernel.cu"
        self.source.write_text("one")
        self.version = "1"
        monkeypatch.setenv("MEGAKERNEL_CACHE", str(folder / "cache"))
        monkeypatch.setattr(compile, "source_folder", lambda: folder / "csrc")
        monkeypatch.setattr(compile, "compiler", lambda: self.version)
        monkeypatch.setattr(compile, "_with_nvrtc", self._compile)

    def _compile(self, defines: list[str]) -> compile.Cubin:
        trace, units, *_ = (int(define.split("=")[1]) for define in defines)
        self.asked.append((bool(trace), Units(units)))
        return compile.Cubin(b"code of " + self.source.read_bytes() + f" {trace:d}{units:d}".encode(), self.log)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    return Counting(monkeypatch, tmp_path)


def test_compiles_once_per_content(counting: Counting, tmp_path: Path) -> None:
    assert compile.cubin(Build(False, TENSOR)) == compile.cubin(Build(False, TENSOR)) == b"code of one 02"
    assert compile.cubin(Build(True, DOTS)) == b"code of one 11"
    assert compile.cubin(Build(True, TENSOR)) == b"code of one 12"
    assert compile.cubin(Build(True, TENSOR, experts=True)) == b"code of one 12"
    assert counting.asked == [(False, TENSOR), *((True, units) for units in (DOTS, TENSOR, TENSOR))]
    counting.source.touch()
    compile.cubin(Build(False, TENSOR))
    assert len(counting.asked) == 4  # the cache depends on contents, not on modification times
    counting.source.write_text("two")
    assert compile.cubin(Build(False, TENSOR)) == b"code of two 02"
    (counting.source.parent / "new.h").write_text("")
    compile.cubin(Build(False, TENSOR))
    counting.version = "2"
    compile.cubin(Build(False, TENSOR))
    assert len(counting.asked) == 7
    assert {p.suffix for p in (tmp_path / "cache" / "cubin").iterdir()} == {".cubin"}  # no leftovers


def test_a_cache_that_cannot_be_written(counting: Counting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "file"))
    assert compile.cubin(Build(False, TENSOR)) == b"code of one 02"


def test_a_line_on_a_terminal(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile.cubin(Build(True, DOTS))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compile.cubin(Build(False, TENSOR))
    compile.cubin(Build(False, TENSOR))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "compiling a variant of the CUDA interpreter" in said


def test_slow_code_is_an_error(counting: Counting) -> None:
    counting.log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to calls\n"
    )
    with pytest.raises(MegakernelError, match=r"compiled csrc/cuda into slow code: \(C7510\) Potential"):
        compile.cubin(Build(False, TENSOR))
    counting.log = ""
    assert compile.cubin(Build(False, TENSOR))  # the slow code was not stored in the cache


def test_programs_of_one_row_have_a_build_of_their_own() -> None:
    """It does not depend on a server's limits. Programs of several rows have the generic build."""
    programs = [compiled(SMOLLM2, MACHINES["h100"], rows, max_seqs=seqs) for rows, seqs in ((2, 2), (1, 2), (1, 8))]
    few, one, other = (Build.of(p.dims, p.forward) for p in programs)
    assert few == Build(False, DOTS) and one == other != few
    assert {"-DMK_ONE_ROW=1", "-DMK_SIZE_HIDDEN=576", "-DMK_HEAD_NORMS=0"} <= {*one.defines}


def test_the_first_complaint_is_the_error() -> None:
    error = compile._failed("a.h(3): warning: odd\na.h(7): error: no such thing\na.h(9): error: another\n")
    assert str(error) == "compiling csrc/cuda failed: a.h(7): error: no such thing"


def test_every_source_is_installed() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = table["package-data"]["megakernel.csrc"]
    files = [p.relative_to(ROOT / "csrc") for folder in ("common", "cuda") for p in (ROOT / "csrc" / folder).rglob("*")]
    sources = [str(f) for f in files if f.suffix in (".h", ".cuh", ".cu")]
    assert len(sources) > 3
    assert [s for s in sources if not any(fnmatch.fnmatch(s, pattern) for pattern in patterns)] == []


def test_no_lambda_is_generic() -> None:
    """No lambda has an `auto` parameter, because NVRTC 13.0 takes a lambda inside such a lambda for a host function."""
    generic = re.compile(rb"\[[&=]?\]\s*\([^)]*\bauto\b")
    assert [name for name, text in compile.sources().items() if generic.search(text)] == []
    assert generic.search(b"f([&](int first, const auto& at) {")
