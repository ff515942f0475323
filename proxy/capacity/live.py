"""How large the KV cache of a running unit is, as its engine says on /metrics."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0
_MAX_BYTES = 8 << 20
_INFOS = {
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "sglang:cache_config_info": ("page_size", "num_pages"),
}
"""By engine: the metric whose labels tell the tokens of a block, and how many blocks there are."""


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
    found = [
        (int(sample.labels[block]), int(sample.labels[blocks]))
        for family in families
        if family.name in _INFOS
        for block, blocks in [_INFOS[family.name]]
        for sample in family.samples
        if sample.labels.get(block, "").isdigit() and sample.labels.get(blocks, "").isdigit()
    ]
    if not found:
        raise LiveError(f"{where} has none of {', '.join(_INFOS)} with the size of the KV cache")
    return LiveCache(found[0][0], sum(blocks for _, blocks in found), len(found))
