"""The answer to a client that is back for a stream which is not here any more."""

from __future__ import annotations

from cellgate.proxy.request.response import Response
from cellgate.proxy.request.response_host import ResponseHost
from cellgate.proxy.request.routes import find_route
from cellgate.proxy.wire.client import ResponseClient
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.request import Request


def gone(resume_s: float) -> Failure:
    """The stream that was asked for is not here. Why is not said: whoever guesses learns nothing."""
    if not resume_s:
        return Failure(FailureKind.STREAM_GONE, "this gate keeps no streams for clients that come back")
    reason = (
        "this gate does not have the rest of that stream: its client was away for more than "
        f"{resume_s:g} s, or too far behind; or another gate has it, or had; or the path or the credentials "
        "are not those of its request. Send the request again without Last-Event-ID"
    )
    return Failure(FailureKind.STREAM_GONE, reason)


class Refused:
    """An exchange that gives an error."""

    def __init__(
        self, host: ResponseHost, client: ResponseClient, request: Request, failure: Failure
    ) -> None:
        self._host = host
        self._client = client
        self._request = request
        self._failure = failure

    def start(self) -> None:
        route = find_route(self._request.path).name
        Response(self._host, self._client, self._request, route).refuse(self._failure)

    def crashed(self, _error: Exception) -> None:
        self._client.give_up(self, self._request)

    def client_left(self) -> None:
        """It is over already."""

    def client_paused(self, _paused: bool) -> None:
        """It is over already."""

    def stop(self, _failure: Failure) -> None:
        """It is over already."""

    def tick(self, _now: float) -> None:
        """It is over already."""
