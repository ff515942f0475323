"""How the stream that a request asks for may be resumed, by the route of the request. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cellgate.proxy.resume import messages_request, responses_request
from cellgate.proxy.resume.eligible import ways_of

WAYS: dict[str, Callable[[dict[str, Any]], int]] = {
    "chat": partial(ways_of, chat=True),
    "completions": partial(ways_of, chat=False),
    "messages": messages_request.FIELDS.ways_of,
    "responses": responses_request.FIELDS.ways_of,
}
"""The ways (eligible.py) that the body of a request leaves open. Streams of other routes have none."""
