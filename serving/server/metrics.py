"""Prometheus metrics, with the names that routers and dashboards for vLLM expect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megakernel.serving.engine.scheduler import Counts
from megakernel.serving.server.board import ENGINE_FIELDS, Board

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time from the request's arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("time between two tokens of a choice", _SECONDS),
    "e2e_request_latency_seconds": ("time from the request's arrival to the end of a choice", _SECONDS),
    "request_prompt_tokens": ("tokens per prompt", _TOKENS),
    "request_generation_tokens": ("generated tokens per choice", _TOKENS),
}
_REASONS = ("stop", "length")
# The fields of a frontend's row on the board (the counters in shared memory), each with its length in numbers. The
# field of a histogram has the sum of the observed values, followed by one count per bucket. The last bucket is +Inf.
_FIELDS = [(name, 1) for name in ("cpu_s", "prompt_tokens", "generation_tokens", *_REASONS)]
_FIELDS += [(name, len(bounds) + 2) for name, (_, bounds) in _HISTOGRAMS.items()]


class Metrics(Collector):
    """Counts the requests of one frontend in row `number` of the board, and reports the sums over all frontends.

    The board holds counters in memory that all processes of the server share. Only the event loop of the frontend may
    call the methods.
    """

    def __init__(self, board: Board, number: int, *, kv_page: int, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.row = board.row(number, _FIELDS)
        self._generated, self._itl = self.row.at["generation_tokens"], self.row.at["inter_token_latency_seconds"]
        self._engine = board.row(0, ENGINE_FIELDS)
        self._rows = [board.row(i, _FIELDS) for i in range(1, board.rows)]
        self._kv_page = kv_page
        self._labels = {"model_name": model, "engine": "0"}

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            self._add("prompt_tokens", len(prompt))
            self._observe("request_prompt_tokens", len(prompt))

    def first_token(self, seconds: float) -> None:
        self._add("generation_tokens", 1)
        self._observe("time_to_first_token_seconds", seconds)

    def next_token(self, seconds: float) -> None:
        # This method is called for each token. So the code of `_add` and `_observe` is repeated here instead of calling
        # them.
        numbers, at = self.row.numbers, self._itl
        numbers[self._generated] += 1
        numbers[at] += seconds
        numbers[at + 1 + bisect_left(_SECONDS, seconds)] += 1

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        self._add(reason, 1)
        self._observe("e2e_request_latency_seconds", seconds)
        self._observe("request_generation_tokens", tokens)

    def _add(self, name: str, value: float) -> None:
        self.row.numbers[self.row.at[name]] += value

    def _observe(self, name: str, value: float) -> None:
        numbers, at = self.row.numbers, self.row.at[name]
        numbers[at] += value
        numbers[at + 1 + bisect_left(_HISTOGRAMS[name][1], value)] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics for one request of Prometheus."""
        self.row.count_cpu()
        engine = self._engine.get
        names, values = list(self._labels), list(self._labels.values())
        for name, what, value in (
            ("num_requests_running", "sequences in the batch", engine("running")),
            ("num_requests_waiting", "sequences that wait for their first step", engine("waiting")),
            ("kv_cache_usage_perc", "part of the KV pages in use, 0 to 1", engine("pages_used") / engine("pages")),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        what = "average tokens per step and sequence since the start"
        gauge = GaugeMetricFamily("megakernel:tokens_per_step", what, labels=names)
        gauge.add_metric(values, Counts(int(engine("generated")), int(engine("turns"))).tokens_per_step)
        yield gauge
        cache = {"block_size": str(self._kv_page), "num_gpu_blocks": str(int(engine("pages")))}
        info = GaugeMetricFamily("vllm:cache_config_info", "size of the KV cache", labels=[*names, *cache])
        info.add_metric([*values, *cache.values()], 1)
        yield info
        for name, what, value in (
            ("prompt_tokens", "prompt tokens accepted", self._total("prompt_tokens")),
            ("generation_tokens", "tokens generated", self._total("generation_tokens")),
            ("num_preemptions", "preemptions: a sequence gave up its KV pages and waits again", engine("preemptions")),
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", engine("prefix_queries")),
            ("prefix_cache_hits", "prompt tokens found in the prefix cache", engine("prefix_hits")),
            ("spec_decode_num_draft_tokens", "proposed tokens that steps verified", engine("proposed")),
            ("spec_decode_num_accepted_tokens", "proposed tokens that were accepted", engine("accepted")),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", what, labels=names)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "choices finished", labels=[*names, "finished_reason"])
        for reason in _REASONS:
            success.add_metric([*values, reason], self._total(reason))
        yield success
        for name, (what, bounds) in _HISTOGRAMS.items():
            yield self._histogram(name, what, bounds)
        # These are totals over all steps. step_bound_seconds is the least time that the roofline permits. So
        # rate(step_bound_seconds) / rate(step_seconds) is the fraction of the roofline reached in a period.
        for name, what, value in (
            ("steps", "steps run", engine("steps")),
            ("step_seconds", "wall time of steps", engine("wall_s")),
            ("step_bound_seconds", "least time of those steps at the measured ceilings", engine("bound_s")),
            ("flops", "necessary FLOPs of steps", engine("flops")),
            ("bytes", "necessary bytes of steps, weights and KV", engine("bytes")),
            ("token_rows", "token rows computed, prompts included", engine("rows")),
        ):
            yield CounterMetricFamily(f"megakernel:{name}", what, value=value)
        cpu = CounterMetricFamily("megakernel:cpu_seconds", "CPU time of the processes", labels=["process"])
        cpu.add_metric(["engine"], engine("cpu_s"))
        cpu.add_metric(["frontends"], self._total("cpu_s"))
        yield cpu
        for name, what, value in (
            (
                "ceiling_flops_per_second",
                "measured peak FLOP/s of the machine's multiply-adds",
                engine("ceiling_flops"),
            ),
            ("ceiling_bytes_per_second", "measured peak memory read bandwidth of the machine", engine("ceiling_bytes")),
        ):
            yield GaugeMetricFamily(f"megakernel:{name}", what, value=value)

    def _total(self, name: str) -> float:
        return sum(row.get(name) for row in self._rows)

    def _histogram(self, name: str, what: str, bounds: Sequence[float]) -> HistogramMetricFamily:
        at, width = self.row.at[name], len(bounds) + 2
        total, *counts = (
            sum(column) for column in zip(*(row.numbers[at : at + width] for row in self._rows), strict=True)
        )
        ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family = HistogramMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        buckets = list(zip(ends, accumulate(counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family
