"""How large the KV cache of a running unit is, as its engine says on /metrics."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 5.0
_MAX_BYTES = 8 << 20
_INFO, _LABELS = "vllm:cache_config_info", ("block_size", "num_gpu_blocks")
"""Of vLLM: the metric whose labels tell the tokens of a block, and how many blocks there are."""
_GAUGES = ("sglang:page_size", "sglang:num_pages")
"""Of SGLang (0.5.23): the gauges that tell the same, for each data parallel rank."""


class LiveError(Exception):
    """The unit did not report it. `str()` is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class LiveCache:
    """`engines` is how many told of theirs: a unit that is data parallel has several."""

    block: int
    blocks: int
    engines: int

    @property
    def tokens(self) -> int:
        """All together."""
        return self.block * self.blocks


def ask_cache(url: str) -> LiveCache:
    """Ask a unit's engine. Raises LiveError."""
    metrics = f"{url.rstrip('/')}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics, timeout=TIMEOUT_S) as response:
            page = response.read(_MAX_BYTES).decode(errors="replace")
        return read_cache(text_string_to_metric_families(page), metrics)
    except urllib.error.HTTPError as error:
        error.close()
        raise LiveError(f"{metrics} answers {error.code}: give the URL of the unit's own API") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise LiveError(f"nothing answers at {metrics} ({reason}): does the unit run?") from None
    except ValueError as error:
        raise LiveError(f"{metrics} is not a page of Prometheus metrics ({error})") from None


def read_cache(families: Iterable[Metric], where: str) -> LiveCache:
    """Parse a page of metrics. Raises LiveError."""
    samples = defaultdict[str, list[Sample]](list)
    for family in families:
        samples[family.name] += family.samples
    found = [
        (int(sample.labels[_LABELS[0]]), int(sample.labels[_LABELS[1]]))
        for sample in samples[_INFO]
        if all(sample.labels.get(label, "").isdigit() for label in _LABELS)
    ] or _ranks(*(samples[gauge] for gauge in _GAUGES))
    if not found:
        names = ", ".join((_INFO, *_GAUGES))
        raise LiveError(f"{where} has none of {names} with the size of the KV cache")
    return LiveCache(found[0][0], sum(blocks for _, blocks in found), len(found))


def _ranks(sizes: Iterable[Sample], counts: Iterable[Sample]) -> list[tuple[int, int]]:
    """The tokens of a block, and the blocks, of each data parallel rank. Its other ranks share their work."""
    by_rank = (
        {sample.labels.get("dp_rank"): int(sample.value) for sample in each} for each in (sizes, counts)
    )
    size, count = by_rank
    return [(size[rank], count[rank]) for rank in size if rank in count]
