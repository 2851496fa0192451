"""`megakernel doctor`: reports the hardware and software of this machine, and which parts other commands can use."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
from dataclasses import asdict
from importlib import metadata

from .. import machine
from ..errors import MegakernelError
from ..runtime.cpu import native
from ..settings import SETTINGS, Setting, cache_folder
from . import doctor_gpu, output
from .options import verb
from .this_machine import host_ceilings

_PACKAGES = (
    "megakernel", "numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub", "perfetto", "torch", "cuda-bindings",
    "cupy-cuda13x",
)  # fmt: skip
_SEEDS, _REPEATS = 3, 20  # per case: sets of random inputs, and runs with each set, which must give equal bits
_COMPILERS = ("c++", "g++", "clang++")


@verb("doctor")
def run(args: argparse.Namespace) -> int:
    findings: list[str] = []
    versions = {name: _version(name) for name in _PACKAGES}
    compilers = {name: path for name in _COMPILERS if (path := shutil.which(name))}
    settings = {s.env: _shown(s) for s in SETTINGS.values() if s.env}
    try:
        core: str | None = native.simd()
    except MegakernelError as e:
        core = None
        findings.append(str(e))
    measured = host_ceilings(machine.cpu_count(), anew=True) if core else None
    ceilings = asdict(measured) if measured else None
    gpus = doctor_gpu.report()
    if gpus["missing"] is None:
        with output.progress("checking every operation on the GPU") as advance:
            cases = doctor_gpu.cases()
            for done, case in enumerate(cases):
                findings += doctor_gpu.check(case, seeds=_SEEDS, repeats=_REPEATS)
                advance(done + 1, len(cases))
    cache = cache_folder()
    report = {
        "ok": not findings,
        "findings": findings,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "cache": str(cache),
        "settings": settings,
        "cores": machine.cpu_count(),
        "cpu": machine.processor(),
        "simd": core,
        "ceilings": ceilings,
        "compilers": compilers,
        "gpus": gpus,
        "backend": "cuda" if gpus["missing"] is None else "cpu",
    }
    if args.json:
        output.emit(report)
        return 0 if report["ok"] else 1
    rows = [
        ("python", f"{report['python']} on {report['system']}"),
        ("packages", ", ".join(f"{name} {v}" for name, v in versions.items() if v)),
        ("cache", f"{cache}{'' if cache.is_dir() else ' (made when first needed)'}"),
        ("cpu", f"{report['cpu']}, {report['cores']} cores for this process"),
        ("simd path", core or "none: the native core is missing"),
    ]
    if ceilings:
        memory, cache = (ceilings[f"{what}_bytes_per_s"] / 1e9 for what in ("read", "cache"))
        rates = f"reads {memory:.1f} GB/s, {cache:.1f} in cache, {ceilings['flops'] / 1e9:.0f} GFLOP/s"
        if ceilings["integer_ops"]:
            rates += f", {ceilings['integer_ops'] / 1e9:.0f} G operations/s on 8-bit integers"
        rows.append(("ceilings", f"{rates}: {ceilings['how']}"))
    rows += [
        ("compilers", ", ".join(compilers.values()) or "none"),
        ("gpus", doctor_gpu.line(gpus)),
        ("backend", f"auto uses {report['backend']}"),
        *(("", note) for note in gpus["notes"]),
        *((env, value) for env, value in settings.items()),
    ]
    output.rows(*rows)
    for finding in findings:
        output.stdout.print(f"! {finding}", style="red")
    if report["ok"]:
        output.stdout.print("all is well", style="green")
    return 0 if report["ok"] else 1


def _shown(setting: Setting) -> str:
    """Return the setting's value without passwords, because users paste reports into public issues."""
    if setting.secret and setting.env and os.environ.get(setting.env):
        return "set"
    return re.sub(r"//[^/@]*@", "//***@", setting.text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
