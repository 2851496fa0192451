"""Writes the tables of docs/ that the package declares, and leaves all else in the pages: `python docs/tables.py`.

instructions.md   operations, results and buffers
settings.md       environment variables
models.md         families of models

With `--check`, it writes nothing, and exits with 1 if a page differs from the tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from megakernel.isa import BUFFERS, OPERATIONS, RESULTS, Result
from megakernel.model.families import FAMILIES
from megakernel.settings import SETTINGS

_PAGES = ("instructions.md", "settings.md", "models.md")
_TABLE = re.compile(r"(\| ([^|\n]+) \|.*\n\|(?: --- \|)+\n)(?:\|.*\n)*")  # a Markdown table, and its first title


def fill(folder: Path, *, check: bool) -> int:
    """Write the pages in `folder`, or only check them, and return the exit status."""
    flags = [(s, f" (flag `{s.flag}`)" if s.flag else "") for s in SETTINGS.values() if s.env]
    tables: dict[str, list[tuple[str, ...]]] = {
        "number": [
            (f"{o.value}", o.name.lower(), ", ".join(o.layout.operands) or "—", spec.meaning.replace("|", "\\|"))
            for o, spec in OPERATIONS.items()
        ],
        "result": [(f"`{result.name}`", RESULTS[result].meaning) for result in Result if result is not Result.NONE],
        "name": [(f"`{buffer.name}`", spec.what) for buffer, spec in BUFFERS.items()],
        "environment variable": [(f"`{s.env}`{flag}", s.default, s.what) for s, flag in flags],
        "`model_type`": [
            (f"`{f.name}`", ", ".join(f"`{n}`" for n in f.gguf) or "—", f.models) for f in FAMILIES.values()
        ],
    }

    def table(found: re.Match[str]) -> str:
        rows = tables.get(found[2])
        return found[0] if rows is None else found[1] + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    texts = {path: path.read_text() for path in (folder / page for page in _PAGES)}
    stale = {path: new for path, text in texts.items() if (new := _TABLE.sub(table, text)) != text}
    for path, text in stale.items():
        print(f"{path}: differs from the tables")
        if not check:
            path.write_text(text)
    return 1 if stale and check else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tables of docs/ that the package declares.")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page differs")
    sys.exit(fill(Path(__file__).parent, check=parser.parse_args().check))
