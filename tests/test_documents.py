"""Tests of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: all links, files, flags and commands in them are valid.
The commands of a document run from top to bottom in an empty folder. NOT_RUN lists the commands that are only parsed,
with the reasons. To finish in seconds, the tests add the flags in SMALLER to the commands, and give the 70B model
LAYERS layers. test_worked_examples.py tests the documents that change the sources."""

import argparse
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import Cli, command, run_python
from worked_example import CHANGE

import megakernel
from megakernel.cli import parser
from megakernel.model import KNOWN_SHAPES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
EACH_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Commands that tests parse but do not run: a regular expression for the command, and the reason.
NOT_RUN = {
    r"gpu\.py|-m gpu": "needs a GPU",
    r"^pip": "needs the package index; it is how CI begins",
    r"^pytest": "would run these tests again",
    r"headers\.py$|docs/tables\.py$": "writes into the sources; the build and CI run them",
    r"benchmarks/pictures": "overwrites the pictures in docs/",
    r"(compile_verify|engine_overhead|hostile_files|ranks|speculation|verifier|workers)\.py": "takes an hour",
    r"serving_overhead\.py": "needs another installation; tests/test_benchmarks.py runs it against this one",
    r"sharegpt_65536\.py": "takes hours; tests/test_benchmarks.py runs it on a few requests",
    r"serve --replicas": "needs Ray; tests/serving/test_replicas.py runs it",
    r"speed/replicas\.py": "needs Ray, and takes minutes",
    r"calibrate\.py": "takes a minute; tests/roofline/test_kept.py runs it for an instant",
    r"--vs (llama|torch)": "needs llama.cpp and torch; tests/cli/test_versus.py runs it against pretended ones",
    r"perplexity\.py": "needs llama.cpp; tests/test_benchmarks.py runs it without",
    r"rounding\.py|llama_cpp\.py|speed/cpu\.py|batched_decode\.py": "needs llama.cpp's sources, and takes minutes",
}

# Flags that tests add to a command, so that it finishes quickly or uses the server that the same document started.
# MODEL is a small model with random weights. Only the first regular expression that matches a command counts.
_LOAD = "--num-prompts 2 --dataset random --random-input-len 8 --random-output-len 4"
SMALLER = {
    r"^megakernel chat": "--max-tokens 4",
    r"bench latency": "--model MODEL --prompt-tokens 16 --tokens 2 --runs 1",
    r"bench throughput": f"--model MODEL {_LOAD}",
    r"bench serve .*--vs": f"{_LOAD} --runs 1 --base-url URL --vs URL",
    r"bench serve": f"{_LOAD} --base-url URL",
    r"generate .*sky": "--max-tokens 8",
    # A short context limits answers without max_tokens. Small steps need few programs.
    r"^megakernel serve": "--port 0 --json --max-model-len 256 --max-num-seqs 8 --max-num-batched-tokens 16",
    r"simulate .*--tokens 16": "--queue body",
    r"(compile|simulate|verify) .*--tokens (1024|8192)": "--tokens 64 --tp 2",
    r"timeline .*--(json|perfetto|save)": "--model MODEL --launches 2",
    r"timeline .*--model": "--launches 2",
    r"predictions\.py": "--batch 1",
    r"speed/structured\.py": "--model MODEL --tokens 4 --rounds 1",
    r"correctness/structured\.py": "--schemas 1 --tokens 64",
    r"predictions_host\.py": f"--predict-only --machine {ROOT}/benchmarks/machines/epyc-2.toml -o FILE",
}

# Commands that end with status 1, and the reason.
REFUSED = {r"verify broken\.program": "the tutorial removes a wait from this program"}

# The tests simulate only LAYERS of the 80 layers, because simulating all takes half a minute.
_70B, LAYERS = "llama-3.1-70b", 2

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_INLINE_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:(?:megakernel|python|pytest|pip|bench) \S|benchmarks/\S+\.py \S)")
_VERB = re.compile(r"(?:megakernel )?(?:bench )?\w+")
_RUNS_ANOTHER = re.compile(r"^(?:\w+=\S* |compute-sanitizer (?:--tool \w+ )?)+")


@dataclass(frozen=True)
class Step:
    """A part of a document that is tested: a command, a block of Python, or the output shown for the step before it."""

    place: str
    words: tuple[str, ...] = ()
    code: str = ""
    output: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words) or ("python block" if self.code else "output")


def steps(document: Path) -> Iterator[Step]:
    text = document.read_text()
    for match in re.finditer(f"{_FENCE.pattern}|{_SPAN.pattern}", text, _FENCE.flags):
        place = f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        language, block, span = match.groups()
        if span is not None:
            code = " ".join(span.split())
            if _INLINE_COMMAND.match(code):
                # Within a sentence, a verb without arguments is only a name. In a table row, it is a complete command.
                if _VERB.fullmatch(code) and text[text.rfind("\n", 0, match.start()) + 1] != "|":
                    code += " --help"
                yield from _commands(place, code)
        elif language == "python":
            yield Step(place, code=block)
        elif language == "output":
            yield Step(place, output=block)
        elif not language:  # other blocks, such as json, have no commands
            for line in block.splitlines():
                yield from _commands(place, line)


def _commands(place: str, line: str) -> Iterator[Step]:
    """Yield the commands of a line of shell, without environment variables and compute-sanitizer in front of them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("&|;"):
            words.append(word)
        elif words:
            words = shlex.split(_RUNS_ANOTHER.sub("", shlex.join(words)))
            program = ["megakernel"] if words[0] == "bench" else ["python"] if words[0].endswith(".py") else []
            yield Step(place, (*program, *words))
            words = []


ALL = {document: list(steps(document)) for document in DOCUMENTS if not CHANGE.search(document.read_text())}


def fitting(table: dict[str, str], step: Step) -> str | None:
    return next((value for pattern, value in table.items() if re.search(pattern, " ".join(step.words))), None)


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines of `shown`, the output in a document, that are not in `printed`, the actual output. Numbers,
    units of time and bars of block characters may differ."""

    def plain(line: str) -> str:
        return " ".join(re.sub(r"\d[\d.,]*( [nµm]?s\b)?", "0", re.sub("[▁-█]", "", line)).split())

    lines = {plain(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line != "..." and plain(line) not in lines]


def place_of(path: str, *folders: Path) -> Path:
    """Return the first file or folder that matches `path` in the repository or in `folders`. A word in capitals, such
    as NAME, is a placeholder that matches any text."""
    pattern = re.sub(r"\b[A-Z]+\b", "*", path)
    found = [place for folder in (ROOT, *folders) for place in sorted(folder.glob(pattern))]
    assert found, f"there is no {path}"
    return found[0]


# -- tests that commands parse, and that flags, files and links exist


class Parsed(Exception):
    """Ends a script that has parsed its command line."""


@pytest.mark.parametrize("step", {s.words: s for found in ALL.values() for s in found if s.words}.values(), ids=str)
def test_a_command_parses(step: Step, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    match [word for word in step.words if word != "-P"]:
        case ["megakernel", *rest] | ["python", "-m", "megakernel", *rest]:
            try:
                parser().parse_args(rest)
            except SystemExit as e:
                assert e.code == 0, f"{step.place}: {capsys.readouterr().err}"  # 0: --help
        case "pip", "install", *rest:
            extras = {e for word in rest for e in re.findall(r"^\.\[.*\]$", word) for e in e[2:-1].split(",")}
            assert extras <= set(PROJECT["project"]["optional-dependencies"]), step.place
        case ["pytest", *rest] | ["python", "-m", "pytest", *rest]:
            markers = [line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
            for flag, word in zip(["", *rest], rest, strict=False):
                file, _, name = word.partition("::")
                there = (ROOT / file).exists() and (not name or f"def {name}(" in (ROOT / file).read_text())
                known = word.removeprefix("not ") in markers if flag == "-m" else word[0] == "-" or there
                assert known, (step.place, word)
        case "python", "-m", module:
            assert importlib.util.find_spec(module), step.place
        case "python", script, *rest:
            parse = argparse.ArgumentParser.parse_args

            def parse_and_leave(*arguments: Any, **options: Any) -> None:
                parse(*arguments, **options)
                raise Parsed

            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)
            with nullcontext() if "--help" in rest else pytest.raises(Parsed):
                run_python(str(place_of(script)), *rest)
        case _:
            pytest.fail(f"{step.place}: how is {step} parsed?")


@functools.cache
def known_flags() -> set[str]:
    """Return the flags of all `megakernel` verbs and of all scripts in benchmarks/."""
    scripts = "".join(path.read_text() for path in ROOT.glob("benchmarks/**/*.py"))
    flags, left = set(re.findall(r'"(--[a-z][\w-]*)"', scripts)), [parser()]
    while left:
        for action in left.pop()._actions:
            flags.update(action.option_strings)
            left += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
    return flags


@EACH_DOCUMENT
def test_flags_exist(document: Path) -> None:
    """Flags that a document mentions without a command, such as `--tp 2|4|8`, exist in some verb or benchmark."""
    spans = _SPAN.findall(_FENCE.sub("", document.read_text()))
    flags = {word for span in spans if span.startswith("--") for word in re.findall(r"(?<!\S)--[\w-]+", span)}
    assert flags <= known_flags(), sorted(flags - known_flags())


@EACH_DOCUMENT
def test_places_exist(document: Path) -> None:
    """The targets of a document's links exist, and records of results have a date. The files whose paths it shows in
    backticks exist. A path may omit the folder megakernel/ at its start, and may contain the wildcard *."""
    text = _FENCE.sub("", CHANGE.sub("", document.read_text()))
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (document.parent / link).exists(), link
        if re.search(r"/results/.*\.json$", link):
            assert '"recorded": "' in (document.parent / link).read_text(), f"{link} does not say when it was made"
    for link, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", text):
        target = (document.parent / link if link else document).read_text()
        headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", target), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{link}#{anchor}"
    for path in re.findall(r"`(?:python )?((?:[\w.*-]+/)+[\w.*-]+\.(?:py|toml|h|cuh|cu|cpp|json|csv))[` ]", text):
        place_of(path, ROOT / "megakernel", document.parent)


# -- tests that run the commands


class Reader:
    """Runs the commands and Python blocks of a document, and compares their output with the output that it shows. A
    command that several documents show runs only once, although several processes may run these tests. It runs again if
    a document shows its output, or needs the file that it writes or the server that it starts. The processes share the
    folder `shared`, which has an entry for each command that has begun."""

    def __init__(self, cli: Cli, shared: Path, model: str) -> None:
        self._cli, self._shared, self._model = cli, shared, model
        self._servers: list[subprocess.Popen[str]] = []
        self._url = "http://127.0.0.1:8000"
        self._printed = ""

    def knows(self, step: Step, rest: Sequence[Step]) -> bool:
        """Whether a command has run before, and need not run again for the steps that follow it."""
        if not step.words:
            return False
        command = " ".join(word for word in step.words if word != "--json")
        try:
            (self._shared / hashlib.sha256(command.encode()).hexdigest()).touch(exist_ok=False)
            return False
        except FileExistsError:
            made = [name for flag, name in pairwise(step.words) if flag in ("-o", "--save")]
            needed = any(word.startswith(name) for later in rest for word in later.words for name in made)
            return not (needed or "serve" in step.words or (rest and rest[0].output))

    def follow(self, step: Step) -> str:
        """Run a step, or compare the output that it shows. Return what went wrong, or an empty string."""
        if step.output:
            lines = missing(step.output, self._printed)
            return f"the command does not print {lines}, but {self._printed}" if lines else ""
        if step.code:
            self._cli.capsys.readouterr()
            try:
                exec(compile(step.code.replace("http://127.0.0.1:8000", self._url), step.place, "exec"), {})
            except Exception as e:
                return f"{type(e).__name__}: {e}"
            self._printed = self._cli.capsys.readouterr().out
            return ""
        more = (fitting(SMALLER, step) or "").replace("URL", self._url).replace("MODEL", self._model)
        match [*step.words, *more.split()]:
            case "megakernel", "serve", *rest if "--help" not in rest:
                return self._serve(rest)
            case "megakernel", *rest:
                status, self._printed, err = self._cli.run(*rest)
                expected = 1 if fitting(REFUSED, step) else 0
                return f"status {status}: {err}" if status != expected else ""
            case "python", script, *rest:
                try:
                    run_python(script if script == "-m" else str(place_of(script)), *rest)
                except (SystemExit, Exception) as e:
                    return f"{type(e).__name__}: {e}"
                return ""
            case words:
                return f"how is {words[0]} run?"

    def _serve(self, arguments: list[str]) -> str:
        serve = command("serve", *arguments)
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._servers.append(server)
        assert server.stdout is not None and server.stderr is not None
        ready: dict[str, Any] = json.loads(server.stdout.readline() or "{}")
        if "url" not in ready:
            return server.stderr.read()
        self._url = ready["url"].removesuffix("/v1")
        return ""

    def leave(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("document", ALL, ids=lambda d: d.name)
@pytest.mark.usefixtures("smollm2")
def test_a_document_can_be_followed(
    document: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
    model: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(megakernel.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KNOWN_SHAPES, _70B, replace(KNOWN_SHAPES[_70B], layers=LAYERS))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))  # what the user types in `megakernel chat`
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "commands"
    shared.mkdir(exist_ok=True)
    reader, wrong = Reader(cli, shared, model), list[str]()
    steps = [step for step in ALL[document] if not fitting(NOT_RUN, step)]
    try:
        for at, step in enumerate(steps):
            if not reader.knows(step, steps[at + 1 :]) and (problem := reader.follow(step)):
                wrong.append(f"{step.place}: {step}: {problem}")
    finally:
        reader.leave()
    assert not wrong, "\n".join(wrong)


def test_the_readme_repeats_the_medians_of_results() -> None:
    """The speeds of megakernel and llama.cpp in README.md are medians in docs/results.md."""
    readme, results = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text().splitlines() if "|" in line]
        for path in (ROOT / "README.md", ROOT / "docs" / "results.md")
    )
    medians = {row[0]: [cell.partition(" (")[0] for cell in (*row[1:3], *row[4:6])] for row in results}
    shown = readme[[row[0] for row in readme].index("model") + 2 :][:4]
    for label, *speeds in shown:
        assert [cell.partition(" (")[0] for cell in speeds] == medians[f"{label}, 256"], label


def test_each_reason_has_its_command() -> None:
    texts = "\n".join(" ".join(step.words) for found in ALL.values() for step in found)
    for pattern in (*NOT_RUN, *SMALLER, *REFUSED):
        assert re.search(pattern, texts, re.MULTILINE), f"no document has a command like {pattern}"
