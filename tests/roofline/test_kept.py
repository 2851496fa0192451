"""Tests how measured peak rates of the hardware are stored: each is measured once, and repeated measurements keep the
best. Busy machines and damaged files are tested too."""

import json
import os
from itertools import pairwise
from pathlib import Path

import calibrate as calibration
import msgspec
import pytest
from commands import Cli
from cpu_support import DIMS

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.machine import Core, busy
from megakernel.machine.hardware import Hardware
from megakernel.roofline import Ceilings, Measured, kept
from megakernel.roofline.program_step import rate_of
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.serving.bench import ceilings

QUIET, BUSY = 0.01, 0.4


def measured(read: float = 1e10, cache: float = 5e10, flops: float = 1e11, others: float | None = QUIET) -> Measured:
    return Measured(2, read, cache, flops, 3 * flops, others, "2026-01-01")


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Return a list to which a test adds the results of its measurements. Each measurement removes and returns the
    first result, and fails if the list is empty. The cache folder is empty at first."""
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "cache"))
    found: list[Measured] = []
    monkeypatch.setattr(ceilings, "measure", lambda threads, *probes: found.pop(0))
    monkeypatch.setattr("megakernel.roofline.ceilings.QUIET", 0.05)
    return found


def test_a_quiet_measurement_is_made_once(probes: list[Measured]) -> None:
    probes += [measured()]
    first = ceilings.host_ceilings(2)
    assert (first.read_bytes_per_s, first.flops, first.cache_bytes_per_s, first.threads) == (1e10, 1e11, 5e10, 2)
    assert ceilings.host_ceilings(2) == first and not probes
    with pytest.raises(IndexError):
        ceilings.host_ceilings(1)  # fails: it would measure one thread, but the list is empty


def test_the_best_is_kept(probes: list[Measured]) -> None:
    probes += [measured(read=2e10, flops=1e11), measured(read=1e10, flops=3e11, cache=1e10), measured(cache=2e10)]
    ceilings.host_ceilings(2)
    ceilings.host_ceilings(2, anew=True)
    best = ceilings.host_ceilings(2, anew=True)
    assert (best.read_bytes_per_s, best.flops, best.cache_bytes_per_s) == (2e10, 3e11, 5e10)
    assert "3 times until 2026-01-01" in best.how


def test_a_busy_machine_warns_and_is_measured_again(probes: list[Measured]) -> None:
    probes += [measured(others=BUSY), measured(read=5e9, others=QUIET)]
    assert "other programs used 40% of this machine's cores" in (ceilings.host_ceilings(2).warning or "")
    again = ceilings.host_ceilings(2)
    assert (again.read_bytes_per_s, again.warning) == (1e10, None) and not probes
    assert ceilings.host_ceilings(2) == again  # quiet by now


def test_a_machine_that_does_not_say_how_busy_it_is_is_believed(probes: list[Measured]) -> None:
    probes += [measured(others=None)]
    assert ceilings.host_ceilings(2) == ceilings.host_ceilings(2)


ENTRY = msgspec.structs.asdict(measured())


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[" * 100_000, "\xff", "[]", '{"MACHINE": 3}', " " * (2 << 20)),
        *(
            json.dumps({"MACHINE": {"2": wrong}})
            for wrong in (
                ENTRY | {"flops": 1.0},
                ENTRY | {"read_bytes_per_s": 1e300},
                ENTRY | {"read_bytes_per_s": float("nan")},
                ENTRY | {"date": "\x1b[31mtoday"},
                ENTRY | {"more": 1},
            )
        ),
    ],
)
def test_a_damaged_file_is_measured_anew(probes: list[Measured], caplog: pytest.LogCaptureFixture, text: str) -> None:
    name = kept.this_machine(ceilings.simd())
    kept.path().parent.mkdir()
    kept.path().write_bytes(text.replace("MACHINE", name).encode("latin-1"))
    probes += [measured()]
    assert ceilings.host_ceilings(2).flops == 1e11 and not probes
    messages = [r.getMessage() for r in caplog.records]
    assert messages and all("measured anew" in m and "\n" not in m for m in messages)
    caplog.clear()
    assert ceilings.host_ceilings(2).flops == 1e11 and not caplog.text  # whole again


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: list[Measured], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "file"))
    probes += [measured(), measured(flops=2e11)]
    assert [ceilings.host_ceilings(2).flops for _ in range(2)] == [1e11, 2e11]
    assert "measured again next time" in caplog.text


def test_other_machines_keep_theirs(probes: list[Measured]) -> None:
    kept.keep("another", measured(flops=7e11))
    probes += [measured()]
    ceilings.host_ceilings(2)
    other = kept.recall("another", 2)
    assert other and other.flops == 7e11


def test_what_others_take(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    assert busy.now(stat) is None and busy.others(None, busy.now()) is None
    for text in ("", "cpu 1 2 three", "cpu 1 2", "intr 1 2 3 4 5 6 7 8"):
        stat.write_text(text)
        assert busy.now(stat) is None
    second = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu {second} 0 0 {2 * second} {3 * second} 0 0 {4 * second} 9 9\n")
    found = busy.now(stat)
    assert found and (found.total_s, found.idle_s) == (10.0, 5.0)
    begin = busy.Moment(0.0, 0.0, 0.0)
    assert busy.others(begin, busy.Moment(10.0, 5.0, 4.0)) == pytest.approx(0.1)
    assert busy.others(begin, busy.Moment(10.0, 8.0, 4.0)) == 0.0 and busy.others(begin, begin) is None


def test_verbs_share_ceilings(probes: list[Measured], cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    read, flops = 3.3e9, 4.4e10
    kept.keep(kept.this_machine(ceilings.simd()), Measured(1, read, 2e10, flops, 3 * flops, QUIET, "2026-01-01"))
    monkeypatch.setattr("megakernel.serving.bench.offline.probe_read", lambda *given: read)
    step = cli.json("roofline", "--model", model)
    assert step["memory_bytes"] / step["t_memory_s"] == pytest.approx(read)
    assert step["flops"] / step["t_math_s"] == pytest.approx(flops)
    speed = ["--model", model, "--threads", "1"]
    latency = cli.json("bench", "latency", *speed, "--prompt-tokens", "8", "--tokens", "2", "--runs", "1")
    assert latency["ceilings"]["read_bytes_per_s"] == read
    peaks = {"memory": read, "matrix": flops, "cache": 2e10}
    for verb in (["timeline", *speed, "--prompt-tokens", "8"], ["simulate", "--model", model, "--workers", "1"]):
        found = cli.json(*verb)
        resources = (found.get("timeline") or found)["resources"]
        assert {r["name"]: r["peak"] for r in resources if r["name"] in peaks} == pytest.approx(peaks)


@pytest.mark.parametrize("reads", [[4e9, 4.2e9, 2e9, 2.1e9], [4e9, 2e9, 1e9, 4e9]])
def test_speed_is_compared_with_the_memory_of_the_same_seconds(
    reads: list[float], cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("megakernel.serving.bench.offline.probe_read", lambda *given: upcoming.pop(0))
    upcoming, steady = reads.copy(), [max(a, b) for a, b in pairwise(reads) if a < 1.1 * b < 1.21 * a]
    found = cli.json("bench", "latency", "--model", model, "--prompt-tokens", "8", "--tokens", "2", "--runs", "3")
    assert [one["read"] for one in found["runs"]] == [list(pair) for pair in pairwise(reads)]
    assert found["ceilings"]["read_bytes_per_s"] in (steady or reads)
    assert any("memory: its speed changed" in error for error in found["errors"]) == (not steady)


CORE = Core(9e9, (1.0, 96.0), (2e10, 3e10), (4.0, 128.0), (1e10, 2e10), 3e9)


def test_a_calibration_is_a_machine_file(tmp_path: Path) -> None:
    most = Ceilings(1.2e10, 8e10, 2, "made up", cache_bytes_per_s=5e10)
    found = calibration.Calibration(most, CORE, 2e-5, 3e-8, 4e-7, QUIET)
    path = tmp_path / "mine.toml"
    calibration.write_machine(path, found)
    two, one = machine.load(str(path)), machine.load(str(path), 1)
    costs = costs_of(two)
    assert (two.workers, costs.launch_s, costs.dispatch_s, costs.signal_s) == (2, 2e-5, 3e-8, 4e-7)
    assert costs.matmul_flops == ((1.0, 2e10), (96.0, 3e10)) and costs.vector_flops == 3e9
    assert (costs.memory_bytes_per_s, costs.cache_bytes_per_s) == (1.2e10, pytest.approx(5e10))
    assert two.matrix_flops == 8e10 and machine.hardware(str(path)).rates.fp32 == 8e10
    alone = costs_of(one)
    assert (alone.memory_bytes_per_s, alone.cache_bytes_per_s, alone.matmul_flops) == (9e9, 2.5e10, costs.matmul_flops)
    assert "other processes used 1% of the CPU time" in path.read_text()


def test_what_is_calibrated_is_no_more_than_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([({1: 5.0, 96: 9.0}, {4: 2.0}, {96: 1.0}), ({1: 6.0, 96: 7.0}, {4: 3.0}, {96: 0.5})] * 2)
    monkeypatch.setattr(calibration, "_ROUNDS", 2)
    monkeypatch.setattr(calibration, "_arithmetic", lambda: next(rounds))
    sizes = [(20, 5), (320, 5)] * 2  # instructions and phases of few and many layers, on one worker and on all
    seconds = [(30e-6, 62e-6, 40e-6, 90e-6), (31e-6, 60e-6, 39e-6, 100e-6)]
    idle = iter([[(one, *size) for one, size in zip(each, sizes, strict=True)] for each in seconds])
    monkeypatch.setattr(calibration, "_idle", lambda cores: next(idle))
    most = Ceilings(1e9, 8.0, 1, "made up", cache_bytes_per_s=1e9)
    found = calibration.calibrate(most, most)
    assert found.core == Core(1e9, (1.0, 96.0), (6.0, 8.0), (4.0,), (3.0,), 1.0)
    # 60 us - 30 us, each the shortest time of all rounds
    assert (found.dispatch_s, found.launch_s) == pytest.approx((30e-6 / 300, 28e-6))
    assert found.signal_s == pytest.approx((90e-6 - 39e-6 - 30e-6) / (60 * 5))


def test_ranks_of_a_host_share_all_rates_but_a_gpu_keeps_its_own() -> None:
    whole = Ceilings(1e9, 4e9, 8, "made up", cache_bytes_per_s=2e9)
    part = ceilings.share_of(whole, machine.host(4), 2)
    assert (part.memory_bytes_per_s, part.matrix_flops, part.vector_flops) == (0.5e9, 2e9, 2e9)
    assert (part.cache_bytes_per_s, part.worker_bytes_per_s) == (1e9, 0.25e9)
    assert ceilings.share_of(whole, machine.load("h100"), 2) == machine.load("h100")


def test_only_matmuls_of_quantised_weights_have_the_rate_of_integers() -> None:
    whole = Ceilings(1e9, 4e9, 8, "made up", integer_ops=12e9)
    part = ceilings.share_of(whole.of_integers, machine.host(4), 2)
    assert (part.matrix_flops, part.vector_flops, whole.of_integers.unit) == (6e9, 2e9, "OP/s")
    unmeasured = Ceilings(1e9, 4e9, 8, "made up")
    assert unmeasured.of_integers == unmeasured


@pytest.mark.parametrize(("q8", "rate", "name"), [(0, 3e11, "fp32"), (1, None, "fp32"), (1, 3e11, "int8")])
def test_the_rate_of_integers_limits_matmuls_only_if_it_is_known(q8: int, rate: float | None, name: str) -> None:
    model = DIMS.changed(q8_activations=q8).model
    assert rate_of(model, machine.host_hardware(1e11, rate, 2e10)) == name


def test_a_core_has_its_share_of_what_all_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_arithmetic", lambda: ({1: 50.0}, {4: 60.0}, {96: 1.0}))
    monkeypatch.setattr(calibration, "_idle", lambda cores: [(30e-6, 20, 5), (62e-6, 320, 5)] * 2)
    alone, both = (Ceilings(1e9, flops, cores, "made up", 1e9) for flops, cores in ((11.0, 1), (16.0, 2)))
    found = calibration.calibrate(both, alone)
    assert found.core == Core(1e9, (1.0,), (8.0,), (4.0,), (8.0,), 1.0)


def test_a_worker_has_a_thread_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    made, backend = [], calibration.backend

    def noted(*given: object, threads: int) -> object:
        made.append(threads)
        return backend(*given, threads=threads)

    monkeypatch.setattr(calibration, "backend", noted)
    monkeypatch.setattr(calibration, "_best", lambda work: 1.0)
    calibration.null_step(2, 1)
    calibration.null_step(2, 1, threads=1)
    assert made == [2, 1]


def test_a_calibration_that_is_always_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (calibration._rate(6.0, 2.0), calibration._rate(6.0, -1e-9), calibration._rate(6.0, 0.0)) == (3.0, 0.0, 0.0)
    monkeypatch.setattr(calibration, "_arithmetic", lambda: ({1: 5.0}, {4: 0.0}, {96: 1.0}))
    monkeypatch.setattr(calibration, "_idle", lambda cores: [(1.0, 20, 5), (2.0, 320, 5)] * 2)
    most = Ceilings(1e9, 8.0, 1, "made up", cache_bytes_per_s=1e9)
    with pytest.raises(MegakernelError, match="other processes disturb every measurement"):
        calibration.calibrate(most, most)


def test_this_machine_is_calibrated(probes: list[Measured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs its real micro-benchmarks, shortened, and writes a machine file with possible rates."""
    shortened = {"_ROUNDS": 2, "_BEST_S": 0.01, "_MANY": 4, "_ROWS": (8, 96), "_ATTENTION_ROWS": (4,), "_CONTEXT": 128}
    for name, value in shortened.items():
        monkeypatch.setattr(calibration, name, value)
    probes += [measured(flops=1e15), measured(flops=1e15)]
    path = tmp_path / "mine.toml"
    monkeypatch.setattr("sys.argv", ["calibrate.py", "-o", "mine.json"])
    with pytest.raises(SystemExit):  # the name must end in .toml
        calibration.main()
    monkeypatch.setattr("sys.argv", ["calibrate.py", "-o", str(path)])
    calibration.main()
    found: Hardware = machine.hardware(str(path))
    assert found.core and all(1e6 < rate < 1e15 for rate in found.core.matmul_flops_per_s)
    assert found.chip.sms == machine.cpu_count() and found.rates.bf16 == 1e15


def test_the_warning_is_a_line_on_standard_error(probes: list[Measured], cli: Cli) -> None:
    probes += [measured(others=BUSY)]
    status, out, err = cli.run("roofline", "--model", "random:smollm2-135m")
    assert status == 0 and "warning" not in out.lower()
    assert err.count("\n") == 1 and err.startswith("megakernel: warning: other programs used 40% of")
