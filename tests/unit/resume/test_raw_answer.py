"""Raw text is split as vLLM's parsers split it, wherever it is cut; what is in another format is refused."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.resume.raw import RawAnswer, RawPart
from cellgate.proxy.resume.shown import MismatchError

ARGUMENTS = '{"q": "a {\\"}<tool_call>", "in": [1, {"x": "}]"}], "empty": {}}'
CALL = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>{"name":"open","arguments":{}}</tool_call>'
RAW = f"<think>\nHm < think> so.</think>\n\nI <look>. {CALL}\n{OTHER}"


def split(raw: Iterable[str], *, is_reasoning: bool = True, calls: bool = True) -> list[tuple[RawPart, str]]:
    """The parts, with neighbours of one kind joined."""
    answer, out = RawAnswer(is_reasoning=is_reasoning, calls=calls), list[tuple[RawPart, str]]()
    for text in raw:
        for piece in answer.feed(text):
            if out and out[-1][0] is piece.part is not RawPart.NAME:
                out[-1] = (piece.part, out[-1][1] + piece.text)
            else:
                out.append((piece.part, piece.text))
    return out


WHOLE = [
    (RawPart.REASONING, "\nHm < think> so."),
    (RawPart.TEXT, "\n\nI <look>. "),
    (RawPart.NAME, "find"),
    (RawPart.ARGUMENTS, ARGUMENTS),
    (RawPart.NAME, "open"),
    (RawPart.ARGUMENTS, "{}"),
]


@given(st.lists(st.integers(1, 12), min_size=1))
def test_an_answer_is_split_alike_wherever_it_is_cut(sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in sizes * len(RAW):
        pieces.append(RAW[at : at + size])
        at += size
    assert split(pieces) == WHOLE
    assert orjson.loads(WHOLE[3][1])["in"][1]["x"] == "}]"


def test_reasoning_that_the_prompt_has_opened_has_no_marker_of_its_own() -> None:
    assert split(["Hm", " so.</thi", "nk>Yes"]) == [(RawPart.REASONING, "Hm so."), (RawPart.TEXT, "Yes")]


def test_without_tools_and_reasoning_all_is_text() -> None:
    assert split([RAW], is_reasoning=False, calls=False) == [(RawPart.TEXT, RAW)]


def test_what_may_be_the_beginning_of_a_marker_is_held_back() -> None:
    assert split(["So <tool"], is_reasoning=False) == [(RawPart.TEXT, "So ")]
    assert split(["So <tool", "box>"], is_reasoning=False) == [(RawPart.TEXT, "So <toolbox>")]


def test_white_space_in_arguments_waits_for_what_follows() -> None:
    begun = '<tool_call>{"name": "f", "arguments": {"a":  '
    assert split([begun], is_reasoning=False)[-1] == (RawPart.ARGUMENTS, '{"a":')
    assert split([begun, "1}}"], is_reasoning=False)[-1] == (RawPart.ARGUMENTS, '{"a":  1}')


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function=find>\n<parameter=q>\n1</parameter></function></tool_call>",
        '<tool_call>{"arguments": {}, "name": "find"}</tool_call>',
        '<tool_call>{"name": "find", "arguments": "a text"}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}}}</tool_call>',
        "<tool_call>" + " " * 5000,
    ],
)
def test_calls_in_another_format_are_refused(call: str) -> None:
    with pytest.raises(MismatchError):
        split([call], is_reasoning=False)
