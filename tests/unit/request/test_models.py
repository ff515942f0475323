"""The model of a request: which serves a name, and another one in a body or a form."""

from __future__ import annotations

import json
import time
from collections import Counter
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.control.refusals import NAMES_SHOWN, Refusals
from cellgate.proxy.request.models import (
    LocalEndpoints,
    ModelChoice,
    choice_of,
    find_model,
    with_form_model,
    with_model,
)
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Models, Refusal, Unit
from tests.unit.router.fleets import board_of

SPLIT = {"gpt": (("v1", 95.0), ("v2", 5.0))}
REQUESTS = 10_000


def sessions(choice: ModelChoice) -> dict[str, str]:
    return {f"session-{n}": choice.served("gpt", f"session-{n}") for n in range(REQUESTS)}


def test_a_split_is_as_configured_and_only_sessions_between_the_borders_move_when_weights_change() -> None:
    before = sessions(ModelChoice(SPLIT, {}))
    assert Counter(before.values())["v2"] / REQUESTS == pytest.approx(0.05, abs=0.007)
    assert sessions(ModelChoice(SPLIT, {})) == before
    after = sessions(ModelChoice({"gpt": (("v1", 80.0), ("v2", 20.0))}, {}))
    moved = [session for session in before if before[session] != after[session]]
    assert len(moved) / REQUESTS == pytest.approx(0.15, abs=0.02)
    assert {after[session] for session in moved} == {"v2"}


def test_names_are_split_independently() -> None:
    choice = ModelChoice({**SPLIT, "other": SPLIT["gpt"]}, {})
    both = sum(
        choice.served("gpt", f"{n}") == choice.served("other", f"{n}") == "v2" for n in range(REQUESTS)
    )
    assert both < REQUESTS * 0.01


def test_other_names_are_models_and_fallbacks_are_those_of_the_name_else_of_the_model() -> None:
    assert ModelChoice(SPLIT, {}).served("v7", "session") == "v7"
    assert ModelChoice({"gpt": (("llama", 1.0),)}, {}).served("gpt", "") == "llama"
    choice = ModelChoice(SPLIT, {"gpt": ("small",), "v2": ("v1", "small")})
    assert choice.others("gpt", "v2") == ("small",)
    assert choice.others("v2", "v2") == ("v1", "small")
    assert choice.others("v3", "v3") == ()
    assert choice_of({}, {}) is None


# Another model in a body: only its bytes change, wherever it stands.

WINDOW = LIMITS.model_search_bytes
WORDS = st.text(alphabet='model"\\{}[]:, éx', max_size=12)
VALUES = st.recursive(
    WORDS | st.just("gpt"),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(WORDS | st.just("model"), each, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (b'{ "model" :\n "gpt" , "x":1}', b'{ "model" :\n "v\\"1" , "x":1}'),
        (b'{"model":"g\\u0070t"}', b'{"model":"v\\"1"}'),
        (b'{"x\\"model":"gpt","model":"gpt"}', b'{"x\\"model":"gpt","model":"v\\"1"}'),
        (b'{"model":"gpt","model":"gpt"}', b'{"model":"v\\"1","model":"v\\"1"}'),
    ],
)
def test_only_the_name_is_replaced(body: bytes, after: bytes) -> None:
    assert with_model(body, "gpt", 'v"1') == after


@given(st.dictionaries(WORDS, VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_all_else_stays(data: dict[str, object], is_last: bool, indent: int | None) -> None:
    data.pop("model", None)
    whole = {**data, "model": "gpt"} if is_last else {"model": "gpt", **data}
    after = with_model(json.dumps(whole, indent=indent).encode(), "gpt", "v1")
    assert after is not None
    assert orjson.loads(after) == {**whole, "model": "v1"}


def test_in_a_large_body_it_is_found_at_both_ends() -> None:
    text = "x" * (3 * WINDOW)
    for whole in ({"model": "gpt", "a": text}, {"a": text, "model": "gpt"}):
        after = with_model(json.dumps(whole).encode(), "gpt", "v1")
        assert after is not None
        assert json.loads(after)["model"] == "v1"
    assert with_model(json.dumps({"a": text, "model": "gpt", "b": text}).encode(), "gpt", "v1") is None
    inner = {"a": text, "metadata": {"model": "gpt"}, "model": "gpt"}
    assert with_model(json.dumps(inner).encode(), "gpt", "v1") is None


@pytest.mark.alone
def test_a_body_that_is_full_of_models_takes_no_longer_than_one_that_is_not() -> None:
    """Each mention was once looked up from the beginning of the body: a minute for 140 kB."""
    inner = b'{"model":"gpt"}'
    body = b'{"model":"gpt","messages":[' + b",".join([inner] * 8000) + b"]}"
    begun = time.process_time()
    assert with_model(body, "gpt", "v1") == body.replace(b"gpt", b"v1", 1)
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"gpt","b":{"model":"gpt"}}'
    assert with_model(deep, "gpt", "v1") is None
    others = b'{"messages":[' + b",".join([b'{"model":"other"}'] * 60_000) + b"]}"
    assert with_model(others[:-1] + b',"model":"gpt"}', "gpt", "v1") is None
    assert time.process_time() - begun < 0.5


def test_what_was_not_read_to_its_end_is_not_guessed() -> None:
    """Of a large body, a mention at its end may be one in a quotation."""
    deep = b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b',"model":"gpt","b":"%b","c":{"model":"gpt"}}'
    assert with_model(deep % (b"x" * (3 << 20)), "gpt", "v1") is None


# The model in a form: read wherever it stands, replaced alone, and doubted where it is not sure.

MARK = "----WebKitFormBoundary7MA4YWxkTrZu0gW"
Part = tuple[str, bytes]


def lines(mark: str = MARK) -> list[bytes]:
    return [f"content-type: multipart/form-data; boundary={mark}\r\n".encode()]


def form(parts: list[Part], mark: str = MARK) -> bytes:
    """`parts` are heads, without their last empty line, and contents."""
    return (
        b"".join(
            f"--{mark}\r\n".encode() + head.encode() + b"\r\n\r\n" + content + b"\r\n"
            for head, content in parts
        )
        + f"--{mark}--\r\n".encode()
    )


def field(name: str, value: bytes) -> Part:
    return f'Content-Disposition: form-data; name="{name}"', value


def file(value: bytes) -> Part:
    head = 'Content-Disposition: form-data; name="file"; filename="a; name=\\"model\\".wav"'
    return f"{head}\r\nContent-Type: audio/wav", value


def name_in(head: list[bytes], body: bytes) -> str | None:
    """The model that a form names, if that is sure."""
    found = find_model(head, body)
    return found and found.name


def as_mail(head: list[bytes], body: bytes) -> list[bytes]:
    """The contents of parts, as Python's own parser of such bodies reads them."""
    mail = BytesParser(policy=HTTP).parsebytes(b"".join(head) + b"\r\n" + body)
    return [cast(bytes, part.get_payload(decode=True)) for part in mail.iter_parts()]


audio = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([b"\r\n", b"--", MARK[:-1].encode(), b"\r", b"\n", b"x"])).map(b"".join),
)


@given(
    st.lists(
        st.one_of(audio.map(file), st.binary(max_size=9).map(lambda b: field("language", b.hex().encode())))
    ),
    st.lists(audio.map(file)),
    st.sampled_from(["whisper-1", "org/Whisper large", "模型", "x"]),
)
def test_it_is_found_and_replaced_between_others(before: list[Part], after: list[Part], name: str) -> None:
    body = form([*before, field("model", name.encode()), *after])
    assert name_in(lines(), body) == name
    assert with_form_model(lines(), body, "other") == form([*before, field("model", b"other"), *after])


SPELT = {
    "token": "Content-Disposition: form-data; name=model",
    "lower case": 'content-disposition: form-data;name="model"',
    "more lines": 'Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"',
    "other parameters": 'Content-Disposition: form-data; x=y; NAME = "model"',
    "its length": 'Content-Disposition: form-data; name="model"\r\nContent-Length: 4',
}


@pytest.mark.parametrize("head", SPELT.values(), ids=SPELT)
def test_all_usual_ways_to_write_a_field_are_read(head: str) -> None:
    body = form([file(b"\0\xff\r\n--x" * 100), (head, b"tiny"), field("stream", b"true")])
    assert name_in(lines(), body) == "tiny"
    written = with_form_model(lines(), body, "another")
    assert written is not None
    assert as_mail(lines(), written)[1:] == [b"another", b"true"]
    assert b"Content-Length" not in written


def test_all_usual_ways_to_write_a_boundary_are_read() -> None:
    for kind in (f'boundary="{MARK}"', f"charset=utf-8; Boundary={MARK}", f"boundary={MARK} ; a=b"):
        head = [f"content-type: Multipart/Form-Data; {kind}\r\n".encode()]
        assert name_in(head, b"a preamble\r\n" + form([field("model", b"tiny")])) == "tiny"


TINY = field("model", b"tiny")
UNSURE = {
    "no form": ([b"content-type: text/plain\r\n"], form([TINY])),
    "no boundary": ([b"content-type: multipart/form-data\r\n"], form([TINY])),
    "two types": (lines() + lines("x"), form([TINY])),
    "none": (lines(), form([file(b"x")])),
    "empty": (lines(), b""),
    "no part": (lines(), form([])),
    "cut off": (lines(), form([TINY])[: -len(MARK) - 8]),
    "two models": (lines(), form([TINY, file(b"\0" * 5_000_000), field("model", b"large")])),
    "a name as in mails": (
        lines(),
        form([TINY, ("Content-Disposition: form-data; name*=utf-8''model", b"x")]),
    ),
    "two names": (lines(), form([TINY, ('Content-Disposition: form-data; name="a"; name="model"', b"x")])),
    "a folded line": (lines(), form([TINY, ('Content-Disposition: form-data;\r\n name="model"', b"x")])),
    "a bare line feed": (lines(), form([TINY, ('X: y\nContent-Disposition: form-data; name="model"', b"x")])),
    "a longer delimiter": (lines(), form([file(f"\r\n--{MARK}x\r\n".encode()), TINY])),
    "no text": (lines(), form([field("model", b"\xff")])),
    "too long": (lines(), form([field("model", b"x" * (LIMITS.name_chars + 1))])),
    "too many parts": (lines(), form([*[field("a", b"")] * LIMITS.form_parts, TINY])),
    "a long head": (
        lines(),
        form([(f'X: {"y" * 9000}\r\nContent-Disposition: form-data; name="a"', b""), TINY]),
    ),
}


@pytest.mark.parametrize(("head", "body"), UNSURE.values(), ids=UNSURE)
def test_what_programs_may_read_differently_names_no_model(head: list[bytes], body: bytes) -> None:
    assert name_in(head, body) is None
    assert with_form_model(head, body, "x") is None


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=4))
def test_no_bytes_make_it_fail(noise: bytes, cuts: list[int]) -> None:
    body = form([file(noise), TINY, file(noise)])
    for cut in cuts:
        body = body[:cut] + noise[: cut % 7] + body[cut + cut % 5 :]
    found = find_model(lines(), body)
    assert found is None or found.name == body[found.begin : found.end].decode()


# What the gate answers itself: the list of models, and that a model is none of them.


@pytest.fixture
def board() -> Board:
    return board_of(*(Unit(name, "c", f"http://{name}") for name in "ab"))


def cards(own: LocalEndpoints) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(own.answer(b"/v1/models", stopping=False)[1])["data"]
    return found


def listed(own: LocalEndpoints) -> list[str]:
    return [card["id"] for card in cards(own)]


def test_the_list_of_models_is_the_union_and_follows_each_unit(board: Board) -> None:
    own = LocalEndpoints(board)
    assert listed(own) == []
    board.set_models(Models("a", ("x", "y"), 0.0))
    board.set_models(Models("b", ("y", "z"), 0.0))
    assert listed(own) == listed(own) == ["x", "y", "z"]
    # It is not made anew for each client.
    assert own.answer(b"/v1/models", stopping=False)[1] is own.answer(b"/v1/models", stopping=False)[1]
    board.set_models(Models("b", ("w",), 1.0))
    assert listed(own) == ["w", "x", "y"]


def test_a_refusal_names_some_models_and_counts_the_rest(board: Board) -> None:
    refusals = Refusals(board)
    board.set_models(Models("a", tuple(f"m{n:04}" for n in range(1000)), 0.0))
    message = refusals.explain(Refusal.UNKNOWN_MODEL, Ask("none"), 0.0).message
    assert message.endswith(f"serve: {', '.join(f'm{n:04}' for n in range(NAMES_SHOWN))} and 980 more")
    board.set_models(Models("a", ("only",), 1.0))
    assert refusals.explain(Refusal.UNKNOWN_MODEL, Ask("none"), 0.0).message.endswith("serve: only")


def test_what_units_say_of_a_model_is_passed_on_with_the_smallest_length(board: Board) -> None:
    own = LocalEndpoints(board)
    facts: dict[str, str | int] = {"created": 7, "owned_by": "vllm", "root": "/models/x"}
    board.set_models(Models("a", ("x",), 0.0, cards={"x": {**facts, "max_model_len": 4096}}))
    board.set_models(Models("b", ("x", "y"), 0.0, cards={"x": {**facts, "max_model_len": 2048}}))
    first, second = cards(own)
    assert first == {"id": "x", "object": "model", **facts, "max_model_len": 2048}
    assert second == {"id": "y", "object": "model", "created": 0, "owned_by": "cellgate"}
    board.set_models(Models("b", ("x", "y"), 0.0, cards={"x": {**facts, "max_model_len": 8192}}))
    assert cards(own)[0]["max_model_len"] == 4096
