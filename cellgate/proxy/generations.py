"""Watches requests that ask for a generation, and tells how long each took, for proxy/observe/gen_ai.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.ports import Generated, Observer
from cellgate.proxy.request.routes import find_route
from cellgate.router.nouns import Outcome

if TYPE_CHECKING:
    from cellgate.proxy.gateway import Gateway, Observe
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.observe.access_log import Finished
    from cellgate.proxy.request.ports import Reports
    from cellgate.router.cost_model import Usage
    from cellgate.router.unit_state import Lease

OPERATIONS = {
    "chat": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "messages": "chat",
    "responses": "chat",
}
"""Routes that are a gen_ai.operation.name."""
GATE = "cellgate"
"""Who answered where no unit of a known engine did."""


class Generations:
    """Of one gate, or one of its workers."""

    def __init__(self, gateway: Gateway) -> None:
        self._reports = gateway.services.reports
        self._others: Observe | None = gateway.observe

    def observers(self, client: ResponseClient, request: Request, now: float) -> tuple[Observer, ...]:
        """The observers of `request`: those that it has, and its generation, if it asks for one."""
        others = () if self._others is None else self._others(client, request, now)
        operation = OPERATIONS.get(find_route(request.path).name)
        return others if operation is None else (*others, Generation(operation, self._reports))


def watch(gateway: Gateway) -> None:
    """Tell of its requests from now on."""
    gateway.observe = Generations(gateway).observers


class Generation(Observer):
    """One of them."""

    __slots__ = ("_engine", "_is_stream", "_model", "_operation", "_reports", "_tokens")

    def __init__(self, operation: str, reports: Reports) -> None:
        self._operation = operation
        self._reports = reports
        self._engine, self._model, self._is_stream, self._tokens = GATE, "", False, 0

    def attempted(self, lease: Lease, _before: int) -> None:
        """An attempt on a unit begins. What no unit lists is a client's word, and names no series."""
        state, model = lease.unit_state, lease.ask.model or ""
        self._engine = state.engine or GATE
        self._model = model if model in state.models else ""
        self._is_stream = lease.ask.stream

    def completed(self, usage: Usage | None) -> None:
        self._tokens = 0 if usage is None else usage.answer_tokens

    def over(self, record: Finished, _at: float) -> None:
        """The response has ended. Of an answer in one piece nobody knows when its first token was there."""
        error = "" if record.outcome is Outcome.OK else record.code or str(record.status)
        first_s = record.ttft_s if self._is_stream else None
        each_s = None
        if first_s is not None and self._tokens > 1:
            each_s = (record.duration_s - first_s) / (self._tokens - 1)
        about = self._operation, self._engine, self._model, error
        self._reports.send(Generated(*about, record.duration_s, first_s, each_s))
