"""Builds the native core, the C++ part of the package. All other settings of the build are in pyproject.toml.

The core is a plain shared library with a C interface that ctypes loads, so it needs no Python headers. `kernels.cpp` is
compiled once per SIMD path, and the path is chosen at run time. The other files of its folder are compiled as one,
because most of the time of a small file goes to the headers that they share. The environment variable CXX names another
compiler, and MEGAKERNEL_WERROR=1 makes warnings errors.

The headers that the core and the CUDA interpreter share with Python are generated first, so that every way to install
or pack the project has them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent

# -Werror=switch: a switch over an enumeration, for example of operations, must have a case for each value.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror=switch"]
# For the kernels, GCC needs only -O2 and the passes of -O3 that shorten their loops. The other passes take compile time
# and gain nothing, because the loops are already unrolled and vectorised in the source.
PASSES = ["gcse-after-reload", "predictive-commoning", "split-loops", "tree-partial-pre"]
GCC_KERNEL_FLAGS = ["-O2", *(f"-f{name}" for name in PASSES)]
# -ffp-contract=fast: the compiler must use fused multiply-adds, because the specified results have one rounding, not
# two, for each product that is added to a sum.
KERNEL_FLAGS = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
KERNELS = Path("csrc/cpu/kernels.cpp").resolve()
SIMD = {"portable": (4, [])}
if platform.machine().lower() in ("x86_64", "amd64"):
    # Only processors from before 2013 take the portable code here. With -O1, it is as fast and compiles in 2/3 of the
    # time.
    SIMD["portable"] = (4, ["-O1"])
    SIMD["avx2"] = (8, ["-mavx2", "-mfma", "-mf16c"])
    SIMD["avx512"] = (16, ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"])


def compiler() -> str:
    """Return the C++ compiler's command. If there is no compiler, end with a message."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if shutil.which(name.split()[0]):
            return name
    remedy = "xcode-select --install" if sys.platform == "darwin" else "apt install g++"
    what = f"CXX={wanted} is not found" if wanted else "megakernel needs a C++ compiler and found none"
    raise SystemExit(f"{what}: run `{remedy}`, then install megakernel again")


class BuildNative(build_ext):
    """A build command that compiles the C++ sources in parallel and links them. It builds no Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        cxx = compiler().split()
        flags = FLAGS + (["-Werror"] if os.environ.get("MEGAKERNEL_WERROR") == "1" else [])
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self.force and not newer_group([*ext.sources, *ext.depends, __file__], str(target)):
            return
        sources = [Path(source).resolve() for source in ext.sources]
        together = objects / "cpu.cpp"
        small = [path for path in sources if path.parent.name == "cpu" and path != KERNELS]
        together.write_text("".join(f'#include "{path}"\n' for path in small))
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
        optimise = GCC_KERNEL_FLAGS if "Free Software Foundation" in version else []
        jobs: list[tuple[Path, list[str], Path]] = []
        for name, (lanes, simd_flags) in reversed(SIMD.items()):  # what takes longest is compiled first
            defines = [f"-DMK_SIMD={name}", f"-DMK_LANES={lanes}"]
            jobs.append((KERNELS, optimise + KERNEL_FLAGS + simd_flags + defines, objects / f"kernels_{name}.o"))
        for source in [together, *(path for path in reversed(sources) if path.parent.name != "cpu")]:
            jobs.append((source, [], objects / f"{source.stem}.o"))

        def run(command: list[str]) -> None:
            result = subprocess.run(command, capture_output=True, text=True)
            sys.stderr.write(result.stderr)
            if result.returncode:
                raise SystemExit(f"building the native library failed: {' '.join(command)}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: run([*cxx, *flags, *job[1], "-c", str(job[0]), "-o", str(job[2])]), jobs))
        run([*cxx, "-shared", "-pthread", *(str(job[2]) for job in jobs), "-o", str(target)])


class AnyPython(bdist_wheel):
    """A command that builds a wheel for every Python 3 on one platform, because no file depends on Python's version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# pip asks for metadata twice before it builds. Metadata needs no headers, so the tables that headers are made of are
# not imported for it.
if sys.argv[-1] != "egg_info" and "dist_info" not in sys.argv:
    sys.path.insert(0, str(ROOT))
    # Modules of the tables import NumPy, but no table needs it, so pip need not unpack its 73 MB for a build.
    if find_spec("numpy") is None:
        sys.modules |= dict.fromkeys(["numpy", "numpy.typing"], MagicMock())
    from headers import write_headers

    write_headers(ROOT)
setup(
    ext_modules=[
        Extension(
            "megakernel._native",
            sources=sorted(str(p) for p in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(p) for p in Path("csrc").rglob("*.h")),
        )
    ],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": BuildNative},
)
