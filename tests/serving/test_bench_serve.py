"""The load generator `megakernel bench serve`: its workloads, HTTP client, arrival times and figures."""

import asyncio
import json
from array import array
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from commands import Cli
from engine_support import CONFIG
from fake_openai import HOSTILE, FakeServer, answering, running
from loopback import Answer

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, Split
from megakernel.model.families import forward
from megakernel.roofline import step_work
from megakernel.scheduler import passes
from megakernel.serving.bench import Load, LoadJob, ServerClient, Workload, alternate, client, least_work
from megakernel.serving.bench.client import CPU
from megakernel.serving.bench.load import _STEPS, drive
from megakernel.serving.bench.report import Outcome, cpu_time, report
from megakernel.serving.bench.workload import length_pairs, sharegpt_file, sharegpt_lengths, uniform


def jobs(*pairs: tuple[int, int]) -> list[LoadJob]:
    return [LoadJob(np.arange(p, dtype=np.int32), p, o) for p, o in pairs]


def send(fake: FakeServer, pairs: list[tuple[int, int]], **how: Any) -> list[Outcome]:
    async def drove() -> list[Outcome]:
        server = ServerClient(fake.url, api_key=how.pop("api_key", None))
        await server.discover()
        outcomes = await drive(server, Workload("test", jobs(*pairs)), Load(**how))
        await server.close()
        return outcomes

    return asyncio.run(drove())


def test_sharegpt_lengths_are_the_published_ones() -> None:
    load = sharegpt_lengths(15_277, 1000, seed=1)
    prompts = [j.prompt_tokens for j in load.jobs]
    assert (round(np.mean(prompts)), round(np.mean([j.output_tokens for j in load.jobs]))) == (246, 235)
    assert all(len(j.prompt) == j.prompt_tokens for j in load.jobs)
    assert max(int(np.max(j.prompt)) for j in load.jobs) == 999
    more = sharegpt_lengths(15_278, 1000, seed=1).jobs
    assert more[-1].prompt_tokens == more[0].prompt_tokens and not np.array_equal(more[-1].prompt, more[0].prompt)
    assert [j.prompt_tokens for j in sharegpt_lengths(99, 1000, seed=2).jobs] != prompts[:99]
    one, two = (sharegpt_lengths(9, 50, 3).jobs for _ in range(2))
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(one, two, strict=True))


def test_every_run_has_its_own_ids() -> None:
    load = sharegpt_lengths(20, 1000, seed=1)
    other = load.again(1)
    for one, two in zip(load.jobs, other.jobs, strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (two.prompt_tokens, two.output_tokens)
        assert not np.array_equal(one.prompt, two.prompt)
    assert np.array_equal(other.jobs[3].prompt, load.again(1).jobs[3].prompt)
    text = Workload("text", [LoadJob("a", 1, 2)])
    assert text.again(1) is text


def test_uniform_lengths_stay_in_range() -> None:
    load = uniform(100, 10, 0.5, 500, 64, seed=0)
    prompts = {j.prompt_tokens for j in load.jobs}
    assert min(prompts) == 50 and max(prompts) == 150
    assert {j.output_tokens for j in uniform(5, 7, 0.0, 9, 64, seed=0).jobs} == {7}
    with pytest.raises(MegakernelError, match="range-ratio"):
        uniform(5, 7, 1.0, 9, 64, seed=0)


def test_sharegpt_file_takes_two_turns_and_filters(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": t} for t in turns]}

    file = tmp_path / "a.json"
    short, long = talk("x" * 3, "b" * 9), talk("y" * 1025, "b" * 9)
    both = talk("z" * 1000, "b" * 1100)
    file.write_text(json.dumps([talk("a" * 10, "b" * 20, "c"), short, long, both, talk("lonely")]))
    load = sharegpt_file(file, list, 3, seed=0)
    assert [(j.prompt, j.prompt_tokens, j.output_tokens) for j in load.jobs] == [("a" * 10, 10, 20)] * 3
    for text in ("{", '{"a": 1}', "[1]", '[{"conversations": 3}]', "[]"):
        file.write_text(text)
        with pytest.raises(MegakernelError, match=r"a\.json"):
            sharegpt_file(file, list, 3, seed=0)


def test_length_pairs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("in,out\n3,4\n5,6\n")
    assert {(j.prompt_tokens, j.output_tokens) for j in length_pairs(file, 4, 10, 0).jobs} == {(3, 4), (5, 6)}
    for text in ("in,out\n", "in,out\n1,x\n", "in,out\n0,4\n", "in,out\n1\n"):
        file.write_text(text)
        with pytest.raises(MegakernelError, match=r"a\.csv"):
            length_pairs(file, 4, 10, 0)
    with pytest.raises(MegakernelError, match="cannot read workload"):
        length_pairs(tmp_path / "none.csv", 4, 10, 0)


def test_a_stream_is_measured() -> None:
    with running(FakeServer(delay_s=0.01)) as fake:
        [outcome] = send(fake, [(5, 6)])
    assert (outcome.error, outcome.prompt_tokens, outcome.outputs, len(outcome.moments)) == (None, 5, 6, 6)
    assert outcome.ttft is not None and outcome.tpot is not None
    assert outcome.start + 0.01 <= outcome.moments[0] < outcome.moments[-1] <= outcome.end
    assert outcome.tpot == pytest.approx((outcome.moments[5] - outcome.moments[0]) / 5)
    asked = {"prompt": [0, 1, 2, 3, 4], "max_tokens": 6, "ignore_eos": True, "temperature": 0, "model": fake.model}
    assert fake.requests[0].items() >= {**asked, "stream_options": {"include_usage": True}}.items()


def test_whole_answers() -> None:
    with running(FakeServer()) as fake:
        [outcome] = send(fake, [(5, 6)], stream=False)
    assert (outcome.outputs, outcome.ttft, outcome.tpot, outcome.error) == (6, None, None, None)
    assert "stream_options" not in fake.requests[0]


def test_an_answer_and_each_piece_of_it_are_signs_of_life() -> None:
    async def answered(url: str, stream: bool) -> int:
        server = ServerClient(url, api_key=None)
        await server.discover()
        await server.complete(jobs((5, 6))[0], stream=stream)
        await server.close()
        return server.received

    with running(FakeServer()) as fake:
        assert asyncio.run(answered(fake.url, False)) == 1 < asyncio.run(answered(fake.url, True))


@pytest.mark.parametrize(
    "fault, stream", [(503, True), ("cut", True), ("error", True), ("silent", True), (503, False), ("silent", False)]
)
def test_failures_are_outcomes(fault: int | str, stream: bool) -> None:
    with running(FakeServer(faults={3: fault})) as fake:
        good, bad, after = send(fake, [(2, 4), (3, 4), (4, 4)], max_concurrency=1, stream=stream)
    assert good.error is None and after.error is None
    assert bad.error and str(fault if isinstance(fault, int) else "") in bad.error
    figures = report([good, bad, after])
    counts = [figures[name] for name in ("completed", "failed", "output_tokens")]
    assert (counts, len(figures["errors"])) == ([2, 1, 8], 1)


def test_connections_are_kept_and_replaced() -> None:
    for answers, connections in ((10**9, 1), (2, 4)):  # 7 HTTP requests in total
        with running(FakeServer(close_after=answers)) as fake:
            assert all(o.error is None for o in send(fake, [(2, 2)] * 6, max_concurrency=1))
            assert len(fake.responses) == connections


def test_key_and_path() -> None:
    with running(FakeServer()) as fake:
        fake.url += "/prefix/v1/"
        send(fake, [(2, 2)], api_key="secret")
    assert "Authorization: Bearer secret" in fake.headers[-1] and fake.headers[-1].startswith("POST /prefix/v1/comp")


def test_ports_that_an_address_leaves_out() -> None:
    for url, port in (("https://host/v1", 443), ("host", 80), ("http://host:7", 7)):
        assert ServerClient(url)._port == port


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_an_outcome(monkeypatch: pytest.MonkeyPatch, name: str, stream: bool) -> None:
    monkeypatch.setattr(client, "_MOST_BYTES", 1 << 22)
    first, endless = HOSTILE[name]

    async def ask(url: str) -> Outcome:
        return await ServerClient(url, model="m").complete(jobs((3, 2))[0], stream=stream)

    with answering(first, endless=endless) as url:
        outcome = asyncio.run(ask(url))
    assert outcome.error and len(outcome.error) < 1000


def test_long_errors_of_a_server_are_cut() -> None:
    assert client.said({"message": "x" * 200}) == "x" * 200
    assert client.said("x" * 201) == "x" * 200 + "..."


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://127.0.0.1:1"])
def test_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(MegakernelError, match=r"is not an http|does not answer"):
        asyncio.run(ServerClient(url).discover())


def test_requests_in_flight_are_limited() -> None:
    with running(FakeServer(delay_s=0.002)) as fake:
        outcomes = send(fake, [(2, 4)] * 20, max_concurrency=3)
    assert (max(fake.at_once), len(outcomes), report(outcomes)["max_in_flight"]) == (3, 20, 3)


def test_arrivals_are_poisson() -> None:
    before = perf_counter()
    with running(FakeServer()) as fake:
        outcomes = send(fake, [(2, 2)] * 200, rate=400.0, seed=5)
    starts = np.array([o.start for o in outcomes]) - before
    assert np.all(starts > np.cumsum(np.random.default_rng(5).exponential(1 / 400, 200)) - 1e-3)  # none is sent early
    assert [r["prompt"] for r in fake.requests] == [[0, 1]] * 200


def outcome(start: float, moments: list[float], asked: int = 3) -> Outcome:
    return Outcome(jobs((10, asked))[0], start, moments[-1] + 0.5, array("d", moments))


def test_figures() -> None:
    figures = report([outcome(1.0, [2.0, 2.5, 3.5]), outcome(2.0, [2.5, 3.0, 3.5, 4.0])], {"ttft": 0.6, "tpot": 0.6})
    counts = {"tokens": 7, "input_tokens": 20, "total_tokens": 27, "requests": 2, "goodput": 1}
    assert {name: figures[f"{name}_per_s"] for name in counts} == {name: n / 3.5 for name, n in counts.items()}
    assert (figures["duration_s"], figures["short"], figures["max_in_flight"]) == (3.5, 1, 2)
    assert figures["ttft_s"] == {"mean": 0.75, "median": 0.75, "p99": pytest.approx(0.995)}
    assert figures["tpot_s"]["mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert figures["itl_s"]["median"] == 0.5 and figures["itl_s"]["mean"] == pytest.approx(3.0 / 5)
    assert figures["e2e_s"]["mean"] == pytest.approx((3.0 + 2.5) / 2)
    assert report([outcome(1.0, [2.0])])["goodput_per_s"] is None


def test_least_work_is_the_sum_of_its_steps() -> None:
    split = Split(CONFIG.sizes(Dtype.BF16))
    model, load = (passes.apply(forward(CONFIG), split), split), jobs((5, 4), (9, 2))
    steps = [step_work(*model, [n], [c], 1, tied=True) for n, c in ((5, 5), (9, 9), (1, 6), (1, 7), (1, 8), (1, 10))]
    one = least_work(*model, load, 1, tied=True)
    assert (one.flops, one.kv_bytes) == (sum(s.flops for s in steps), sum(s.kv_bytes for s in steps))
    assert one.weight_bytes == 6 * steps[-1].weight_bytes
    two = least_work(*model, load, 2, tied=True)  # with 2 requests at once, the longest answer takes 4 steps
    assert two.weight_bytes == 4 * steps[-1].weight_bytes


SIZES = ["--random-input-len", "8", "--random-output-len", "4"]
FLAGS = ["bench", "serve", "--num-prompts", "6", "--dataset", "random", *SIZES]


@pytest.mark.usefixtures("tiny_shape")
def test_bench_serve_json(cli: Cli) -> None:
    record = "megakernel:ceiling_bytes_per_second 1e12\nmegakernel:ceiling_flops_per_second 1e13"
    with (
        running(FakeServer(pages={"/version": {"version": "1"}})) as a,
        running(FakeServer(pages={"/metrics": record})) as b,
    ):
        flags = ["--base-url", a.url, "--vs", b.url, "--runs", "2", "--max-concurrency", "2", "--goodput", "ttft:5000"]
        figures = cli.json(*FLAGS, *flags)
    for key in ("tokens_per_s", "roofline_fraction", "read_GBps", "gflops", "goodput_per_s", "requests_per_s"):
        assert figures[key] > 0
    assert figures["step_s"] is None and figures["completed"] == 6 and figures["failed"] == figures["short"] == 0
    assert set(figures["ttft_s"]) == {"mean", "median", "p99"}
    peer = figures["vs"][b.url]
    assert peer["ratio"] > 0 and len(peer["runs"]) == len(figures["runs"]) == 2
    assert (peer["settings"]["model"], figures["settings"]["version"]) == ("random:tiny", "1") and max(a.at_once) <= 2
    assert [len(r["prompt"]) for r in a.requests] == [8] * (6 + 2 * 6)  # warm-up, then two runs of 6 requests
    assert len({tuple(r["prompt"]) for r in a.requests}) == 18


@pytest.mark.usefixtures("tiny_shape")
def test_servers_take_turns() -> None:
    asked: list[dict[str, Any]] = []

    async def taken(**urls: str) -> list[list[dict[str, Any]]]:
        servers = [ServerClient(url, model=name) for name, url in urls.items()]
        return await alternate(servers, Workload("w", jobs((2, 2))), Load(warm_up=0), 2)

    with running(FakeServer(requests=asked)) as a, running(FakeServer(requests=asked)) as b:
        figures = asyncio.run(taken(a=a.url, b=b.url))
    assert [one["model"] for one in asked] == ["a", "b", "a", "b"] and [len(each) for each in figures] == [2, 2]


@pytest.mark.usefixtures("tiny_shape")
def test_a_server_that_speculates_has_its_own_roofline_only(cli: Cli) -> None:
    class Recording(FakeServer):
        proposed, sums = 0, np.zeros(7)

        def completion(self, request: dict[str, Any]) -> Answer | None:
            self.sums = self.sums + np.array([2, 2.0, 1.0, 4, 2, self.proposed, 2])
            told = [f'{name}{{model_name="m"}} {value}' for name, value in zip(_STEPS, self.sums, strict=True)]
            ceilings = [f"megakernel:ceiling_{what}_per_second 1.0" for what in ("bytes", "flops")]
            self.pages["/metrics"] = "\n".join([*told, *ceilings, "nonsense x", "infinite inf"])
            return super().completion(request)

    def figures(proposed: int) -> tuple[dict[str, Any], str]:
        with running(Recording()) as fake:
            fake.proposed = proposed
            asyncio.run(ServerClient(fake.url, model="m").complete(jobs((2, 2))[0]))
            return cli.json(*FLAGS, "--base-url", fake.url), cli.run(*FLAGS, "--base-url", fake.url)[2]

    found, said = figures(3)
    steps = {"steps": 12, "step_s": 1.0, "roofline_fraction": 0.5}
    assert found["server"] == steps | {"proposed": 18, "accepted": 12, "tokens_per_step": 2.0}
    assert [found[name] for name in ("roofline_fraction", "read_GBps", "gflops")] == [None] * 3
    assert "generated 2.00 tokens per sequence" in said and "own steps reached 50% of the roofline" in said
    found, said = figures(0)
    assert found["roofline_fraction"] > 1 and "or the server generates several tokens per step" in said


def test_bound_counts_weights_as_the_file_stores_them(cli: Cli, smollm2: Path) -> None:
    with running(FakeServer()) as fake:
        flags = [*FLAGS, "--base-url", fake.url, "--machine", "h100"]
        stored, whole = (cli.json(*flags, "--model", m) for m in (str(smollm2), "random:smollm2-135m"))
    read = [one["read_GBps"] * one["duration_s"] for one in (stored, whole)]
    assert read[0] / read[1] == pytest.approx(96.4 / 269.0, rel=0.02)  # MB of weights, to which KV adds little


def test_bench_serve_failures(cli: Cli, tmp_path: Path, tiny_shape: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"conversations": [{"value": "a"}, {"value": "b"}]}]))
    with running(FakeServer(model="somebody/else")) as fake:
        known = [*FLAGS, "--base-url", fake.url, "--model", tiny_shape]
        assert "'somebody/else', whose sizes are unknown" in cli.fails(*FLAGS, "--base-url", fake.url)
        assert "unknown machine 'x'" in cli.fails(*known, "--machine", "x")
        read = ["bench", "serve", "--dataset", str(file), "--base-url", fake.url, "--model", tiny_shape]
        assert "no tokenizer" in cli.fails(*read)
    with running(FakeServer(faults={8: 500})) as fake:
        status, out, _ = cli.run(*FLAGS, "--base-url", fake.url)
        assert status == 1 and "6 failed" in out
    for flags in (["--goodput", "x:1"], ["--goodput", "ttft:0"], ["--request-rate", "0"], ["--request-rate", "x"]):
        assert cli.run(*FLAGS, *flags)[0] == 2


@pytest.mark.usefixtures("tiny_shape")
def test_a_run_has_the_processor_time_that_was_spent_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([{f'{CPU}engine"}}': 5.0}, {f'{CPU}engine"}}': 7.5, f'{CPU}frontend"}}': 1.0}])

    async def metrics(self: ServerClient) -> dict[str, float]:
        return next(said)

    monkeypatch.setattr(ServerClient, "metrics", metrics)

    async def measured(url: str) -> list[list[dict[str, Any]]]:
        return await alternate([ServerClient(url, model="m")], Workload("w", jobs((2, 2))), Load(warm_up=0), 1)

    with running(FakeServer(model="m")) as server:
        [[figures]] = asyncio.run(measured(server.url))
    assert (figures["cpu_s"]["engine"], figures["cpu_s"]["frontend"]) == (2.5, 1.0)


def test_a_client_that_was_the_limit_says_so() -> None:
    figures = cpu_time({"engine": 1.0, "client": 9.5}, tokens=1000, duration=10.0)
    assert figures["cpu_us_per_token"] == pytest.approx({"engine": 1000, "client": 9500})
    assert figures["client_busy"] == pytest.approx(0.95) and "bottleneck" in figures["client_error"]
    idle = cpu_time({"client": 2.0}, tokens=0, duration=5.0)
    assert idle["client_error"] is None and idle["cpu_us_per_token"] is None
