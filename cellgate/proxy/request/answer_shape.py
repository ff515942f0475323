"""What a good answer is, by path: its status, its type, and that something in it was computed. Pure.

`SHAPES` has a row for each path, with its source. Besides, an answer without a text is good when it is a job
that runs in the background, or when the request asks for nothing, or for bytes
(`AnswerShape.is_asked_for`). One that counts its tokens, and has none, or no text, is shown too: only as a
rate, beside those of other units, it says something. What ends without an end is broken, whatever is asked.

One that is not good is doubtful, and no more than that: the request may be at fault. Other units are asked
(request/second_opinion.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cellgate.probes.engines import GENERATED, object_of
from cellgate.proxy.http.sse import payload, split, tells_error

_ANYTHING_BUT_SPACE = re.compile(rb"\S")

_ROLE_ALONE = re.compile(
    rb'data: ?\{[^{}]*"choices"\s*:\s*\[\s*\{[^{}]*"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"\s*'
    rb'(?:,\s*"content"\s*:\s*(?:""|null)\s*)?\}[^{}]*\}\s*\][^{}]*\}\n\n'
)
"""What most streams begin with: who speaks, and no word yet."""
_ANSWER_ERROR = re.compile(rb'\s*\{\s*"error"\s*:\s*(?!null\b|""|\{\s*\})')
_CODE = re.compile(rb'"(?:code|status|status_code|http_status_code)"\s*:\s*"?([45]\d\d)\b')
_ANSWER_ENDS = (b"}", b"]")
REPEATS = "one token again and again"
NO_TOKEN = "a stream without a token"
"""And without an end: broken, as those of an engine that has lost one of its ranks."""
NOTHING = "nothing generated"
NONE_COUNTED, NO_TEXT = "no token, by its own count", "tokens counted, but no text"
EVENTS_ONLY, COMMENTS_ONLY = "events without a token", "comments without a token"
ENDLESS = (REPEATS, EVENTS_ONLY, COMMENTS_ONLY)
"""What is wrong with streams that may go on for ever."""
_COUNTED = re.compile(
    rb'"(?:completion_tokens|output_tokens|total_tokens)"\s*:\s*\d|"status"\s*:\s*"incomplete"'
    rb'|"(?:finish_reason|stop_reason)"\s*:\s*"(?:length|max_tokens)"'
)
"""It tells how many tokens it has, or that there may be no more."""
_ANSWER_ENDED = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(?!abort")')
_ANSWER_SAID = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|delta)"\s*:\s*"((?:[^"\\]|\\.)*)"'
)
_REPEATED, _PERIOD, _MANY = 64, 24, 1024
"""So many bytes that come again after at most so many, in a text of so many, are looked at closely."""
_REPEATED_SHARE = 0.75
_SAMPLE, _OFTEN = 10, 5
"""What is in the middle of an answer is in it so often, if it repeats itself."""
_LOOP, _LOOP_TIMES = 16, 3
SHORT_LOOP = 8, 2
"""Bytes, and times, that may be a loop."""
_ENVELOPE = frozenset(("role", "type", "index", "id", "name", "item_id", "output_index", "content_index"))
_BEFOREGENERATED = frozenset(
    (
        "ping",
        "message_start",
        "content_block_start",
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    )
)


_NO_LIMIT = re.compile(rb'"(?:max_(?:completion_|output_|new_)?tokens|n_predict)"\s*:\s*0\s*[,}]')
_ANSWER_BYTES = re.compile(rb'"encoding_format"\s*:\s*"bytes')
_NO_TEXTS = re.compile(rb'"(?:documents|texts)"\s*:\s*\[\s*\]|"top_n"\s*:\s*0\s*[,}]')


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """`shown` is found in every good answer. `json`: a whole answer is JSON (None: it may be); `text`: it is
    words, which can be streamed, and may repeat themselves. A request in which `none` is found asks for an
    answer without any; `raw`: it may ask for bytes.
    """

    shown: re.Pattern[bytes] = _ANYTHING_BUT_SPACE
    json: bool | None = True
    text: bool = False
    none: re.Pattern[bytes] | None = None
    raw: bool = False

    def is_plain(self, body: bytes) -> bool:
        """Whether this is a short whole answer in JSON that is good, seen in few steps."""
        if self.json is False or len(body) >= _MANY or b'"error"' in body:
            return False
        if self.text and body.count(body[len(body) // 2 :][:_SAMPLE]) >= _OFTEN:
            return False
        found = self.shown.search(body)
        return found is not None and found.lastgroup is None and body.endswith(_ANSWER_ENDS)

    def why_doubtful(self, body: bytes, *, is_events: bool, streams: bool, content_type: bytes = b"") -> str:
        """What is wrong with a whole answer under 200, in a few words; empty: it is good.

        `is_events`: it is a stream of events; `streams`: one was asked for.
        """
        found = self.shown.search(body)
        if found is None:
            return _nothing_in_stream(body) if is_events else _nothing(body)
        if is_events:
            return "an error in the stream" if _errs(body) else ""
        if _ANSWER_ERROR.match(body) is not None:
            return "an error object under 200"
        if self.json and not body.rstrip().endswith(_ANSWER_ENDS):
            return "no JSON"
        if b"html" in content_type:
            return "a page of HTML"
        if self.json is False and b"application/json" in content_type:
            return "JSON in place of media"
        if self.text and streams:
            return "no event stream"
        if found.lastgroup is not None and all(each.lastgroup for each in self.shown.finditer(body)):
            return NO_TEXT
        return REPEATS if self.text and (repeats(body) or _repeats_briefly(body)) else ""

    def is_asked_for(self, request: bytes, answer: bytes, content_type: bytes) -> bool:
        """Whether a request asks for an answer like this, which is no good one of others."""
        if self.raw and b"application/octet-stream" in content_type:
            return answer != b"" and _ANSWER_BYTES.search(request) is not None
        if self.none is None or self.none.search(request) is None:
            return False
        return _errors(answer) == "" and answer.rstrip().endswith((*_ANSWER_ENDS, b"[DONE]"))


_WORDS = AnswerShape(GENERATED, text=True, none=_NO_LIMIT)
SHAPES: Mapping[str, AnswerShape] = {
    # OpenAI's API; vLLM: `max_tokens: 0`, with `echo` for the log probabilities of a prompt.
    "chat": _WORDS,
    "completions": _WORDS,
    # Anthropic's API.
    "messages": _WORDS,
    # OpenAI's API, with jobs: https://platform.openai.com/docs/guides/background.
    "responses": _WORDS,
    # SGLang (`max_new_tokens: 0` scores a prompt), TGI, vLLM's by token ids.
    "generate": AnswerShape(GENERATED, none=_NO_LIMIT),
    # OpenAI's API; vLLM: `encoding_format: bytes` and `bytes_only`, numbers as they are in memory.
    "embeddings": AnswerShape(re.compile(rb'"embedding"\s*:\s*(?:\[\s*[^\s\]]|"(?!"))'), raw=True),
    # Jina's and Cohere's API; SGLang and TEI answer a bare list. There may be nothing to rank.
    "rerank": AnswerShape(re.compile(rb'"(?:relevance_)?score"\s*:\s*-?\d'), none=_NO_TEXTS),
    # vLLM.
    "score": AnswerShape(re.compile(rb'"score"\s*:\s*-?\d')),
    "pooling": AnswerShape(re.compile(rb'"data"\s*:\s*(?:\[\s*[^\s\]]|"(?!"))'), raw=True),
    "classify": AnswerShape(re.compile(rb'"(?:probs|label)"\s*:')),
    # OpenAI's API.
    "images": AnswerShape(re.compile(rb'"(?:b64_json|url)"\s*:\s*"(?!")')),
    "moderations": AnswerShape(re.compile(rb'"results"\s*:\s*\[\s*[^\s\]]')),
    "audio": AnswerShape(json=None),
    "speech": AnswerShape(json=False),
    # Triton's generate extension, KServe v2.
    "triton": AnswerShape(re.compile(rb'"(?:text_output|outputs)"\s*:')),
    # SageMaker's: any of these.
    "invocations": AnswerShape(),
    # vLLM, SGLang, llama.cpp.
    "tokenize": AnswerShape(re.compile(rb'"(?:tokens|count|prompt|text|content|input_tokens)"\s*:|\A\s*\[')),
}
"""By the name of the route. Others are not looked into."""


def status_in(body: bytes) -> int:
    """The status that an error told under 200 gives itself; 0: none."""
    found = _CODE.search(body)
    return int(found[1]) if found is not None else 0


def are_idle(events: bytes) -> bool:
    """Whether nothing in these whole events was computed: a role, an empty word, an end. An event that is not
    understood may be progress.
    """
    if _ROLE_ALONE.fullmatch(events) is not None:
        return True
    return all(_is_idle(payload(event)) for event in split(events)[0])


def repeats(text: bytes) -> bool:
    """Whether a long answer is one short piece of text again and again, nearly from begin to end."""
    size = len(text)
    if size < _MANY:
        return False
    # Two places: what is between the texts of an answer may be at one of them.
    for place in (size // 3, size * 3 // 4):
        piece = text[place : place + _REPEATED]
        again = text.find(piece, place + 1, place + _REPEATED + _PERIOD)
        if again > 0 and text.count(text[place:again]) * (again - place) >= _REPEATED_SHARE * size:
            return True
    return False


def _repeats_briefly(body: bytes) -> bool:
    """The same of a whole answer of any length, which only counts as a rate."""
    return body.count(body[len(body) // 2 :][:_SAMPLE]) >= _OFTEN and loops(body)


def loops(answer: bytes, least: int = _LOOP, times: int = _LOOP_TIMES) -> bool:
    """Whether a short answer, or stream, ends with one short piece of text so many `times` on end, and for so
    many bytes at `least`. With less than these an answer is often meant so, and only its rate says something.
    """
    said = b"".join(_ANSWER_SAID.findall(answer))
    for period in range(1, _PERIOD + 1):
        size = max(least, times * period)
        tail = said[-size:]
        if len(tail) >= size and tail[period:] == tail[:-period]:
            return True
    return False


def _errs(events: bytes) -> bool:
    return b"error" in events and any(map(tells_error, split(events)[0]))


def _nothing_in_stream(events: bytes) -> str:
    """What is wrong with a stream that has ended, and shows nothing that was generated."""
    if _errs(events):
        return "an error in the stream"
    if not are_idle(events):
        return ""
    if _COUNTED.search(events) is not None:
        return NONE_COUNTED
    return NOTHING if _ANSWER_ENDED.search(events) is not None else NO_TOKEN


def _nothing(body: bytes) -> str:
    """What is there instead of a whole answer."""
    if not body.strip():
        return "an empty body"
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "a page of HTML" if b"<html" in body[:1024].lower() else "no JSON"
    if not isinstance(data, dict):
        return "no answer in its JSON"
    if data.get("error"):
        return "an error object under 200"
    if _is_job(data):
        return ""
    if _COUNTED.search(body) is not None:
        return NONE_COUNTED
    return NOTHING if data.get("choices") else "no answer in its JSON"


def _errors(answer: bytes) -> str:
    """Whether an answer, whole or a stream, tells an error, in a few words."""
    if _ANSWER_ERROR.match(answer) is not None:
        return "an error object under 200"
    return "an error in the stream" if _errs(answer) else ""


def _is_job(data: dict[str, Any]) -> bool:
    """Whether a response is computed in the background: its client asks for it by its id."""
    status = data.get("status")
    return status == "queued" or (status == "in_progress" and isinstance(data.get("id"), str))


def _is_idle(data: bytes | None) -> bool:
    """Whether the data of one event, or a comment, shows no work."""
    if data is None or data.strip() in (b"", b"[DONE]"):
        return True
    event = object_of(data)
    if event is None or event.get("error"):
        return False
    if event.get("type") in _BEFOREGENERATED:
        return GENERATED.search(data) is None
    choices = event.get("choices")
    return isinstance(choices, list) and all(_says_nothing(choice) for choice in choices)


def _says_nothing(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("text") or choice.get("token_ids"):
        return False
    said = choice.get("delta") or choice.get("message") or {}
    return isinstance(said, dict) and not any(v for name, v in said.items() if name not in _ENVELOPE)
