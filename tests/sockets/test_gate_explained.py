"""Requests that ask why they go where they go: from whom, and what the answer's head tells."""

from __future__ import annotations

from functools import partial

from tests.wire.client import chat, get
from tests.wire.replies import Reply
from tests.wire.stage import live
from tests.wire.stage import stage as any_stage
from tests.wire.unit import STREAM, Received

EXPLAIN = "x-cellgate-explain"
TOKEN = "x-cellgate-token: s3cret\r\n"
stage = partial(any_stage, admin_token="s3cret")


def asking(value: str = "1") -> bytes:
    return chat(head=f"{EXPLAIN}: {value}\r\n{TOKEN}")


def told(reply: Reply) -> dict[str, str]:
    """The words of the line."""
    line = reply.get(EXPLAIN)
    assert line is not None
    return dict(word.split("=", 1) for word in line.split(" "))


@live
async def test_the_answer_tells_what_its_unit_was_taken_to_cost() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        reply = await client.ask(asking())
        words = told(reply)
        assert (reply.status, words["unit"]) == (200, reply.get("x-cellgate-unit"))
        terms = [float(value) for name, value in words.items() if name.endswith("_s")]
        total_s, *parts = terms[:-1]
        assert total_s > 0.0
        assert abs(total_s - sum(parts)) < 0.001
        assert 0.0 <= float(words["waited_s"]) < 5.0
        assert words["cached_tokens"] == "0"
        # Neither the question nor, from a unit, an answer to it crosses.
        assert [request.all(EXPLAIN) for unit in here.units for request in unit.requests] == [[]]


@live
async def test_who_does_not_ask_is_not_told() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for request in (chat(), asking("0")):
            assert (await client.ask(request)).get(EXPLAIN) is None


@live
async def test_strangers_may_not_ask() -> None:
    async with stage(STREAM) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        for address in ("203.0.113.7", peer.peer):
            peer.peer = address
            reply = await client.ask(chat(head=f"{EXPLAIN}: 1\r\n"))
            assert (reply.status, reply.error["code"]) == (403, "not_trusted")
        assert here.received == 1
        assert b"cellgate_forged_placements_total 2.0" in await here.plane.metrics.render()
        assert (await client.ask(get("/readyz", f"{EXPLAIN}: 1\r\n"))).status == 200


@live
async def test_the_unit_that_answers_is_the_one_that_is_explained() -> None:
    async def fail(request: Received) -> None:
        request.connection.reset()

    async with stage(fail, STREAM) as here, here.client() as client:
        reply = await client.ask(asking())
        assert (reply.status, told(reply)["unit"]) == (200, "u1")


@live
async def test_a_request_that_names_its_unit_is_explained_as_well() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        reply = await client.ask(chat(head=f"{EXPLAIN}: 1\r\nx-cellgate-unit: u1\r\n{TOKEN}"))
        assert (reply.status, reply.get("x-cellgate-unit"), told(reply)["unit"]) == (200, "u1", "u1")


@live
async def test_strangers_who_name_a_unit_and_ask_are_refused_for_the_unit() -> None:
    async with stage(STREAM) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        peer.peer = "203.0.113.7"
        reply = await client.ask(chat(head=f"{EXPLAIN}: 1\r\nx-cellgate-unit: u0\r\n"))
        assert (reply.status, reply.error["code"]) == (403, "not_trusted")
        assert "chooses its unit" in reply.error["message"]
