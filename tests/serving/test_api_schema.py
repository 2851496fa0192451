"""The server's own OpenAPI schema is true: schemathesis, which reads it and sends what it allows and forbids."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from api_support import serving, until

from megakernel import LLM


def test_schemathesis_finds_nothing(tmp_path: Path, model: str) -> None:
    """A sample of what the whole run tries:
    `st --config-file tests/support/schemathesis.toml run URL/openapi.json --max-examples 1000`."""
    pytest.importorskip("schemathesis")
    config = Path(__file__).parents[1] / "support" / "schemathesis.toml"
    with (
        LLM(model, max_context=96, max_seqs=8, step_tokens=16, threads=1, backend="null") as llm,
        serving(llm) as live,
    ):
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        flags = ["--max-examples", "4", "--phases", "coverage,fuzzing", "--no-color", "--generation-deterministic"]
        done = subprocess.run(
            [*command, *flags, f"{live.url}/openapi.json"], capture_output=True, text=True, timeout=600, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout
        found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert found and found[1] == found[2] and int(found[1]) > 500, done.stdout
        until(live.at_rest)
