"""The usual reply: a server that is asked the same again and again mostly sends the same bytes each time, but
for the time in its Date. They were parsed once, and need not be parsed again.
"""

from __future__ import annotations

import re

from cellgate.proxy.wire.reply_reader import ReplyHead

BYTES_MAX = 4096
"""Of a larger reply something changes most of the time."""

_DATE = re.compile(rb"\r\ndate: ([ -~]{29})\r\n", re.IGNORECASE)
_TIME = re.compile(rb"[ -~]*")


class UsualReply:
    """A whole reply as it was read, which ended by its length and left the connection open; its `head` and
    `body`.
    """

    __slots__ = ("_after", "_before", "_size", "body", "head")

    def __init__(self, data: bytes, head: ReplyHead, body: bytes) -> None:
        found = _DATE.search(data, 0, data.find(b"\r\n\r\n") + 2)
        begin, end = found.span(1) if found else (len(data), len(data))
        self._before, self._after, self._size = data[:begin], data[end:], len(data)
        self.head = head
        self.body = body

    def is_like(self, data: bytes) -> bool:
        """Whether this is the same reply, perhaps of another time."""
        before, after = self._before, self._after
        return (
            len(data) == self._size
            and data.startswith(before)
            and data.endswith(after)
            and _TIME.fullmatch(data, len(before), self._size - len(after)) is not None
        )


def usual_reply(data: bytes, head: ReplyHead, body: bytes, *, keep_alive: bool) -> UsualReply | None:
    """The same, if it may be taken for the usual one: a whole, small reply with a declared length."""
    is_plain = keep_alive and head.length is not None and not head.coding and not head.bodiless
    return UsualReply(data, head, body) if is_plain and 0 < len(data) <= BYTES_MAX else None
