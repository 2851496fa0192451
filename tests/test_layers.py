"""Checks that each package imports only what the table in docs/architecture.md allows."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"megakernel": "megakernel", "scheduler": "megakernel.scheduler", "serving": "megakernel.serving"}
BASE = {"isa", "machine", "program", "trace"}  # every package in a higher row of the table may import these
BOTTOM = {"errors", "settings", "units"}  # every package may import these; they import nothing but the errors
_GPU_AND_PEERS = ("megakernel.runtime.cuda", "megakernel.serving.bench.peers")
# Maps each package that not every user has, or that loads slowly, to the only modules that may import it.
HEAVY = {
    **dict.fromkeys(("torch", "transformers", "cupy", "cuda"), _GPU_AND_PEERS),
    "ray": ("megakernel.serving.replicas.cluster",),
    "aiohttp": ("megakernel.serving.replicas.server_process",),
}


def packages() -> dict[str, set[str]]:
    """Return, for each package, the packages that it may import, in the order of the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Packages")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if "`" in line]
    python = [(names, allowed) for names, _, allowed in (r for r in rows if len(r) == 3) if "csrc" not in names]
    levels = [{re.split(r"[./]", n.rstrip("/"))[-1] for n in re.findall(r"`([^`]+)`", names)} for names, _ in python]
    table: dict[str, set[str]] = {}
    for depth, (level, (_, allowed)) in enumerate(zip(levels, python, strict=True)):
        below = set().union(*levels[depth + 1 :])
        listed = below if "everything" in allowed else set(re.findall(r"\w+", allowed))
        base = set() if allowed.strip() == "—" else BASE & below
        for package in level:
            table[package] = (listed & below) | base | BOTTOM
    return table | {"errors": set(), "settings": {"errors"}, "units": set()} | {"": set(table) | BOTTOM}


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the file and the dotted name of every module that is installed."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = inside[:-1] if inside[-1] == "__init__" else inside
            yield path, ".".join([package, *parts])


# Packages inside another package's folder.
INSIDE = {f"scheduler.{name}": name for name in ("simulate", "tune", "verify")}


def package_of(module: str) -> str:
    """Return the package to which a module belongs, or "" for the top-level package megakernel itself."""
    parts = module.split(".")[1:]
    return INSIDE.get(".".join(parts[:2]), parts[0] if parts else "")


_FOLDERS = {"megakernel"} | {f"megakernel.{name.rpartition('.')[0]}" for name in INSIDE}  # they hold several packages


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute dotted name of everything that a file imports, also inside functions."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name in _FOLDERS:
                yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, name


def wrong_imports(path: Path, module: str, table: dict[str, set[str]]) -> Iterator[str]:
    package = package_of(module)
    if package not in table:
        yield f"{path.name}: {module} is in no package of docs/architecture.md"
        return
    for line, name in imports(path, module):
        top, target = name.split(".")[0], package_of(name)
        if top == "megakernel" and target and target != package and target not in table[package]:
            yield f"{path}:{line}: {package or 'megakernel'} imports {target}"
        if top in HEAVY and not module.startswith(HEAVY[top]):
            yield f"{path}:{line}: only {' and '.join(HEAVY[top])} import {top}"


def test_arrows_point_down() -> None:
    table = packages()
    files = list(sources())
    assert len(files) > 20
    assert [w for path, module in files for w in wrong_imports(path, module, table)] == []


def test_nothing_heavy_is_loaded_by_serving_on_a_cpu_or_by_a_target() -> None:
    modules = "sys, megakernel, megakernel.cli, megakernel.serving, megakernel.targets"
    code = f"import {modules}; print(*({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
