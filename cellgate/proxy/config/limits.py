"""Limits on what one client, or one unit, can make the gate do, and how often each took effect.

All of them are here. They are not settings: a request that exceeds one is a mistake or an attack.
What an operator may choose (sizes of heads and bodies, times) is `limits:` in the configuration: settings.py.
To add one: a field below; `reached` where it takes effect; a row in docs/security.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class HardLimits:
    """One field for each bound; its name is also the label in `cellgate_limits_total`."""

    header_lines: int = 128
    """Lines of one head, of a request or of a unit's reply. Envoy and HAProxy take about 100. A client gets
    431; a unit's reply is garbage (502)."""
    connection_tokens: int = 16
    """Names in all `Connection` fields of one head. A client gets 400; a unit's reply is garbage (502)."""
    pipelined_requests_per_turn: int = 8
    """Requests of one connection answered in one turn of the loop; those after them wait for the next."""
    requests_per_turn: int = 16
    """Requests of all connections begun in one turn of the loop, behind others on theirs or not; the rest
    waits for the next, so that the first have answers before the last begin. Never counted: nobody is
    refused."""
    request_bytes_per_turn: int = 1 << 20
    """Bytes of all clients' bodies together that are parsed in one turn of the loop, other bytes counting 64
    times; the rest waits for the next turn. Reads up to `parsed_bytes` are no part of it. Never counted."""
    reply_bytes_per_turn: int = 1 << 17
    """Bytes of all replies together that are parsed in one turn of the loop, each piece of a body counting as
    1 KiB more; the rest waits for the next turn. Some 100 events of streams, a few milliseconds: the way of
    another client's request through the gate has several turns. Never counted: nobody is refused."""
    small_reply_bytes: int = 1024
    """A read of a reply up to this size is parsed at once, however much others have sent. Never counted."""
    unit_models: int = 4096
    """Models in the list of one unit that has none configured. Those after them are not known to the gate."""
    parsed_bytes: int = 16384
    """Bytes of one connection that are parsed in one turn of the loop, bodies not counted, and as many more;
    the rest waits for the next turn. Never counted: nobody is refused."""
    body_chunks: int = 262144
    """Chunks, or other pieces, in which a request's body comes. A client gets 400."""
    small_body_bytes: int = 1048576
    """An eighth of the memory for bodies is kept for those up to this size. Never counted."""
    body_stall_s: float = 2
    """While others wait for memory: how long a body that is not whole may come at less than the rate below,
    or those of whoever holds most of the memory may yet take. Its client gets 408."""
    body_idle_s: float = 30
    """How long a body that is not whole may come at less than the rate below at all. Its client gets 408."""
    body_bytes_per_s: int = 1024
    """The least rate at which a body comes. Never counted: `body_stall_s` and `body_idle_s` are."""
    idle_connections: int = 16384
    """Client connections without a request; with more, or when descriptors run short, those that never asked
    anything are closed, then those that have been idle for longest."""
    tls_handshake_s: float = 5
    """How long a client may take for a TLS handshake; then it is cut. Never counted: the loop does it."""
    json_depth: int = 1024
    """Objects and arrays within each other in a body; the parser's own bound. A client gets 400."""
    json_bytes_on_loop: int = 1 << 20
    """A larger body is read in a process of its own: a megabyte of text takes two milliseconds."""
    json_nodes_on_loop: int = 16384
    """The same for a body with more values: what they take grows with their number."""
    json_nodes: int = 1 << 21
    """Values in a body, keys not counted. A client gets 400. A million token ids are a million."""
    beginnings_bytes: int = 32 << 20
    """What a process keeps of recent bodies, so that only the new part of a conversation's next turn is
    read. Never counted: the rest is read again."""
    prompt_pieces: int = 8192
    """Parts of a prompt that are looked at one by one; a plain message has four. The rest is hashed as is."""
    fields: int = 64
    """Fields of a body, or of a message, that are looked at by name. More are hashed as is, and the stream of
    such a body is not resumed."""
    model_search_bytes: int = 1 << 20
    """The bytes at the begin of a body, and at its end, in which the model is looked for when another one is
    to be written there. A client gets 413."""
    decoded_times: int = 200
    """A compressed body may become this many times as large; beyond `decoded_bytes`. A client gets 413."""
    decoded_bytes: int = 1 << 20
    """A compressed body may always become this large. Never counted."""
    decoded_piece_bytes: int = 65536
    """What is decoded of one at a time. Never counted."""
    decoded_bytes_per_turn: int = 262144
    """What is decoded of one in one turn of the loop; the rest waits for the next. Never counted."""
    form_parts: int = 256
    """Parts of a form in which its model is looked for. One with more goes to any unit."""
    name_chars: int = 1024
    """Characters of a model's name, a user's or a response's id. A longer model's name gets 400, the end of a
    user's is not looked at, and a longer id is left to the engine."""
    large_bodies_waiting: int = 256
    """Bodies that wait to be read in the processes for large ones. A client gets 503: of those who have them
    there, the one with most."""
    large_body_processes: int = 3
    """Processes that read large bodies, each for another key or address. Never counted: the rest waits."""
    large_body_cpu_s: int = 5
    """CPU time to read one body there. A client gets 413."""
    large_body_memory: int = 1 << 30
    """Bytes of memory to read one body there, beside 16 for each of its own. A client gets 413."""
    stop_bytes: int = 4096
    """All stop strings of a request together; with more its stream is not resumed."""
    event_bytes: int = 1048576
    """One event that has to be whole in the gate, as long as the memory for bodies has no room for more: the
    first of a stream, and each of one that is resumed. The first is passed on as it comes. Later: the stream
    is not resumed, or not by that unit. A larger one of a stream that may be resumed: it is not."""
    log_lines: int = 1024
    """Lines of the gate's own log that wait for an output that takes none. The oldest are lost."""

    unsent_bytes: int = 512 << 10
    """What waits in the gate for one client that reads slower than its unit writes. Then its unit waits."""
    unsent_total_bytes: int = 64 << 20
    """The same of all clients of a process, each counted with all that it may have. Then units of further
    slow clients wait at once."""
    slow_reader_s: float = 20
    """For how long a client for which something waits may take less than the next figure a second. Its
    answer ends with an error."""
    slow_reader_bytes_per_s: int = 1024
    """The least that it must take. Never counted: the two beside it are."""
    slow_reader_awaited_s: float = 2
    """The same as `slow_reader_s` while others wait for a slot of its unit, and it holds one."""
    held_back_streams: int = 256
    """Clients of one process whose units wait for them. Of more, the answer of whoever took least of its own
    ends with an error."""
    balancers: int = 16
    """Load balancers that ask the agent port for one unit, or for the gate, and get a part of its places
    each. The one that was heard longest ago is forgotten."""
    realtime_sessions: int = 1024
    """WebSockets of one process. A client gets 503."""
    realtime_idle_s: float = 60
    """How long nothing may come on a WebSocket, from either side: it holds a slot. It is closed. Proxies have
    the same by default, and most clients ping more often."""
    guardrail_calls: int = 256
    """Questions to a guardrail in flight at one time, of one process. For more there is no verdict."""
    guardrail_body_bytes: int = 8 << 20
    """A body that a guardrail is asked about: it is copied. For a larger one there is no verdict."""
    guardrail_bytes: int = 64 << 20
    """The same of all questions in flight together. For more there is no verdict."""
    guardrail_reply_bytes: int = 65536
    """The verdict of a guardrail, beside a request that it has written. A larger one is none."""
    guardrail_held_bytes: int = 1 << 20
    """An answer, or a part of one, that is held for a verdict. Its unit is paused; if all of it has to be
    held, or it is one event, there is no verdict."""
    poison_records: int = 4096
    """Prompts that were in flight when a unit died. The oldest is forgotten."""
    poison_bans: int = 1024
    """Prompts that are refused by this gate or others. The ban that ends first is dropped."""
    poison_held: int = 1024
    """Requests that wait until a suspected prompt is proven or cleared. A client gets 503."""


LIMITS = HardLimits()

REACHED: dict[str, int] = {field.name: 0 for field in fields(HardLimits)}
"""How often each took effect in this process, since it began."""


def reached(limit: str) -> None:
    """Count that a bound took effect. `limit` is the name of a field, else KeyError."""
    REACHED[limit] += 1
