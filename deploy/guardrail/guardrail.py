#!/usr/bin/env python3
"""A guardrail for Cellgate: removes personal data from requests, and denies answers that have some.

    python3 guardrail.py --port 8900

It knows e-mail addresses, card numbers and IBANs by their patterns. Another `Find`, such as the analyzer of
Presidio, takes the place of `by_patterns`. docs/guardrail.md has the questions and answers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Find = Callable[[str], list[tuple[int, int, str]]]
"""Where a text has personal data: begin, end, and what it is."""

PATTERNS = {
    "EMAIL": re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+\b"),
    "CARD": re.compile(r"\b\d(?:[ -]?\d){12,18}\b"),
    "IBAN": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
}


def by_patterns(text: str) -> list[tuple[int, int, str]]:
    """What the patterns find; of numbers only those that are valid card numbers."""
    return [
        (match.start(), match.end(), name)
        for name, pattern in PATTERNS.items()
        for match in pattern.finditer(text)
        if name != "CARD" or is_card(match[0])
    ]


def is_card(text: str) -> bool:
    """The check digit of card numbers (ISO/IEC 7812)."""
    digits = [int(digit) for digit in text if digit.isdigit()][::-1]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def apart(found: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The same in order; finds that overlap are one, with the name of the first: a card number may be a part
    of an IBAN.
    """
    merged: list[tuple[int, int, str]] = []
    for begin, end, name in sorted(found, key=lambda each: (each[0], -each[1])):
        if merged and begin < merged[-1][1]:
            first, last, its_name = merged[-1]
            merged[-1] = first, max(last, end), its_name
        else:
            merged.append((begin, end, name))
    return merged


def masked(value: Any, find: Find) -> Any:
    """The same with personal data replaced, in all strings of `content`, `text`, `prompt` and `input`."""
    if isinstance(value, str):
        for begin, end, name in reversed(apart(find(value))):
            value = f"{value[:begin]}<{name}>{value[end:]}"
        return value
    if isinstance(value, list):
        return [masked(each, find) for each in value]
    if isinstance(value, dict):
        names = ("content", "text", "prompt", "input", "messages", "instructions", "system")
        return {key: masked(each, find) if key in names else each for key, each in value.items()}
    return value


def verdict(asked: dict[str, Any], find: Find) -> dict[str, Any]:
    """Requests are changed; answers are denied."""
    if asked["phase"] == "request":
        body = masked(asked["body"], find)
        return {"action": "allow"} if body == asked["body"] else {"action": "change", "body": body}
    text = asked.get("context", "") + asked["text"] if "text" in asked else json.dumps(asked["body"])
    kinds = sorted({name for _, _, name in find(text)})
    return {"action": "deny", "reason": f"it has {', '.join(kinds)}"} if kinds else {"action": "allow"}


class Handler(BaseHTTPRequestHandler):
    """Answers one connection of the gate."""

    protocol_version = "HTTP/1.1"
    find: Find = staticmethod(by_patterns)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = json.dumps(verdict(asked, self.find)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        """Says nothing: what it is asked must not be in a log."""


def main() -> None:
    """Answer until stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900)
    args = parser.parse_args()
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
