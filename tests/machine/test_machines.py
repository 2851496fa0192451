"""Tests of hardware descriptions (machine files): every figure has a source, the figures agree with each other, and the
error for a bad file says in one sentence what is wrong."""

import tomllib
from math import log2
from pathlib import Path

import pytest

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.machine import MACHINES, Hardware, hardware
from megakernel.machine.files import KNOWN_FOLDER, names
from megakernel.roofline.ask import FACTS, SWITCH_PORTS

FILES = sorted(KNOWN_FOLDER.glob("*.toml"))
KNOWN = names()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_figure_has_a_source(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    sources = table.pop("source")
    figures = {f"{section}.{key}" for section, body in table.items() if isinstance(body, dict) for key in body}
    if table.get("curve"):
        figures.add("curve")
    sourced = [figure for said in sources.values() for figure in said]
    assert set(sourced) == figures and len(sourced) == len(set(sourced)) and min(map(len, sources)) > 10


@pytest.mark.parametrize(("name", "links"), FACTS["links_per_switch"].items())
def test_links_and_switches_agree(name: str, links: tuple[int, ...]) -> None:
    node = hardware(name).node
    assert len(links) == node.switches and sum(links) == hardware(name).link.ports
    assert all(n * node.gpus <= node.switch_ports for n in links)


@pytest.mark.parametrize(("name", "leaves"), FACTS["leaf_switches"].items())
def test_leaves_have_a_port_for_each_cable(name: str, leaves: int) -> None:
    found = hardware(name)
    down = leaves * SWITCH_PORTS // 2 * 50e9  # a port carries 50 GB/s
    assert down == pytest.approx(found.node.nodes_per_unit * found.node.egress_bytes_per_s)


@pytest.mark.parametrize(("name", "flops"), [("v100", 256), ("a100", 512), ("h100", 1024), ("b200", 2048)])
def test_flops_of_a_tensor_core_in_one_cycle(name: str, flops: int) -> None:
    """The peak rate implies the known FLOPs per tensor core and cycle. The test rounds to a power of two, because
    vendors do not state exactly for which clock they quote a peak."""
    found = hardware(name)
    assert 1 << round(log2(found.rates.bf16 / found.chip.subpartitions / found.clock_hz)) == flops


def test_a_device_for_the_compiler() -> None:
    h100, h200 = machine.load("h100"), machine.load("h200")
    assert (h100.workers, h100.matrix_flops, h100.memory_bytes_per_s) == (132, 9.9e14, 3.35e12)
    assert (h200.memory_bytes, h200.link_bytes_per_s) == (141e9, 450e9)
    few = machine.load("h100", 4)  # each of the four keeps its rates
    assert (few.workers, few.matrix_flops) == (4, h100.matrix_flops / 33)
    assert machine.load("h100x8") == h100
    assert set(MACHINES) == set(KNOWN) - {"tpu-v5p"}
    assert machine.load("host").workers == machine.cpu_count()


def test_caches_and_switches() -> None:
    h100, b200 = hardware("h100"), hardware("b200")
    assert h100.l2_bytes_per_s == pytest.approx(5.5e12 * (132 * 1.98) / (114 * 1.755), rel=1e-3)
    assert b200.clock_hz == pytest.approx(2.1e9, rel=0.01)
    # The rate of a switch counts all its ports, also those without a cable. The V100 node, a DGX-1, has no switches, so
    # its rate is the sum of its GPUs' links.
    assert [hardware(n).switch_bytes_per_s for n in ("h100", "b200", "v100")] == [6.4e12, 7.2e12, 1.2e12]


def test_nodes_of_a_chip() -> None:
    four = hardware("h100x4")
    assert four.node.gpus == 4 and four.node.egress_bytes_per_s == 200e9
    assert four.levels(4)[0].degree == 4
    [level] = hardware("gb200-nvl72").levels(72)
    assert level.degree * level.child_bytes_per_s == 72 * 900e9
    assert hardware("h100").levels(1) == ()


def test_host_is_one_device() -> None:
    host = machine.host_hardware(1e11, 3e11, 2e10)
    assert host.flops_per_s("bf16") == host.flops_per_s("fp32") == 1e11 and host.chip.hbm_bytes_per_s == 2e10
    assert host.flops_per_s("int8") == 3e11
    assert hardware("host").chip.hbm_bytes == host.chip.hbm_bytes > 1e9


def own(tmp_path: Path, text: str) -> Hardware:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return hardware(str(path))


def test_a_file_on_top_of_a_known_machine(tmp_path: Path) -> None:
    mine = own(tmp_path, 'base = "h200"\n[chip]\nhbm_bytes = 100e9\n[node]\ngpus = 4\n')
    h200 = hardware("h200")
    assert (mine.name, mine.chip.hbm_bytes, mine.node.gpus) == ("mine", 100e9, 4)
    assert mine.chip.hbm_bytes_per_s == h200.chip.hbm_bytes_per_s and mine.rates == h200.rates
    assert machine.load(str(tmp_path / "mine.toml")).memory_bytes == 100e9
    (tmp_path / "second.toml").write_text('base = "mine.toml"\n[chip]\nsms = 10\n')
    second = hardware(str(tmp_path / "second.toml"))
    assert (second.chip.sms, second.chip.hbm_bytes) == (10, 100e9)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[chip\n", "not valid TOML"),
        ('base = "h900"', "unknown base 'h900'"),
        ("base = 3", "base must be a name in quotes"),
        ('base = "host"\nchip = 3', "chip.hbm_bytes_per_s is missing, and its base 'host' has only an assumed value"),
        ('base = "host"\n[chip]\nhbm_bytes_per_s = 1e9', "flops_per_s.bf16 is missing"),
        ('base = "host"\n[chip]\nhbm_bytes_per_s = 1e9\n[flops_per_s]\nbf16 = 1e9', "flops_per_s.fp32 is missing"),
        ('base = "mine.toml"', "refers back to this file"),
        ('base = "h100"\nclock = 3', "unknown field `clock`"),
        ('base = "h100"\nchip = 3', "at `$.chip`"),
        ('base = "h100"\n[paths]\ndot_piar = [3]', "unknown or missing: dot_piar"),
        ('base = "h100"\n[paths]\ndot_pair = []', "of length >= 1 - at `$.paths[...]`"),
        ('base = "h100"\n[chip]\nsmss = 3', "unknown field `smss` - at `$.chip`"),
        ('base = "h100"\n[chip]\nsms = 1.5', "at `$.chip.sms`"),
        ('base = "h100"\n[chip]\nhbm_bytes = 0', "at `$.chip.hbm_bytes`"),
        ('base = "h100"\n[chip]\nhbm_bytes = nan', "at `$.chip.hbm_bytes`"),
        ("[flops_per_s]\nbf16 = 1\nfp32 = 1\n", "`chip`"),
        ('base = "_gpu"\n[chip]\nsms = 3', "`generation` - at `$.chip`"),
        (
            'base = "h100"\n[[curve]]\ncollective = "all_reduce"\ngpus = 8\nmessage_bytes = [2, 1]\n'
            "bus_bytes_per_s = [1, 2]",
            "in ascending order",
        ),
        (
            'base = "h100"\n[core]\nmemory_bytes_per_s = 1\nvector_flops_per_s = 1\nmatmul_rows = [1]\n'
            "matmul_flops_per_s = [1]\nattention_rows = [2, 1]\nattention_flops_per_s = [1, 2]",
            "in ascending order, and each size must have one rate - at `$.core`",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MegakernelError) as failed:
        own(tmp_path, text)
    assert message in str(failed.value) and "mine.toml" in str(failed.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("h900", "unknown machine 'h900'"),
        ("_gpu", "unknown machine '_gpu'"),
        ("h100x16", "a node of h100 has 1 to 8 GPUs"),
        ("h100x0", "a node of h100 has 1 to 8 GPUs"),
        ("tpu-v5p", "serves for comparison only"),
        ("nowhere.toml", "cannot read machine file nowhere.toml"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(MegakernelError) as failed:
        machine.load(name)
    assert message in str(failed.value)
