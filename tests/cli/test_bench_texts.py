"""The text output of the benchmarks: each figure is printed in the right place and with the right unit."""

from typing import Any

import pytest

from megakernel.cli import bench, bench_serve

CEILINGS = {"read_bytes_per_s": 41.26e9, "flops": 123.4e9, "unit": "FLOP/s", "threads": 2, "how": "made up"}
PREFILL = {"tokens_per_s": 1234.4, "tokens": 512, "gflops": 98.7, "fma_fraction": 0.796, "roofline_fraction": 0.716}
LATENCY: dict[str, Any] = {"tokens_per_s": 98.76, "step_s": 0.0101257, "step_s_min": 0.0099123, "step_s_max": 0.0112349}
LATENCY |= {"runs": [{}, {}, {}], "read_GBps": 26.54, "read_fraction": 0.644, "prefill": PREFILL, "ceilings": CEILINGS}
LATENCY |= {"roofline_fraction": 0.634, "proposed": 1200, "accepted": 1034, "tokens_per_step": 2.345, "vs": {}}
LATENCY |= {"errors": ["it was busy"]}
THROUGHPUT: dict[str, Any] = {"input_tokens": 12345, "output_tokens": 6789, "total_tokens_per_s": 765.43}
THROUGHPUT |= {"requests_per_s": 3.456, "settings": {"num_prompts": 64, "workload": "some lengths"}}
THROUGHPUT |= {"duration_s": 25.04, "tokens_per_s": 271.83, "steps": 321, "step_s": 0.0789, "sequences": 12.34}
THROUGHPUT |= {"roofline_fraction": 0.876, "read_GBps": 12.34, "gflops": 56.78, "ceilings": CEILINGS, "proposed": 0}
THROUGHPUT |= {"vs": {}, "error": None}
TIMES = {"mean": 0.0123456, "median": 0.0111, "p99": 1.2345678}
SERVING: dict[str, Any] = THROUGHPUT | {
    "settings": THROUGHPUT["settings"]  # type: ignore[operator]
    | {"url": "http://a:1", "model": "m", "goodput": {"ttft": 0.2, "e2e": 1.5}},
    "input_tokens_per_s": 493.6,
    "completed": 63,
    "failed": 1,
    "short": 2,
    "max_in_flight": 16,
    "goodput_per_s": 2.345,
    "server": {"steps": 99, "step_s": 0.0456, "roofline_fraction": 0.543},
    "cpu_us_per_token": {"engine": 1234.56, "client": 7.89},
    "client_busy": 0.123,
    "vs": {"http://b:2": {"ratio": 1.234, "tokens_per_s": 220.29}, "http://c:3": {"ratio": None, "tokens_per_s": 0.0}},
    "ttft_s": TIMES,
    "tpot_s": TIMES,
    "itl_s": dict.fromkeys(TIMES),
    "e2e_s": TIMES,
    "errors": ["one failed"],
    "roofline_error": None,
    "client_error": "the client was the limit",
}


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_latency(capsys: pytest.CaptureFixture[str]) -> None:
    bench.show_latency(LATENCY)
    out, err = capsys.readouterr()
    assert lines(out) == [
        "decode 98.8 tokens/s, 10.13 ms a step, 9.91 to 11.23 over 3 runs",
        "reads 26.5 GB/s, 64% of the 41.3 that this machine can read",
        "prefill 1234 tokens/s, 512 tokens in one prompt",
        "arithmetic 99 GFLOP/s, 80% of the 123 that this machine can do",
        "roofline decode 63%, prefill 72%",
        "proposals 1,034 of 1,200 proposed tokens were right, 2.35 tokens a step and sequence",
    ]
    assert lines(err) == ["megakernel: warning: it was busy"]


def test_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    bench.show_throughput(THROUGHPUT)
    out, err = capsys.readouterr()
    assert lines(out) == [
        "workload 64 prompts: some lengths",
        "tokens 12,345 in, 6,789 out, in 25.0 s",
        "throughput 271.8 tokens/s out, 765.4 in and out, 3.46 requests/s",
        "steps 321, 78.9 ms each, 12.3 sequences",
        "roofline 88% of the time is what the steps need: 12.3 of 41.3 GB/s, 57 of 123 GFLOP/s",
    ]
    assert err == ""
    bench.show_throughput(THROUGHPUT | {"error": "it was busy"})
    assert lines(capsys.readouterr().err) == ["megakernel: warning: it was busy"]


def test_serving(capsys: pytest.CaptureFixture[str]) -> None:
    bench_serve.show(SERVING)
    out, err = capsys.readouterr()
    assert lines(out) == [
        "server http://a:1, m",
        "workload 64 prompts: some lengths",
        "requests 63 answered in 25.0 s, 1 failed, 2 of another length, at most 16 at a time",
        "tokens 12,345 in, 6,789 out",
        "throughput 271.8 tokens/s out, 493.6 in, 3.46 requests/s",
        "goodput 2.35 requests/s within ttft 200 ms, e2e 1500 ms",
        "roofline 88% of the time is the least time of this work: 12.3 of 41.3 GB/s, 57 of 123 GFLOP/s",
        "steps 99, 45.6 ms each, least time 54% of it",
        "CPU per token engine 1234.6 µs, client 7.9 µs; the client busy for 12% of the time",
        "versus 1.23 x the 220.3 tokens/s of http://b:2",
        "versus no answers the 0.0 tokens/s of http://c:3",
        "ms mean median p99",
        "to first token 12.3 11.1 1,234.6",
        "per later token 12.3 11.1 1,234.6",
        "between pieces - - -",
        "whole answer 12.3 11.1 1,234.6",
    ]
    assert lines(err) == ["megakernel: warning: one failed", "megakernel: warning: the client was the limit"]
