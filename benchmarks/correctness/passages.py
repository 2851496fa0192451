"""Draws passages of the project at random, so that somebody who does not know it can say which ones are clear.

python benchmarks/correctness/passages.py --seed 1

The script prints 20 paragraphs or table rows of documents, 20 docstrings or comments, and 20 error or help texts. Each
has its place, and its heading or the code that it belongs to. The same seed draws the same passages from the same tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EACH = 20  # passages of each kind
FEWEST_WORDS = {"document": 8, "code": 5, "message": 4}
MESSAGE_ARGUMENTS = {"help", "description", "what", "remedy"}
COMMENT = re.compile(
    r"(?:^[^\S\n]*|  )(#|//) (?!noqa|type:|ruff|NOLINT|clang-format).*(?:\n[^\S\n]*\1 .*)*", re.MULTILINE
)
HEADING = re.compile("#+ ")
ITEM = re.compile(r"\s*([*-]|\d+\.) ")


@dataclass(frozen=True)
class Passage:
    """A passage. `kind` is a key of FEWEST_WORDS, `place` is file and line, `context` is the heading or lines of
    code."""

    kind: str
    place: str
    context: str
    text: str

    def __str__(self) -> str:
        return f"## {self.place} ({self.kind})\n\n{self.context.strip()}\n\n>>> {self.text}\n"


def paragraphs(path: str, text: str) -> Iterator[Passage]:
    """The paragraphs, list items and table rows of a Markdown document, without its fenced blocks."""
    text = re.sub(r"^ *```.*?^ *```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    heading, header, block, begin = "", "", "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if block and (not line.strip() or line[0] == "|" or HEADING.match(line) or ITEM.match(line)):
            yield Passage("document", f"{path}:{begin}", heading, block)
            block = ""
        if HEADING.match(line):
            heading = line
        elif line.startswith("|"):
            if header and not set(line) <= set("|-: "):
                yield Passage("document", f"{path}:{number}", f"{heading}\n{header}", line)
            header = header or line
        elif line.strip():
            block, begin = (f"{block}\n{line}", begin) if block else (line, number)
        if not line.startswith("|"):
            header = ""


def comments(path: str, text: str) -> Iterator[Passage]:
    """Yield the comments of a file, each with the line of code that it ends, or with the five lines that follow it."""
    lines = text.splitlines()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline)) if path.endswith(".py") else []
    starts = {token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT}
    for match in COMMENT.finditer(text):
        begin, end = (text.count("\n", 0, place) for place in match.span())
        code = lines[begin].partition(match[0].splitlines()[0])[0].strip() or "\n".join(lines[end + 1 : end + 6])
        if begin in starts or not tokens:
            yield Passage("code", f"{path}:{begin + 1}", code, match[0].strip())


def docstrings(path: str, text: str) -> Iterator[Passage]:
    """Docstrings, each with the signature of its function or class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            found := ast.get_docstring(node)
        ):
            line = node.body[0].lineno
            begin = line if isinstance(node, ast.Module) else node.lineno
            yield Passage("code", f"{path}:{line}", "\n".join(text.splitlines()[begin - 1 : line - 1]), found)


def messages(path: str, text: str) -> Iterator[Passage]:
    """Texts that a statement raises, that a call gives to an argument such as `help`, or that describe a setting."""
    for node in ast.walk(ast.parse(text)):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args
            context = "\n".join(text.splitlines()[max(0, node.lineno - 4) : node.lineno])
        elif isinstance(node, ast.Call):
            context = ast.unparse(node.args[0]) if node.args else text.splitlines()[node.lineno - 1]
            texts = [keyword.value for keyword in node.keywords if keyword.arg in MESSAGE_ARGUMENTS]
            texts += node.args[1:2] if ast.unparse(node.func) == "Setting" else []
        for one in texts:
            if isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str)):
                yield Passage("message", f"{path}:{one.lineno}", context, ast.unparse(one))


READERS = {
    ".md": [paragraphs],
    ".py": [comments, docstrings, messages],
    **{suffix: [comments] for suffix in (".h", ".cpp", ".cu", ".cuh", ".js")},
}


def passages(root: Path) -> list[Passage]:
    """All passages of the files that git tracks below a folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    found = [
        passage
        for path in listed.splitlines()
        for read in READERS.get(Path(path).suffix, [])
        for passage in read(path, (root / path).read_text())
    ]
    return [one for one in found if len(re.findall(r"[A-Za-z]{2,}", one.text)) >= FEWEST_WORDS[one.kind]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="number that selects the passages (default: 0)")
    arguments = parser.parse_args()
    found = passages(ROOT)
    random.seed(arguments.seed)
    for kind in FEWEST_WORDS:
        print(*random.sample([one for one in found if one.kind == kind], EACH), sep="\n")


if __name__ == "__main__":
    main()
