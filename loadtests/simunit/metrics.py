"""The unit's `/metrics`, under the names of vLLM 0.3x that a gate reads.

Counts live in the engine as plain numbers and are read at scrape time; only histograms are fed.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtests.simunit.engine import Engine
from loadtests.simunit.text import BLOCK_TOKENS

_LABELS = ("model_name", "engine")
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TTFT_S = (0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


class Metrics:
    """The registry of one unit."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(engine, model))
        step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed per engine step.", _STEP_TOKENS
        )
        ttft_s = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        e2e_s = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _E2E_S)
        self.step_tokens = step_tokens.labels(model, "0")
        self.ttft_s = ttft_s.labels(model, "0")
        self.e2e_s = e2e_s.labels(model, "0")

    def render(self) -> bytes:
        """The Prometheus text page."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", about, _LABELS, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's queues, cache and counts."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        engine, counts, moved = self._engine, self._engine.counts, self._engine.moved
        labels = [self._model, "0"]
        for name, about, gauge in (
            ("num_requests_running", "Requests in the running batch.", len(engine.running)),
            (
                "num_requests_waiting",
                "Requests waiting to be scheduled, or for KV blocks of another unit.",
                len(engine.waiting) + moved.fetching,
            ),
            (
                "kv_cache_usage_perc",
                "Share of KV blocks in use, 0 to 1.",
                engine.pool.used / engine.pool.num_blocks,
            ),
            ("nixl_num_held_reqs", "Prompts whose blocks are held for another unit.", moved.held),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            family.add_metric(labels, gauge)
            yield family
        for name, about, count in (
            ("prompt_tokens", "Prompt tokens prefilled, cached ones included.", counts.prompt_tokens),
            ("generation_tokens", "Tokens generated.", counts.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts.prefix_hits),
            ("num_preemptions", "Sequences sent back to the queue for lack of blocks.", counts.preemptions),
            ("nixl_num_failed_transfers", "Blocks that did not arrive.", moved.failed),
            ("nixl_num_kv_expired_reqs", "Prompts whose blocks nobody has fetched in time.", moved.expired),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            counter.add_metric(labels, count)
            yield counter
        yield self._sources()
        yield self._finished()
        yield self._cache_config()

    def _sources(self) -> Metric:
        counts, fetched = self._engine.counts, self._engine.moved.fetched_tokens
        labels = [*_LABELS, "source"]
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Where prompts came from.", labels=labels
        )
        for source, tokens in (
            ("local_compute", counts.prefix_queries - counts.prefix_hits - fetched),
            ("local_cache_hit", counts.prefix_hits),
            ("external_kv_transfer", fetched),
        ):
            family.add_metric([self._model, "0", source], tokens)
        return family

    def _finished(self) -> Metric:
        labels = [*_LABELS, "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Requests that finished.", labels=labels)
        for reason, count in self._engine.counts.ended.items():
            family.add_metric([self._model, "0", reason], count)
        return family

    def _cache_config(self) -> Metric:
        labels = ("block_size", "num_gpu_blocks", "engine")
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=labels)
        family.add_metric([str(BLOCK_TOKENS), str(self._engine.pool.num_blocks), "0"], 1)
        return family
