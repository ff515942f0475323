"""Requests that name the unit they are for: from whom, where they go, what comes back when they cannot."""

from __future__ import annotations

from functools import partial

import pytest

from cellgate.proxy.config.settings import gates_token
from cellgate.router.nouns import Evidence, Sign, Strength
from tests.wire.client import chat, get, post
from tests.wire.replies import Reply
from tests.wire.stage import Stage, live
from tests.wire.stage import stage as any_stage
from tests.wire.unit import STREAM, Received, whole

UNIT = "x-cellgate-unit"
ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
TOKEN = "x-cellgate-token"
SECRET = "s3cret"
stage = partial(any_stage, admin_token=SECRET)


def to(*units: str, field: str = UNIT) -> bytes:
    """A chat request with a place."""
    return chat(head=f"{field}: {','.join(units)}\r\n{TOKEN}: {SECRET}\r\n")


def at(here: Stage, number: int) -> str:
    """Where a unit is, as an endpoint picker knows it."""
    return f"127.0.0.1:{here.units[number].port}"


def down(here: Stage, name: str) -> None:
    here.plane.prober.observe(
        Evidence(name, Sign.BAD, Strength.FATAL, "test", "the test says so", here.gateway.now())
    )


def refused(reply: Reply) -> tuple[int, str | None, object]:
    """Status, reason and code; a refusal can be retried elsewhere, so it says when."""
    assert reply.get("retry-after") == "1"
    return reply.status, reply.get("x-cellgate-reason"), reply.error["code"]


@live
async def test_a_request_goes_to_the_unit_it_names_and_does_not_show_it_the_name() -> None:
    async with stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        for number in (2, 2, 0):
            reply = await client.ask(to(f"u{number}"))
            assert (reply.status, reply.get(UNIT)) == (200, f"u{number}")
        assert [len(unit.requests) for unit in here.units] == [1, 0, 2]
        assert here.units[2].requests[0].all(UNIT) == []


@pytest.mark.parametrize("field", [UNIT, ENDPOINT, SUBSET])
@live
async def test_without_the_token_it_is_forged_from_whatever_address(field: str) -> None:
    async with stage(STREAM, trusted=("203.0.113.0/24",)) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        for address in (peer.peer, "203.0.113.7", "198.51.100.1"):
            peer.peer = address
            reply = await client.ask(chat(head=f"{field}: u0\r\n"))
            assert (reply.status, reply.error["code"]) == (403, "not_trusted")
        assert here.received == 1
        assert b"cellgate_forged_placements_total 3.0" in await here.plane.metrics.render()
        # The gate's own answers are for everyone, whoever sends what along.
        assert (await client.ask(get("/readyz", f"{field}: u0\r\n"))).status == 200


@live
async def test_a_gate_with_the_same_admin_token_may_name_units() -> None:
    async with stage(STREAM) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        peer.peer = "203.0.113.7"
        reply = await client.ask(chat(head=f"{UNIT}: u0\r\n{TOKEN}: {gates_token(SECRET)}\r\n"))
        assert (reply.status, reply.get(UNIT)) == (200, "u0")


@pytest.mark.parametrize(
    ("token", "shown", "status"),
    [("s3cret", "s3cret", 200), ("s3cret", "s3cre", 403), ("s3cret", "", 403), (None, "", 403)],
)
@live
async def test_who_shows_the_admin_token_is_trusted_and_units_do_not_see_it(
    token: str | None, shown: str, status: int
) -> None:
    async with stage(STREAM, admin_token=token) as here, here.client() as client:
        await client.ask(chat())
        (peer,) = here.gateway.clients
        peer.peer = "203.0.113.7"
        for head in (f"{UNIT}: u0\r\n", "x-cellgate-explain: 1\r\n"):
            reply = await client.ask(chat(head=f"{head}{TOKEN}: {shown}\r\n"))
            assert reply.status == status
        assert all(request.all(TOKEN) == [] for request in here.units[0].requests)


@live
async def test_a_unit_that_cannot_take_it_is_refused_for_with_the_reason() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        assert refused(await client.ask(to("nobody"))) == (503, "no_unit", "not_here")
        here.plane.set_drain("u0", True)
        assert refused(await client.ask(to("u0"))) == (503, "drained", "not_here")
        here.plane.set_drain("u0", False)
        down(here, "u0")
        assert refused(await client.ask(to("u0"))) == (503, "down", "not_here")
        assert here.received == 0


@live
async def test_a_unit_without_room_is_not_waited_for() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        state = here.plane.board.units["u0"]
        state.full_until = here.gateway.now() + 60.0
        assert refused(await client.ask(to("u0"))) == (503, "full", "not_here")
        assert not len(here.plane.router.queue)


@live
async def test_a_unit_that_dies_under_it_is_told_of_and_no_other_is_tried() -> None:
    async def cut(request: Received) -> None:
        request.connection.reset()

    async with stage(cut, STREAM) as here, here.client() as client:
        status, reason, code = refused(await client.ask(to("u0")))
        assert (status, code) == (503, "not_here")
        assert reason in ("closed_early", "stale_connection")
        assert len(here.units[1].requests) == 0


@live
async def test_the_units_own_words_go_on_as_they_are() -> None:
    busy = whole(b'{"error":{"message":"queue is full"}}', "503 Service Unavailable")
    async with stage(busy, STREAM) as here, here.client() as client:
        reply = await client.ask(to("u0"))
        assert (reply.status, reply.get("x-cellgate-reason")) == (503, None)
        assert reply.json == {"error": {"message": "queue is full"}}


@live
async def test_an_endpoint_picker_names_addresses_the_best_first() -> None:
    async with stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        both = (at(here, 2), at(here, 1))
        assert (await client.ask(to(*both, field=ENDPOINT))).get(UNIT) == "u2"
        here.plane.set_drain("u2", True)
        assert (await client.ask(to(*both, field=ENDPOINT))).get(UNIT) == "u1"
        here.plane.set_drain("u1", True)
        assert refused(await client.ask(to(*both, field=ENDPOINT))) == (503, "drained", "not_here")
        assert refused(await client.ask(to("192.0.2.1:80", field=ENDPOINT))) == (503, "no_unit", "not_here")


@live
async def test_after_a_failure_the_next_address_is_tried() -> None:
    error = whole(status="500 Internal Server Error")
    async with stage(STREAM, STREAM, error) as here, here.client() as client:
        reply = await client.ask(to(at(here, 2), at(here, 1), field=ENDPOINT))
        assert (reply.status, reply.get(UNIT)) == (200, "u1")
        assert len(here.units[0].requests) == 0


@live
async def test_a_subset_bounds_the_choice() -> None:
    async with stage(STREAM, STREAM, STREAM) as here, here.client() as client:
        inside = (at(here, 0), at(here, 2))
        units = [(await client.ask(to(*inside, field=SUBSET))).get(UNIT) for _ in range(4)]
        assert sorted(units, key=str) == ["u0", "u0", "u2", "u2"]
        down(here, "u0")
        down(here, "u2")
        assert refused(await client.ask(to(*inside, field=SUBSET))) == (503, "no_unit", "not_here")
        assert len(here.units[1].requests) == 0


@live
async def test_a_choice_outside_of_the_subset_is_none() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        head = f"{ENDPOINT}: {at(here, 1)}, {at(here, 0)}\r\n{SUBSET}: {at(here, 0)}\r\n{TOKEN}: {SECRET}\r\n"
        assert (await client.ask(chat(head=head))).get(UNIT) == "u0"


@live
async def test_who_names_the_unit_knows_which_one_made_a_response() -> None:
    async with stage(whole(b'{"id":"resp_1"}'), whole(b'{"id":"resp_2"}')) as here, here.client() as client:
        reply = await client.ask(get("/v1/responses/resp_9", f"{UNIT}: u1\r\n{TOKEN}: {SECRET}\r\n"))
        assert (reply.status, reply.get(UNIT)) == (200, "u1")
        follows = post(
            b'{"previous_response_id":"resp_9"}', f"{UNIT}: u0\r\n{TOKEN}: {SECRET}\r\n", "/v1/responses"
        )
        assert (await client.ask(follows)).get(UNIT) == "u0"


@live
async def test_a_gate_that_refuses_for_its_unit_is_no_answer() -> None:
    """The other side: the unit's address is a gate's, and that one has just lost the unit."""
    gone = whole(status="503 Service Unavailable", head="x-cellgate-reason: down\r\n")
    async with stage(gone, STREAM) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(chat())
            assert (reply.status, reply.get(UNIT)) == (200, "u1")
        verdicts = {state.unit.name: state.case.verdict.value for state in here.plane.board}
        assert verdicts == {"u0": "suspect", "u1": "up"}


@live
async def test_a_gate_whose_unit_is_full_costs_of_the_retry_budget_and_blames_nobody() -> None:
    full = whole(status="503 Service Unavailable", head="x-cellgate-reason: full\r\n")
    async with stage(full, STREAM) as here, here.client() as client:
        assert (await client.ask(chat())).get(UNIT) == "u1"
        assert all(state.case.verdict.value == "up" for state in here.plane.board)
