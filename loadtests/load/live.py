"""A part of Locust's page: what its own statistics cannot tell of streams, while they run.

Locust knows requests and their whole times. First tokens, gaps, tokens a second and failovers are no
requests: they stand below its tables, in a page of our own that is also there alone, at /tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from loadtests.drill.records import Record
from loadtests.drill.summary import Goal, Summary
from loadtests.load.figures import LoadStep
from loadtests.load.report import charts_over_time, page, table

PATH = "/tokens"
REFRESH_S = 5
KEPT = 20_000
"""Records that the page is made of: the last ones."""

_STYLE = "position:fixed;left:0;right:0;bottom:0;z-index:9;background:#fff;border-top:1px solid #bbb"
_FRAME = f"""<details open style="{_STYLE}">
<summary style="padding:4px 12px;cursor:pointer;font:14px sans-serif;color:#222">Tokens</summary>
<iframe src="{PATH}" title="Tokens" style="width:100%;height:55vh;border:0"></iframe></details></body>"""
"""At the bottom of the window, whichever of Locust's tabs is open."""


class Live:
    """The latest records of a run."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=KEPT)
        self.goal = Goal(2.0, 0.1)

    def clear(self) -> None:
        """A run begins."""
        self._records.clear()

    def take(self, record: Record) -> None:
        """A request has ended."""
        self._records.append(record)

    def html(self, users: int, failovers: int | None) -> str:
        """The page as it stands."""
        step = LoadStep("all users", users, Summary(list(self._records), self.goal), failovers)
        body = f"<h2>Tokens</h2>{table([step])}{charts_over_time(step)}"
        return page("Tokens", body, f'<meta http-equiv="refresh" content="{REFRESH_S}">')


def add_to(app: Any, html: Callable[[], str]) -> None:
    """Put the page into Locust's web application (Flask)."""

    def framed(response: Any) -> Any:
        from flask import request

        if request.path == "/" and response.mimetype == "text/html":
            response.set_data(response.get_data(as_text=True).replace("</body>", _FRAME))
        return response

    app.add_url_rule(PATH, "tokens", html)
    app.after_request(framed)
