"""The record of steps as Prometheus metrics; the quotient of two rates is the roofline fraction of any time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .live import Live


class LiveCollector(Collector):
    """Reads `live` when it is asked."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        totals, ceilings = self._live.totals(), self._live.ceilings
        for name, value, what in (
            ("steps", totals.steps, "steps run"),
            ("step_seconds", totals.wall_s, "wall time of steps"),
            ("step_bound_seconds", totals.bound_s, "least time of those steps at the measured ceilings"),
            ("flops", totals.flops, "necessary FLOPs of steps"),
            ("bytes", totals.bytes, "necessary bytes of steps, weights and KV"),
            ("token_rows", totals.rows, "token rows computed, prompts included"),
        ):
            yield CounterMetricFamily(f"megakernel:{name}", what, value=value)
        for name, value, what in (
            ("ceiling_flops_per_second", ceilings.flops, "multiply-adds that this machine does, as FLOPs"),
            ("ceiling_bytes_per_second", ceilings.read_bytes_per_s, "bytes that this machine reads"),
        ):
            yield GaugeMetricFamily(f"megakernel:{name}", what, value=value)
