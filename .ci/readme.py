"""Prints the shell commands of README.md, in their order: the lines of its blocks that have no language or are `sh`."""

import re
from pathlib import Path

text = (Path(__file__).parents[1] / "README.md").read_text()
for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
    if language in ("", "sh"):
        print(block, end="")
