"""The model in a form: read wherever it stands, replaced alone, and doubted where it is not sure."""

from __future__ import annotations

from email.parser import BytesParser
from email.policy import HTTP
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.models import find_model, with_form_model

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


def as_mail(head: list[bytes], body: bytes) -> list[tuple[str, bytes]]:
    """What Python's own parser of such bodies reads."""
    mail = BytesParser(policy=HTTP).parsebytes(b"".join(head) + b"\r\n" + body)
    parts = list(mail.iter_parts())
    assert all(part["content-disposition"] for part in parts)
    named = [part["content-disposition"].params["name"] for part in parts]
    return list(zip(named, [cast(bytes, part.get_payload(decode=True)) for part in parts], strict=True))


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
def test_it_is_found_and_replaced_between_all_other_parts(
    before: list[Part], after: list[Part], name: str
) -> None:
    body = form([*before, field("model", name.encode()), *after])
    found = find_model(lines(), body)
    assert found is not None
    assert found.name == name
    assert with_form_model(lines(), body, "other") == form([*before, field("model", b"other"), *after])


def test_python_reads_the_same() -> None:
    body = form([file(b"\0\xff\r\n--x" * 100), field("model", b"gpt"), field("stream", b"true")])
    written = with_form_model(lines(), body, "whisper")
    assert written is not None
    read = as_mail(lines(), written)
    assert [name for name, _ in read] == ["file", "model", "stream"]
    assert read[1][1] == b"whisper"


SPELT = {
    "token": "Content-Disposition: form-data; name=model",
    "lower case": 'content-disposition: form-data;name="model"',
    "more lines": 'Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"',
    "other parameters": 'Content-Disposition: form-data; x=y; NAME = "model"',
    "its length": 'Content-Disposition: form-data; name="model"\r\nContent-Length: 4',
}


@pytest.mark.parametrize("head", SPELT.values(), ids=SPELT)
def test_all_usual_ways_to_write_a_field_are_read(head: str) -> None:
    body = form([(head, b"tiny")])
    found = find_model(lines(), body)
    assert found is not None
    assert found.name == "tiny"
    written = with_form_model(lines(), body, "another")
    assert written is not None
    assert b"\r\n\r\nanother\r\n--" in written
    assert b"Content-Length" not in written


@pytest.mark.parametrize(
    "kind", [f'boundary="{MARK}"', f"charset=utf-8; Boundary={MARK}", f"boundary={MARK} ; a=b"]
)
def test_all_usual_ways_to_write_a_boundary_are_read(kind: str) -> None:
    head = [f"content-type: Multipart/Form-Data; {kind}\r\n".encode()]
    assert find_model(head, b"a preamble\r\n" + form([field("model", b"tiny")])) is not None


TINY = field("model", b"tiny")
UNSURE = {
    "no form": ([b"content-type: text/plain\r\n"], form([TINY])),
    "no boundary": ([b"content-type: multipart/form-data\r\n"], form([TINY])),
    "two types": (lines() + lines("x"), form([TINY])),
    "none": (lines(), form([file(b"x")])),
    "empty": (lines(), b""),
    "no part": (lines(), form([])),
    "cut off": (lines(), form([TINY])[: -len(MARK) - 8]),
    "two models": (lines(), form([TINY, field("model", b"large")])),
    "two models with a file between them": (
        lines(),
        form([TINY, file(b"\0" * 5_000_000), field("model", b"x")]),
    ),
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
    assert find_model(head, body) is None
    assert with_form_model(head, body, "x") is None


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=4))
def test_no_bytes_make_it_fail(noise: bytes, cuts: list[int]) -> None:
    body = form([file(noise), TINY, file(noise)])
    for cut in cuts:
        body = body[:cut] + noise[: cut % 7] + body[cut + cut % 5 :]
    found = find_model(lines(), body)
    assert found is None or found.name == body[found.begin : found.end].decode()
