"""A body of which the beginning is known is read as if nothing were known, whatever it is like."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.request import beginnings, conversation
from cellgate.proxy.request.beginnings import Beginnings
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.conversation import read_conversation
from cellgate.router.nouns import Ask

NAMES = {"chat": "messages", "messages": "messages", "responses": "input"}
WORDS = (
    "lorem",
    'say "x"',
    "a\\b",
    "line\n",
    "é",
    "😀",
    '},{"role":"user"',
    "]",
    '],"tools":[',
    "{",
    "\u2028",
)

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many runs in a few kilobytes as there are in hundreds."""
    for module in (beginnings, conversation):
        monkeypatch.setattr(module, "RUN_BYTES", 300)


def read(known: Beginnings, body: bytes, route: str, payer: str = "p") -> tuple[Ask | Failure, bool]:
    """What a body asks for, and whether it was read in parts."""
    place = known.find(body, route, payer)
    found = None if place is None else known.read(place, payer, payer)
    return (read_ask(body, route, payer), False) if found is None else (found, True)


def unread(known: Beginnings, body: bytes, route: str = "chat", payer: str = "p") -> int:
    """How many bytes of its messages are not known."""
    place = known.find(body, route, payer)
    assert place is not None
    return place.end - place.at


class Client:
    """An agent whose requests are like those of some program; `chance` decides which."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.route = chance.choice(list(NAMES))
        self.name = NAMES[self.route]
        self.fields: Json = {"model": "m", "tools": self.tools()}
        if chance.random() < 0.7:
            self.fields |= {"stream": True, "max_tokens": 100}
        if self.route != "chat":
            self.fields["system" if self.route == "messages" else "instructions"] = self.text(20)
        if self.route == "responses" and chance.random() < 0.5:
            self.fields["text"] = {"format": {"type": "text"}}
        self.messages: list[Any] = [self.message() for _ in range(chance.randrange(1, 6))]
        self.style: Json = chance.choice(
            [
                {},
                {"separators": (",", ":")},
                {"indent": 2},
                {"ensure_ascii": False, "separators": (", ", ":")},
            ]
        )
        self.first = chance.random() < 0.5

    def text(self, words: int = 12) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randrange(1, words + 1)))

    def tools(self) -> list[Json]:
        return [
            {"type": "function", "function": {"name": f"t{n}", "description": self.text()}} for n in range(3)
        ]

    def message(self) -> Json:
        call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": '{"a": "b"}'}}
        nested = [{"role": "user", "content": self.text()}, {"role": "tool"}]
        kinds: dict[str, list[Json]] = {
            "chat": [
                {"role": "user", "content": self.text()},
                {"content": self.text(), "role": "user"},
                {"role": "assistant", "content": None, "tool_calls": [call, call]},
                {"role": "tool", "tool_call_id": "c", "content": self.text(60)},
                {"role": "user", "content": [{"type": "text", "text": self.text()}], "name": "n"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": self.text()}}]},
            ],
            "messages": [
                {"role": "user", "content": self.text()},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": {"m": nested}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}],
                },
            ],
            "responses": [
                {"role": "user", "content": [{"type": "input_text", "text": self.text()}]},
                {"type": "message", "role": "assistant", "content": self.text()},
                {"type": "function_call", "call_id": "c", "name": "t", "arguments": "{}"},
                {"arguments": "{}", "call_id": "c", "name": "t", "type": "function_call"},
                {"type": "function_call_output", "call_id": "c", "output": self.text(60)},
                {"id": "r", "summary": [], "type": "reasoning"},
            ],
        }
        return self.chance.choice(kinds[self.route])

    def body(self) -> bytes:
        ours = {self.name: self.messages}
        return json.dumps(ours | self.fields if self.first else self.fields | ours, **self.style).encode()

    def turn(self) -> bytes:
        """The body of its next request."""
        chance = self.chance
        for _ in range(chance.randrange(1, 4)):
            self.messages.append(self.message())
        return chance.choice(TURNS)(self) if chance.random() < 0.5 else self.body()


def edited(client: Client) -> bytes:
    """One message is another, those before it are compacted, those behind it are taken back, or the last."""
    at, last = client.chance.randrange(len(client.messages)), len(client.messages) - 1
    begin, end, new = client.chance.choice([(at, at + 1, 1), (0, at, 1), (at, None, 0), (last, None, 0)])
    client.messages[begin:end] = [client.message()][:new]
    return client.body()


def other_fields(client: Client) -> bytes:
    chance = client.chance
    more: Json = {
        "model": chance.choice(["m", "other", None, 7, "x" * 2000]),
        "max_tokens": chance.randrange(3),
        "tools": client.tools(),
        "stream": chance.random() < 0.5,
        "priority": -1,
        "user": "u",
        "n": 3,
        "cache_salt": "s",
        "chat_template_kwargs": {"a": 1},
        "tool_choice": "required",
        "continue_final_message": True,
        "response_format": {"type": "json_schema", "json_schema": {"messages": []}},
        "prompt": ["a", "b"],
        "temperature": 0,
        "frequency_penalty": 0.1,
        "metadata": {"messages": [{"role": "x"}]},
        "previous_response_id": "r",
        "zzz": {"deep": [[[]]]},
    }
    names = chance.sample(list(more), 2)
    if chance.random() < 0.1:
        client.fields |= {f"f{n}": n for n in range(80)}
    client.fields |= {name: more[name] for name in names}
    body = client.body()
    for name in names:
        if name != "max_tokens":
            client.fields.pop(name)
    client.fields.setdefault("model", "m")
    return body


def other_order(client: Client) -> bytes:
    names = list(client.fields)
    client.chance.shuffle(names)
    client.fields = {name: client.fields[name] for name in names}
    client.first = client.chance.random() < 0.5
    for message in client.messages:
        if isinstance(message, dict) and client.chance.random() < 0.3:
            turned = dict(reversed(message.items()))
            message.clear()
            message.update(turned)
    return client.body()


def other_style(client: Client) -> bytes:
    client.style = {
        "separators": (client.chance.choice([",", " ,\n", ",  "]), client.chance.choice([":", " : "]))
    }
    return client.body()


def escaped_name(client: Client) -> bytes:
    return client.body().replace(
        f'"{client.name}"'.encode(), f'"{client.name[:-1]}\\u{ord(client.name[-1]):04x}"'.encode()
    )


def two_of_them(client: Client) -> bytes:
    body, other = client.body(), json.dumps([client.message()])
    kind = client.chance.randrange(4)
    name = client.name if kind < 3 else f"{client.name[:-1]}\\u{ord(client.name[-1]):04x}"
    if kind == 0:
        return b'{"%b":%b,' % (name.encode(), other.encode()) + body[1:]
    return body.rstrip()[:-1] + b',"%b":%b}' % (name.encode(), b"[]" if kind == 1 else other.encode())


def strange_messages(client: Client) -> bytes:
    """One that is none among them, or no message at all."""
    messages, chance = copy.deepcopy(client.messages), client.chance
    strange: Any = chance.choice(["text", 7, None, [], {}, {"role": 1}, {"content": 7}, [{"role": "x"}]])
    client.messages.insert(chance.randrange(len(messages) + 1), strange)
    if chance.random() < 0.3:
        client.messages = []
    body = client.body()
    client.messages = messages
    return body


def nested(client: Client) -> bytes:
    depth = client.chance.choice([200, 253, 254, 255, 1020, 1021, 1022, 1023, 1024])
    place = client.chance.choice([client.messages[-1], client.fields])
    place["deep"] = []
    body = client.body().replace(b'"deep": []', b'"deep":[]').replace(b'"deep" : []', b'"deep":[]')
    del place["deep"]
    return body.replace(b'"deep":[]', b'"deep":' + b"[" * depth + b"]" * depth)


def broken(client: Client) -> bytes:
    body, chance = client.body(), client.chance
    at = chance.choice([chance.randrange(len(body)), len(body) - chance.randrange(1, min(300, len(body)))])
    kind = chance.randrange(4)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + body[at + 1 :]
    piece = chance.choice(
        [b'"', b"}", b"]", b",", b"{", b"[", b"\x00", b"\xff", b" ", b"NaN", b'"a":1,', b"}]}"]
    )
    return body[:at] + piece + body[at + (kind == 2) :]


def with_more(client: Client) -> bytes:
    before, behind = [b"\xef\xbb\xbf", b" \n", b"[", b"\0"], [b" \n", b"{}", b"}", b"\0", b"]"]
    one = client.chance.choice([*before, *behind])
    return client.body() + one if one in behind else one + client.body()


def not_a_number(client: Client) -> bytes:
    return client.body().replace(b"100", b"NaN")


TURNS: list[Callable[[Client], bytes]] = [
    *(edited, edited, edited, edited, other_fields, other_order, other_order, other_style, escaped_name),
    *(two_of_them, strange_messages, nested, broken, with_more, not_a_number),
]


def compare(seed: int, clients: int, turns: int) -> tuple[int, int]:
    """Read requests of some clients in both ways: how many there were, and how many were read in parts."""
    chance = random.Random(seed)
    known, count, parts = Beginnings(200_000), 0, 0
    agents = [Client(chance) for _ in range(clients)]
    for _ in range(turns):
        client = chance.choice(agents)
        if chance.random() < 0.05:
            # A sub-agent shares its beginning.
            agents[chance.randrange(clients)] = client = copy.deepcopy(client)
            client.chance = chance
        if len(client.messages) > 60:
            del client.messages[3:]
        if not client.messages:
            client.messages = [client.message()]
        body = client.turn()
        whole = read_ask(body, client.route, "p")
        found, in_parts = read(known, body, client.route)
        if found != whole:
            raise AssertionError(f"{body[:200]!r}... is read otherwise (seed {seed})")
        alone = read_conversation(body, client.route)
        assert alone is None or alone.ask._replace(payer="p") == whole
        assert known.cost <= 200_000
        count, parts = count + 1, parts + in_parts
    return count, parts


@pytest.mark.parametrize("seed", range(5))
def test_bodies_of_all_kinds_are_read_alike(seed: int) -> None:
    count, parts = compare(seed, clients=6, turns=400)
    assert parts > count // 4


def chat(messages: int, text: str = "word " * 20, **fields: Any) -> bytes:
    """A conversation of so many messages, with its other fields behind them."""
    said = [{"role": "user", "content": f"{number} {text}"} for number in range(messages)]
    return orjson.dumps({"messages": said, "model": "m", "tools": [{"name": "t"}], "stream": True} | fields)


def test_only_what_is_new_is_read_and_what_makes_each_block_another_makes_all_of_it_new() -> None:
    known = Beginnings()
    read(known, chat(50), "chat")
    assert unread(known, chat(50)) == 0
    for same in ({"max_tokens": 7}, {"seed": 1}, {"tool_choice": "required"}, {"metadata": {"turn": 9}}):
        assert unread(known, chat(50, **same)) == 0
    others: list[Json] = [{"tools": []}, {"model": "n"}, {"cache_salt": "s"}]
    for other in others:
        assert unread(known, chat(50, **other)) > 4000
    # An edit costs what stands behind it.
    assert 2000 < unread(known, chat(50).replace(b'"25 word', b'"25 thing')) < 3500
    assert unread(known, chat(51)) == len(chat(51)) - len(chat(50))
    assert read(known, chat(51), "chat") == (read_ask(chat(51), "chat", "p"), True)
    assert unread(known, chat(51)) == 0


def test_conversations_share_what_they_have_in_common() -> None:
    known = Beginnings()
    read(known, chat(50), "chat")
    before = known.cost
    others = [chat(50)[:-60].replace(b"49 word", b"%d thing" % n) + chat(50)[-60:] for n in range(20)]
    for other in others:
        read(known, other, "chat")
    assert known.cost - before < 20 * 2500
    # Of many that go on from the same place, the last few are known to their end.
    assert all(unread(known, other) < 400 for other in others)
    assert unread(known, others[-1]) == 0


def test_nobody_is_faster_for_what_another_has_sent() -> None:
    known = Beginnings()
    read(known, chat(50), "chat", "alice")
    theirs = known.find(chat(50), "chat", "bob")
    assert theirs is not None
    assert (theirs.at, theirs.path[1:]) == (theirs.begin, [])
    assert theirs.frame.root is not known.find(chat(50), "chat", "alice").frame.root  # type: ignore[union-attr]


def test_who_has_half_of_the_memory_loses_its_own_and_nobody_elses() -> None:
    known = Beginnings(150_000)
    read(known, chat(50), "chat", "alice")
    for number in range(100):
        read(known, chat(50, f"{number} " * 20), "chat", "greedy")
    assert known.cost <= 150_000
    assert unread(known, chat(50), payer="alice") == 0
    assert unread(known, chat(50, "0 " * 20), payer="greedy") > 0
    assert unread(known, chat(50, "99 " * 20), payer="greedy") == 0


def test_of_very_many_payers_those_are_known_that_came_last() -> None:
    known = Beginnings(100_000)
    for number in range(100):
        read(known, chat(50), "chat", f"p{number}")
    assert known.cost <= 100_000
    assert unread(known, chat(50), payer="p99") == 0
    assert unread(known, chat(50), payer="p0") > 0


def test_all_that_is_kept_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tracemalloc.start()
    try:
        known = Beginnings(1_000_000)
        # Each message is a run, which is the most that is kept for so many bytes.
        for number in range(300):
            body = chat(20, f"{number} {'x' * 300}", user=f"u{number}")
            read(known, body, "chat", f"p{number % 3}")
        del body
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 900_000 < known.cost <= 1_000_000
    assert taken <= 1_000_000


def test_what_was_read_elsewhere_is_known_here_however_many_messages_it_has() -> None:
    """All of it is too much for one turn of the loop, its next turn is not."""
    for many in (50, LIMITS.prompt_pieces // 3):
        known, body = Beginnings(), chat(many)
        place = known.find(body, "chat", "p")
        assert place is not None
        assert many == 50 or known.read(place, "p") is None
        elsewhere = read_conversation(body, "chat")
        assert elsewhere is not None
        known.learn(body, elsewhere, "p")
        assert unread(known, body) == 0
        whole = read_conversation(chat(many + 2), "chat")
        assert whole is not None
        assert read(known, chat(many + 2), "chat") == (whole.ask._replace(payer="p"), True)
