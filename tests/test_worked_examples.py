"""Tests that the changes and commands of docs/adding-*.md work on a copy of the tree."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command
from own_package import build_native, link_package
from worked_example import ROOT, apply, commands, copy_of_the_tree

from megakernel import library

DOCUMENTS = sorted((ROOT / "docs").glob("adding-*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_a_worked_example_works(document: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    package = link_package(tree, tmp_path / "site")
    (package / "_native.so").symlink_to(library.load()._name)
    apply(document, tree)
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONSAFEPATH": "1"}
    for line in commands(document):
        match shlex.split(line):
            case "pip", "install", *_:
                build_native(tree, package, "-O0")
                continue
            case "pytest", *rest:
                words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *rest]
            case "python", *rest:
                words = [sys.executable, *rest]
            case "megakernel", *rest:
                words = command(*rest)
            case _:
                pytest.fail(f"how is {line} run?")
        done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}: {done.stdout[-4000:]}{done.stderr[-4000:]}"


def test_both_examples_are_there() -> None:
    assert [document.name for document in DOCUMENTS] == ["adding-a-model.md", "adding-an-instruction.md"]
