"""What keys and limits count, as Prometheus metric families. Labels are names of the file of keys, and
models of the configuration; nothing that a client can choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.metrics.families import counter, gauge

OTHER = ""
"""The label of models that no configuration names."""


class DoorCounts(Collector):
    """Counts in plain numbers. `models` gives the models of the configuration."""

    def __init__(self, models: Callable[[], frozenset[str]]) -> None:
        self._models = models
        self._used: dict[tuple[str, str], list[int]] = {}
        """Tokens of prompts and of answers, by tenant and by the model of an answer: only what units serve.
        """
        self._refused: Counter[tuple[str, str]] = Counter()
        self.keys = 0
        """In the file that holds."""
        self.reads_refused = 0
        """Files of keys that were refused, so that the old keys hold."""
        self.is_stale = False
        """Whether the present file is one of them."""
        self.shares: bool | None = None
        """Whether limits are shared with other gates now; None: they never are."""
        self.lines_lost: Callable[[], int] = int

    def used(self, bill: Bill) -> None:
        """A request is over."""
        if bill.prompt_tokens:
            tokens = self._used.get((bill.tenant, bill.model)) or self._used.setdefault(
                (bill.tenant, bill.model), [0, 0]
            )
            tokens[0] += bill.prompt_tokens
            tokens[1] += bill.completion_tokens

    def refused(self, tenant: str, limit: str) -> None:
        """A limit was reached."""
        self._refused[tenant, limit] += 1

    def collect(self) -> Iterator[Metric]:
        """All families."""
        labels, known = ("tenant", "model"), self._models()
        prompt, completion = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for (tenant, model), tokens in self._used.items():
            label = tenant, model if model in known else OTHER
            prompt[label] += tokens[0]
            completion[label] += tokens[1]
        yield counter(
            "tenant_prompt_tokens",
            "Tokens of prompts, by tenant and configured model.",
            labels,
            prompt.items(),
        )
        yield counter(
            "tenant_completion_tokens",
            "Tokens of answers, by tenant and configured model.",
            labels,
            completion.items(),
        )
        yield counter(
            "limited_requests",
            "Requests that were refused because of a limit, by tenant and limit.",
            ("tenant", "limit"),
            self._refused.items(),
        )
        yield gauge("keys", "Keys that clients may show.", (), [((), self.keys)])
        yield counter(
            "key_files_refused",
            "Files of keys that have a mistake: the old keys hold.",
            (),
            [((), self.reads_refused)],
        )
        yield gauge(
            "key_file_refused", "1 while the present file of keys has a mistake.", (), [((), self.is_stale)]
        )
        if self.shares is not None:
            yield gauge(
                "limits_shared",
                "1: gates share their limits. 0: Redis does not answer, and each gate counts alone.",
                (),
                [((), self.shares)],
            )
        yield counter(
            "usage_lines_lost",
            "Lines that the usage log has lost, because its file takes none.",
            (),
            [((), self.lines_lost())],
        )
