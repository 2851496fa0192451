"""Prometheus metrics, under the names that routers and dashboards made for vLLM read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..async_engine import AsyncEngine
from ..live import Live
from ..live_metrics import LiveCollector

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _Counted(Collector):
    """What the engine counts itself."""

    def __init__(self, engine: AsyncEngine, labels: dict[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, what, value in (
            ("num_preemptions", "sequences that gave up their pages and wait again", stats.preemptions),
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("prefix_cache_hits", "of them, those that it held", stats.prefix_hits),
        ):
            family = CounterMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


class Metrics:
    """One server's own registry: several servers may live in one process."""

    def __init__(self, engine: AsyncEngine, live: Live, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(LiveCollector(live))
        labels = {"model_name": model, "engine": "0"}

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"vllm:{name}", what, labels, registry=self.registry).labels(**labels)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, labels, registry=self.registry).labels(**labels)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, labels, registry=self.registry, buckets=buckets)
            return made.labels(**labels)

        gauge("num_requests_running", "sequences in the batch").set_function(lambda: engine.stats.running)
        gauge("num_requests_waiting", "sequences that wait for their first step").set_function(lambda: engine.waiting)
        gauge("kv_cache_usage_perc", "share of the KV pages in use, 0 to 1").set_function(
            lambda: engine.stats.pages_used / engine.stats.pages
        )
        cache = {**labels, "block_size": str(engine.engine.dims.page), "num_gpu_blocks": str(engine.stats.pages)}
        Gauge("vllm:cache_config_info", "size of the KV cache", cache, registry=self.registry).labels(**cache).set(1)
        self.registry.register(_Counted(engine, labels))
        self._prompt_tokens = counter("prompt_tokens", "prompt tokens accepted")
        self._generated = counter("generation_tokens", "tokens generated")
        self._success = Counter(
            "vllm:request_success", "choices finished", [*labels, "finished_reason"], registry=self.registry
        )
        self._labels = labels
        self._ttft = histogram("time_to_first_token_seconds", "from arrival to the first token", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "between tokens of a choice", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "from arrival to a choice's end", _SECONDS)
        self._prompt_length = histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._output_length = histogram("request_generation_tokens", "tokens of a choice", _TOKENS)

    def prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            self._prompt_tokens.inc(len(prompt))
            self._prompt_length.observe(len(prompt))

    def first_token(self, seconds: float) -> None:
        self._generated.inc()
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._generated.inc()
        self._itl.observe(seconds)

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._e2e.observe(seconds)
        self._output_length.observe(tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
