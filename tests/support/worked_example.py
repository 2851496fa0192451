"""Makes the source changes that a document describes, in a copy of the source tree. The line **In `FILE`** introduces a
`diff` block without line numbers. The kept and removed lines of a hunk, taken together, must occur in the file exactly
once. The line **New file `FILE`** introduces a block with the whole content of a new file."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("megakernel", "scheduler", "serving", "csrc", "tests", "docs")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.png", "*.svg")
CHANGE = re.compile(r"^\*\*(In|New file) `([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def copy_of_the_tree(target: Path) -> Path:
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=_LEFT_OUT)
    for file in ("pyproject.toml", "headers.py"):
        shutil.copy(ROOT / file, target)
    return target


def apply(document: Path, tree: Path) -> None:
    for kind, name, text in CHANGE.findall(document.read_text()):
        path = tree / name
        assert path.exists() == (kind == "In"), f"{document.name}: {kind} {name}"
        path.write_text(patched(path.read_text(), text, f"{document.name}: {name}") if kind == "In" else text)


def patched(text: str, diff: str, where: str) -> str:
    """Apply `diff`, whose hunks are separated by lines with @@, to `text` and return the result."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), f"{where}: each line of a diff begins with a sign or a blank"
        before, after = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert before != after, f"{where}: a hunk changes nothing:\n{hunk}"
        found = list(re.finditer(f"^{re.escape(before)}", text, re.MULTILINE))
        assert len(found) == 1, f"{where}: these lines are not in the file exactly once:\n{before}"
        text = text[: found[0].start()] + after + text[found[0].end() :]
    return text


def commands(document: Path) -> list[str]:
    """Return the shell commands of a document: the lines of its code blocks that name no language."""
    blocks = re.findall(r"^```\n(.*?)^```$", CHANGE.sub("", document.read_text()), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]
