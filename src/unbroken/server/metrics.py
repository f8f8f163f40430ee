"""Prometheus metrics: requests, ids, queue, latency, and all I8 counters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from unbroken.counters import Counters

_LATENCIES_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.events = Counters()
        """I8 counters, exported as `unbroken_events_total{event=...}`."""
        self.requests = Counter(
            "unbroken_requests", "HTTP requests answered", ["route", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "unbroken_request_seconds",
            "Seconds to the end of the answer",
            ["route"],
            buckets=_LATENCIES_S,
            registry=self.registry,
        )
        self.prompt_ids = Counter("unbroken_prompt_ids", "Prompt ids sent to the engine", registry=self.registry)
        self.sampled_ids = Counter("unbroken_sampled_ids", "Ids sampled", registry=self.registry)
        self.finished = Counter(
            "unbroken_completions", "Completions finished", ["finish_reason"], registry=self.registry
        )
        self.in_flight = Gauge(
            "unbroken_completions_in_flight", "Completions sampled or queued", registry=self.registry
        )
        self.aborted_by_client = Counter(
            "unbroken_requests_aborted_by_client", "Requests of clients that left", registry=self.registry
        )
        self.refused_busy = Counter("unbroken_requests_refused_busy", "429 answers", registry=self.registry)
        self.repeated = Counter(
            "unbroken_requests_repeated", "Retries answered without sampling again", registry=self.registry
        )
        self.policy_version = Gauge("unbroken_policy_version", "Version of the weights in use", registry=self.registry)
        self.registry.register(_Events(self.events))

    def to_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Events(Collector):
    """Exports `Counters` to Prometheus."""

    def __init__(self, events: Counters) -> None:
        self._events = events

    def collect(self) -> list[CounterMetricFamily]:
        family = CounterMetricFamily("unbroken_events", "Events by kind and reason (I8)", labels=["event"])
        for event, count in self._events.as_dict().items():
            family.add_metric([event], count)
        return [family]
