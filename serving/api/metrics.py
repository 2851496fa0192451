"""Prometheus metrics, under the names that routers and dashboards made for vLLM read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..async_engine import AsyncEngine
from ..live import Live

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _Histogram:
    """Counts of values up to each of `bounds`, for one thread: the client library's own locks once per token."""

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self.name, self.what, self.bounds = name, what, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        family = HistogramMetricFamily(f"vllm:{self.name}", self.what, labels=list(labels))
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class Metrics(Collector):
    """What one server counts; told and read on its event loop alone."""

    def __init__(self, engine: AsyncEngine, live: Live, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._engine, self._live = engine, live
        self._labels = {"model_name": model, "engine": "0"}
        self._prompt_tokens = self._generated = 0
        self._finished: Counter[str] = Counter()
        self._ttft = _Histogram("time_to_first_token_seconds", "from arrival to the first token", _SECONDS)
        self._itl = _Histogram("inter_token_latency_seconds", "between tokens of a choice", _SECONDS)
        self._e2e = _Histogram("e2e_request_latency_seconds", "from arrival to a choice's end", _SECONDS)
        self._prompt_length = _Histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._output_length = _Histogram("request_generation_tokens", "tokens of a choice", _TOKENS)

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            self._prompt_tokens += len(prompt)
            self._prompt_length.observe(len(prompt))

    def first_token(self, seconds: float) -> None:
        self._generated += 1
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._generated += 1
        self._itl.observe(seconds)

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        self._finished[reason] += 1
        self._e2e.observe(seconds)
        self._output_length.observe(tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What a scrape reads."""
        engine, stats = self._engine, self._engine.stats
        names, values = list(self._labels), list(self._labels.values())
        for name, what, value in (
            ("num_requests_running", "sequences in the batch", stats.running),
            ("num_requests_waiting", "sequences that wait for their first step", engine.waiting),
            ("kv_cache_usage_perc", "share of the KV pages in use, 0 to 1", stats.pages_used / stats.pages),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        what = "tokens that a step gives a sequence, on average since the start"
        gauge = GaugeMetricFamily("megakernel:tokens_per_step", what, labels=names)
        gauge.add_metric(values, stats.counts.tokens_per_step)
        yield gauge
        cache = {"block_size": str(engine.engine.dims.kv_page), "num_gpu_blocks": str(stats.pages)}
        info = GaugeMetricFamily("vllm:cache_config_info", "size of the KV cache", labels=[*names, *cache])
        info.add_metric([*values, *cache.values()], 1)
        yield info
        for name, what, value in (
            ("prompt_tokens", "prompt tokens accepted", self._prompt_tokens),
            ("generation_tokens", "tokens generated", self._generated),
            ("num_preemptions", "sequences that gave up their pages and wait again", stats.preemptions),
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("prefix_cache_hits", "of them, those that it held", stats.prefix_hits),
            ("spec_decode_num_draft_tokens", "proposed tokens that steps verified", stats.counts.proposed),
            ("spec_decode_num_accepted_tokens", "of them, those that were right", stats.counts.accepted),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", what, labels=names)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "choices finished", labels=[*names, "finished_reason"])
        for reason in ("stop", "length"):
            success.add_metric([*values, reason], self._finished[reason])
        yield success
        for histogram in (self._ttft, self._itl, self._e2e, self._prompt_length, self._output_length):
            yield histogram.family(self._labels)
        # The record of steps: the quotient of two rates is the roofline fraction of any time.
        totals, ceilings = self._live.totals(), self._live.ceilings
        for name, what, value in (
            ("steps", "steps run", totals.steps),
            ("step_seconds", "wall time of steps", totals.wall_s),
            ("step_bound_seconds", "least time of those steps at the measured ceilings", totals.bound_s),
            ("flops", "necessary FLOPs of steps", totals.flops),
            ("bytes", "necessary bytes of steps, weights and KV", totals.bytes),
            ("token_rows", "token rows computed, prompts included", totals.rows),
        ):
            yield CounterMetricFamily(f"megakernel:{name}", what, value=value)
        for name, what, value in (
            ("ceiling_flops_per_second", "multiply-adds that this machine does, as FLOPs", ceilings.flops),
            ("ceiling_bytes_per_second", "bytes that this machine reads", ceilings.read_bytes_per_s),
        ):
            yield GaugeMetricFamily(f"megakernel:{name}", what, value=value)
