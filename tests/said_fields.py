"""Whose word each field of a request is, by which tests compare what ingresses do with them."""

from __future__ import annotations

from enum import Enum

from cellgate.proxy.http.heads import CONTINUE_FIELD, EXPLAIN_FIELD, RANK_FIELD, TOKEN_FIELD, UNIT_FIELD


class Said(Enum):
    """Whose word a field of a request is, and so what an ingress does with it."""

    BY_CLIENTS = "clients"
    """It is passed on: it says nothing that others pay for."""
    BY_INGRESS = "ingress"
    """What a client says is replaced, or the ingress' own word is appended."""
    BY_OPERATOR = "operator"
    """It is removed."""


MEANINGS: dict[bytes, Said] = {
    UNIT_FIELD: Said.BY_OPERATOR,
    b"x-gateway-destination-endpoint": Said.BY_OPERATOR,
    b"x-gateway-destination-endpoint-subset": Said.BY_OPERATOR,
    TOKEN_FIELD: Said.BY_OPERATOR,
    EXPLAIN_FIELD: Said.BY_OPERATOR,
    b"endpoint-load-metrics-format": Said.BY_OPERATOR,
    b"x-haproxy-server-state": Said.BY_OPERATOR,
    b"x-gateway-inference-fairness-id": Said.BY_OPERATOR,
    b"x-priority": Said.BY_OPERATOR,
    b"x-envoy-expected-rq-timeout-ms": Said.BY_OPERATOR,
    RANK_FIELD: Said.BY_OPERATOR,
    b"x-forwarded-for": Said.BY_INGRESS,
    b"x-forwarded-host": Said.BY_INGRESS,
    b"x-forwarded-proto": Said.BY_INGRESS,
    b"host": Said.BY_CLIENTS,
    b"expect": Said.BY_CLIENTS,
    b"accept-encoding": Said.BY_CLIENTS,
    b"content-encoding": Said.BY_CLIENTS,
    b"authorization": Said.BY_CLIENTS,
    b"x-api-key": Said.BY_CLIENTS,
    b"api-key": Said.BY_CLIENTS,
    CONTINUE_FIELD: Said.BY_CLIENTS,
    b"x-parent-session-id": Said.BY_CLIENTS,
    b"x-claude-code-session-id": Said.BY_CLIENTS,
    b"session-id": Said.BY_CLIENTS,
    b"x-session-affinity": Said.BY_CLIENTS,
    b"x-opencode-session": Said.BY_CLIENTS,
    b"x-session-id": Said.BY_CLIENTS,
    b"x-slo-ttft-ms": Said.BY_CLIENTS,
    b"x-request-id": Said.BY_CLIENTS,
    b"traceparent": Said.BY_CLIENTS,
    b"tracestate": Said.BY_CLIENTS,
    b"origin": Said.BY_CLIENTS,
    b"access-control-request-method": Said.BY_CLIENTS,
    b"access-control-request-headers": Said.BY_CLIENTS,
}
"""All fields of requests that the gate gives a meaning to, beside those of HTTP's framing, by their default
names.
"""

INTERNAL_REPLY_FIELDS = frozenset(
    {UNIT_FIELD, EXPLAIN_FIELD, b"endpoint-load-metrics", b"endpoint-load-metrics-bin"}
)
"""Fields of the gate's answers that are not for users: an ingress removes them."""
