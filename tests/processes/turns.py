"""The turns of a loop with a tool, told to the test that runs it by lines on stdin and stdout."""

import asyncio
import json
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Turns:
    """Tells the test how far the loop is."""

    def __init__(self) -> None:
        self._has_begun = False

    async def go(self) -> None:
        """Wait for the next turn."""
        await asyncio.to_thread(sys.stdin.readline)
        self._has_begun = False

    def text(self) -> None:
        """Some text has come."""
        if not self._has_begun:
            self._has_begun = True
            print("begun", flush=True)

    def over(self, **told: Any) -> None:
        """The turn is over."""
        print(json.dumps(told), flush=True)
