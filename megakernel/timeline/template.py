"""Fills the templates of HTML pages, and makes the security policy that lets a page run only its own scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files

_SCRIPTS = ("data", "rows", "detail", "paint", "layers", "curves", "overlay", "find", "panels", "input", "main")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `@@NAME@@` in a template by the part NAME. The contents of parts are not changed."""
    return re.sub("@@([A-Z]+)@@", lambda found: parts[found[1]], template)


def policy(*scripts: str) -> str:
    """The Content-Security-Policy of a page that runs only these scripts, and connects only to its own server."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'"
    )


def asset(name: str) -> str:
    """Return the text of one of the files that the timeline's page consists of."""
    return (files(__package__) / "viewer" / name).read_text(encoding="utf-8")


def timeline_script() -> str:
    """Return the script of the timeline's page."""
    return '"use strict";\n(async () => {\n' + "\n".join(asset(f"{name}.js") for name in _SCRIPTS) + "\n})();"
