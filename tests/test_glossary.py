"""Tests of docs/glossary.md: all its terms are in use, and it has every term that another document defines. A document
defines a term where it shows it in bold: "A **phase** is an operation with its parameters". The term begins in lower
case and has at most three words. Any other bold text is a heading."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path != GLOSSARY]
SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh", ".js"}
FOLDERS = ("megakernel", "scheduler", "serving", "csrc", "tests")

_BOLD = re.compile(r"\*\*([a-z][\w-]*(?:\s[\w-]+){0,2})\*\*")


def terms(text: str) -> list[str]:
    """Return the terms in the glossary's table, which are the first cells of its rows."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    return [row for row in rows if row != "term" and set(row) != {"-"}]


def defined(text: str) -> set[str]:
    return {" ".join(match[1].split()) for match in _BOLD.finditer(text)}


def singular(term: str) -> str:
    return term.removesuffix("s")


def unused(terms: list[str], text: str) -> list[str]:
    """Return the terms that do not occur in `text`. Case, punctuation and a plural's final s may differ."""
    words = " ".join(re.findall(r"[a-z0-9]+", text.lower()))
    return [
        term
        for term in terms
        if not re.search(rf"\b{' '.join(re.findall('[a-z0-9]+', singular(term).lower()))}s?\b", words)
    ]


def test_every_term_is_in_use() -> None:
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES}
    text = "\n".join(path.read_text() for path in (*DOCUMENTS, *(paths - {Path(__file__)})))
    assert not unused(terms(GLOSSARY.read_text()), text)


def test_terms_are_in_order_and_once() -> None:
    found = [term.lower() for term in terms(GLOSSARY.read_text())]
    assert found == sorted(set(found))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_defines_is_in_the_glossary(document: Path) -> None:
    known = {singular(term.lower()) for term in terms(GLOSSARY.read_text())}
    missing = {term for term in defined(document.read_text()) if singular(term) not in known}
    assert not missing, f"docs/glossary.md lacks {', '.join(sorted(missing))}"
