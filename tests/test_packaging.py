"""Tests what users install: the source archive, the wheel's tag, the commands of the container image, and shell
completion."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from megakernel.cli import parser
from megakernel.settings import SETTINGS

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def output_of(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_archive_has_what_a_reader_and_a_builder_need(tmp_path: Path) -> None:
    egg_info = ["egg_info", "--egg-base", str(tmp_path)]
    output_of(sys.executable, "setup.py", "-q", *egg_info, "sdist", "-d", str(tmp_path))
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = set(output_of("git", "ls-files").splitlines()) if (ROOT / ".git").exists() else set()
    wanted = {name for name in tracked if not name.startswith(".ci/")} - {".clang-format", ".gitignore"}
    assert wanted <= names, sorted(wanted - names)
    assert {"docs/serving.md", "benchmarks/speed/cpu.py", "LICENSE", "csrc/cpu/kernels.cpp"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_a_wheel_is_for_every_python_of_a_platform() -> None:
    script = "import runpy, setuptools; setuptools.setup = lambda **how: print(setuptools.Distribution(how)"
    script += ".get_command_obj('bdist_wheel').get_tag()); import sys; sys.argv = ['setup.py']; "
    found = output_of(sys.executable, "-c", script + "runpy.run_path('setup.py')")
    assert re.fullmatch(r"\('py3', 'none', '\w+_\w+'\)\n", found), found


def test_the_package_is_a_program() -> None:
    assert output_of(sys.executable, "-P", "-m", "megakernel", "--version", cwd=Path("/")).startswith("megakernel ")


# -- the image


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def test_the_image_starts_a_server() -> None:
    said = dict(instructions())
    program, command = json.loads(said["ENTRYPOINT"]), json.loads(said["CMD"])
    assert program == ["megakernel"]
    args = parser().parse_args(command)
    assert args.host == "0.0.0.0"
    port = SETTINGS["port"].default
    assert args.port is None and said["EXPOSE"] == port
    probe = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    assert probe[:2] == ["python", "-c"] and f"127.0.0.1:{port}/health" in probe[2]
    compile(probe[2], "HEALTHCHECK", "exec")


def test_the_image_has_a_user_without_rights_in_every_target() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    names = [stage.splitlines()[0].partition(" AS ")[2] for stage in stages]
    assert names == ["build", "base", "cuda", "cpu"]
    assert all(stage.rstrip().endswith("USER megakernel") for stage in stages[2:])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]\"", DOCKERFILE)) == {"cuda"} <= set(extras)


def test_the_image_is_built_from_what_the_build_reads() -> None:
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in given)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {*folders, "pyproject.toml", "setup.py", "headers.py", "README.md", "LICENSE", "MANIFEST.in"} <= given


@pytest.mark.skipif(not shutil.which("sh"), reason="no shell")
def test_the_commands_of_the_image_are_shell() -> None:
    runs = [re.sub(r"^(--\S+ )+", "", rest) for word, rest in instructions() if word == "RUN"]
    assert len(runs) == 5
    for command in runs:
        output_of("sh", "-n", "-c", command)
