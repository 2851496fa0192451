"""Prometheus metrics, with the names that routers and dashboards for vLLM expect. The counters are in shared memory
(see `Board`), because /health reads the engine's numbers too. Besides, prometheus_client's multiprocess mode takes
seven times as long to count a token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megakernel.serving.engine.sampling import TokenIds
from megakernel.serving.server.board import ENGINE_FIELDS, Board

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
# Upper bounds, in seconds, of the histogram buckets for the phases of a request: those of vLLM, and smaller ones.
_PHASE = (1e-3, 0.01, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time from the request's arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("time between two tokens of a choice", _SECONDS),
    "e2e_request_latency_seconds": ("time from the request's arrival to the end of a choice", _SECONDS),
    "request_queue_time_seconds": ("time from the request's arrival to a choice's admission", _PHASE),
    "request_prefill_time_seconds": ("time from a choice's admission to its first token", _PHASE),
    "request_decode_time_seconds": ("time from a choice's first token to its last", _PHASE),
    "request_inference_time_seconds": ("time from a choice's admission to its last token", _PHASE),
    "request_prompt_tokens": ("tokens per prompt", _TOKENS),
    "request_generation_tokens": ("generated tokens per choice", _TOKENS),
}
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
# Each metric that is a single number: its type, name, meaning, and its key in `Metrics.collect`. The fraction of the
# roofline reached in a period is rate(step_bound_seconds) / rate(step_seconds).
_NUMBERS: tuple[tuple[_Kind, str, str, str], ...] = (
    (_GAUGE, "vllm:num_requests_running", "sequences in the batch", "running"),
    (_GAUGE, "vllm:num_requests_waiting", "sequences that wait for their first step", "waiting"),
    (_GAUGE, "vllm:kv_cache_usage_perc", "part of the KV pages in use, 0 to 1", "usage"),
    (_COUNTER, "vllm:prompt_tokens", "prompt tokens accepted", "prompt_tokens"),
    (_COUNTER, "vllm:generation_tokens", "tokens generated", "generation_tokens"),
    (_COUNTER, "vllm:num_preemptions", "preemptions: a sequence gave up its KV pages and waits again", "preemptions"),
    (_COUNTER, "vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache", "prefix_queries"),
    (_COUNTER, "vllm:prefix_cache_hits", "prompt tokens found in the prefix cache", "prefix_hits"),
    (_COUNTER, "vllm:spec_decode_num_draft_tokens", "proposed tokens that steps verified", "proposed"),
    (_COUNTER, "vllm:spec_decode_num_accepted_tokens", "proposed tokens that were accepted", "accepted"),
    (_COUNTER, "megakernel:steps", "steps run", "steps"),
    (_COUNTER, "megakernel:step_sequences", "sequences that got tokens, summed over steps", "turns"),
    (_COUNTER, "megakernel:step_seconds", "wall time of steps", "wall_s"),
    (_COUNTER, "megakernel:step_bound_seconds", "least time of those steps at the measured ceilings", "bound_s"),
    (_COUNTER, "megakernel:flops", "necessary FLOPs of steps", "flops"),
    (_COUNTER, "megakernel:bytes", "necessary bytes of steps, weights and KV", "bytes"),
    (_COUNTER, "megakernel:token_rows", "token rows computed, prompts included", "rows"),
    (_GAUGE, "megakernel:ceiling_flops_per_second", "measured peak FLOP/s of multiply-adds", "ceiling_flops"),
    (_GAUGE, "megakernel:ceiling_bytes_per_second", "measured peak memory read bandwidth", "ceiling_bytes"),
)
_REASONS = ("stop", "length", "abort")
# The fields of a frontend's row of counters, each with the number of values that it takes. The field of a histogram has
# the sum of the observed values, followed by one count per bucket. The last bucket is +Inf.
_FIELDS = [(name, 1) for name in ("cpu_s", "prompt_tokens", "generation_tokens", *_REASONS)]
_FIELDS += [(name, len(bounds) + 2) for name, (_, bounds) in _HISTOGRAMS.items()]


class Metrics(Collector):
    """Counts the requests of one frontend in row `number` of the board, and reports the sums over all frontends. All
    processes of the server share the memory of the board. Only the event loop of the frontend may call the methods."""

    def __init__(self, board: Board, number: int, *, kv_page: int, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.row = board.row(number, _FIELDS)
        self._engine = board.row(0, ENGINE_FIELDS)
        self._rows = [board.row(i, _FIELDS) for i in range(1, board.rows)]
        self._kv_page = kv_page
        self._labels = {"model_name": model, "engine": "0"}

    def prompts(self, prompts: Sequence[TokenIds]) -> None:
        for prompt in prompts:
            self._add("prompt_tokens", len(prompt))
            self._observe("request_prompt_tokens", len(prompt))

    def token(self, at: float, before: float, arrived: float) -> None:
        """Count a token that was generated at the time `at`. `before` is the time of the choice's previous token, or 0
        if there is none. `arrived` is the time of the request's arrival."""
        self._add("generation_tokens", 1)
        name = "inter_token_latency_seconds" if before else "time_to_first_token_seconds"
        self._observe(name, at - (before or arrived))

    def finished(self, reason: str, tokens: int, arrived: float, admitted: float, first: float, last: float) -> None:
        """Count a finished choice. The times are those of its arrival, its admission, and its first and last token."""
        self._add(reason, 1)
        self._observe("e2e_request_latency_seconds", last - arrived)
        self._observe("request_queue_time_seconds", admitted - arrived)
        self._observe("request_prefill_time_seconds", first - admitted)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("request_inference_time_seconds", last - admitted)
        self._observe("request_generation_tokens", tokens)

    def aborted(self, choices: int) -> None:
        """Count choices that did not finish, because the client left or an error occurred."""
        self._add("abort", choices)

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
        numbers = {name: engine(name) for name, _ in ENGINE_FIELDS}
        numbers |= {name: self._total(name) for name in ("prompt_tokens", "generation_tokens")}
        numbers["usage"] = engine("pages_used") / engine("pages")
        for kind, name, what, field in _NUMBERS:
            yield _metric(kind, name, what, (self._labels if name.startswith("vllm:") else {}, numbers[field]))
        cache = {"block_size": str(self._kv_page), "num_gpu_blocks": str(int(engine("pages")))}
        yield _metric(_GAUGE, "vllm:cache_config_info", "size of the KV cache", (self._labels | cache, 1))
        ends = [(self._labels | {"finished_reason": reason}, self._total(reason)) for reason in _REASONS]
        yield _metric(_COUNTER, "vllm:request_success", "choices finished", *ends)
        cpu = [({"process": "engine"}, engine("cpu_s")), ({"process": "frontends"}, self._total("cpu_s"))]
        yield _metric(_COUNTER, "megakernel:cpu_seconds", "CPU time of the processes", *cpu)
        for name, (what, bounds) in _HISTOGRAMS.items():
            yield self._histogram(name, what, bounds)

    def _total(self, name: str) -> float:
        return sum(row.get(name) for row in self._rows)

    def _histogram(self, name: str, what: str, bounds: Sequence[float]) -> Metric:
        at, width = self.row.at[name], len(bounds) + 2
        total, *counts = map(sum, zip(*(row.numbers[at : at + width] for row in self._rows), strict=True))
        family = HistogramMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family


def _metric(kind: _Kind, name: str, what: str, *values: tuple[Mapping[str, str], float]) -> Metric:
    """Return the metric called `name`. Each of `values` is a pair: labels, and the number that has these labels."""
    metric = kind(name, what, labels=[*values[0][0]])
    for labels, value in values:
        metric.add_metric([*labels.values()], value)
    return metric
