"""Clients that lose their connection read on where they were, and nobody else does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.extras import reconnect
from tests.scenarios.harness import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Stage
from tests.scenarios.returning import ON, ask_returning, joined, last_id, whole_events
from tests.scenarios.seeds import seeds
from tests.scenarios.visit import chat, encode
from tests.sim.agent_speech import AGENT
from tests.sim.chaos import STRIKES, Chaos
from tests.sim.client import Manner
from tests.sim.conversation import End, Reply
from tests.sim.engine import CANARY
from tests.sim.timing import USUAL, Timing

RESUME_S = 5.0
AFTER_3 = Manner(leave_after_events=3)
KINDS = (
    {"path": CHAT},
    {"path": COMPLETIONS},
    {"path": MESSAGES, "temperature": 0},
    {"path": RESPONSES, "temperature": 0},
    {"path": CHAT, "messages": [{"role": "user", "content": AGENT}], "temperature": 0},
)


def make_stage(seed: int = 1, units: int = 2, resume_s: float = RESUME_S, timing: Timing = USUAL) -> Stage:
    return Stage(seed, units, resume_s=resume_s, timing=timing)


def is_working(stage: Stage) -> bool:
    """Whether any unit has a request of a client."""
    running = [sequence for engine in stage.engines.values() for sequence in engine.running]
    return not all(sequence.served.request_id.startswith(CANARY) for sequence in running)


async def back(
    stage: Stage, event_id: str, headers: dict[str, str] | None = None, *, path: str = CHAT
) -> Reply:
    asked = ON | {"last-event-id": event_id} | (headers or {})
    return await stage.client.request("POST", path, b"", asked)


async def left_after_3(stage: Stage, **headers: str) -> Reply:
    body = encode(chat("a prompt", max_tokens=40))
    return await stage.client.request("POST", CHAT, body, ON | headers, AFTER_3)


@pytest.mark.parametrize("seed", seeds(range(4)))
def test_clients_that_come_back_at_random_read_every_event_once_while_units_fail(seed: int) -> None:
    stage = make_stage(seed, 3)
    strikes = {
        name: STRIKES[name] for name in ("die", "wedge", "truncate streams", "error in streams", "reset")
    }

    async def scenario() -> None:
        chaos = Chaos(stage.world, list(stage.engines.values()), 1, strikes, (1.0, 4.0), (1.0, 8.0))
        visits = await asyncio.gather(*(_use(stage, Random(seed * 100 + user)) for user in range(8)))
        chaos.stop()
        # Who leaves before the head does not know how to come back.
        asked = [visit for each in visits for visit in each if visit.reply.end is not End.LEFT]
        assert all(visit.is_answered for visit in asked), [v.reply.error for v in asked if not v.is_answered]

    stage.play(scenario())
    assert stage.gate.metrics.responses["resume", 200] > 20


async def _use(stage: Stage, rng: Random) -> list:  # type: ignore[type-arg]
    return [await ask_returning(stage, rng, **rng.choice(KINDS)) for _ in range(6)]


def test_the_answer_goes_on_while_its_client_is_away_and_none_of_it_is_computed_twice() -> None:
    stage = make_stage()

    async def scenario() -> None:
        first = await left_after_3(stage)
        await asyncio.sleep(3.0)
        rest = await back(stage, last_id(first))
        assert rest.end is End.COMPLETE
        assert rest.headers["x-request-id"] == first.headers["x-request-id"]
        # Who loses this connection too, before its first event, asks for what is behind the same one.
        assert rest.headers["x-cellgate-resume"] == last_id(first)
        assert joined([first, rest]).is_done
        assert len(rest.events) == 43 - 3
        # All of it was there.
        assert rest.ended_s - rest.head_s < 0.1
        again = await back(stage, first.headers["x-cellgate-resume"])
        assert again.events == first.events + rest.events

    stage.play(scenario())
    assert sum(len(engine.served) for engine in stage.engines.values()) == 1


def test_after_its_time_the_unit_stops_and_a_client_that_comes_back_is_told() -> None:
    stage = make_stage(timing=Timing(0.05, 0.5))

    async def scenario() -> None:
        first = await left_after_3(stage)
        assert is_working(stage)
        await asyncio.sleep(RESUME_S + 0.6)
        assert not is_working(stage)
        late = await back(stage, last_id(first))
        assert late.status == 410
        assert late.error is not None
        assert late.error["code"] == "stream_gone"
        assert len(stage.gate.gateway.reconnects) == 0

    stage.play(scenario())


@pytest.mark.parametrize(
    "changed",
    [
        {"authorization": "Bearer another"},
        {"x-api-key": "mine"},
        {"last-event-id": "0.AAAAAAAAAAAAAAAAAAAAAA.3"},
        {"last-event-id": "3"},
    ],
)
def test_only_who_asked_gets_the_rest(changed: dict[str, str]) -> None:
    stage = make_stage()

    async def scenario() -> None:
        first = await left_after_3(stage, authorization="Bearer mine")
        mine = {"authorization": "Bearer mine"}
        stranger = await back(stage, last_id(first), mine | changed)
        assert stranger.status == 410
        assert b"data:" not in stranger.body
        assert (await back(stage, last_id(first), mine, path=COMPLETIONS)).status == 410
        rest = await back(stage, last_id(first), mine)
        assert rest.is_done

    stage.play(scenario())


def test_a_client_ahead_of_its_stream_is_refused() -> None:
    stage = make_stage()

    async def scenario() -> None:
        first = await left_after_3(stage)
        ahead = last_id(first).rpartition(".")[0] + ".1000"
        assert (await back(stage, ahead)).status == 410

    stage.play(scenario())


def test_the_newest_connection_has_the_stream() -> None:
    stage = make_stage(timing=Timing(0.05, 0.2))

    async def scenario() -> None:
        body = encode(chat("a prompt", max_tokens=40))
        first = await stage.client.connect()
        reply = first.expect("POST")
        first.transport.write(stage.client.encode("POST", CHAT, body, ON))
        await stage.until(lambda: len(reply.events) > 3, 10.0)
        rest = asyncio.ensure_future(back(stage, last_id(reply)))
        await asyncio.wait_for(first.all_ended, 5.0)
        assert reply.end is not End.COMPLETE
        assert (await rest).is_done

    stage.play(scenario())


def test_a_client_that_reads_slowly_and_leaves_reads_on() -> None:
    stage = make_stage()

    async def scenario() -> None:
        slow = Manner(read_every_s=0.3, leave_after_s=2.0)
        body = encode(chat("a prompt", max_tokens=400))
        first = await stage.client.request("POST", CHAT, body, ON, slow)
        rest = await back(stage, last_id(first))
        assert joined([first, rest]).is_done
        assert len(first.events) + len(rest.events) == 403

    stage.play(scenario())


def test_without_resume_s_nothing_is_kept_and_a_client_that_comes_back_is_told() -> None:
    stage = make_stage(resume_s=0.0, timing=Timing(0.05, 0.2))

    async def scenario() -> None:
        first = await left_after_3(stage)
        assert b"\nid: " not in first.body
        assert "x-cellgate-resume" not in first.headers
        await asyncio.sleep(0.3)
        assert not is_working(stage)
        assert (await back(stage, "0.AAAAAAAAAAAAAAAAAAAAAA.3")).status == 410

    stage.play(scenario())


def test_who_does_not_ask_for_it_gets_no_ids_and_what_is_no_stream_passes_unchanged() -> None:
    stage = make_stage()

    async def scenario() -> None:
        plain = await stage.ask()
        whole = await stage.ask(stream=False, headers=ON)
        assert plain.is_answered
        assert whole.is_answered
        assert b"\nid: " not in plain.reply.body
        wrong = await stage.send("GET", CHAT)
        assert wrong.reply.status == 405

    stage.play(scenario())
    assert len(stage.gate.gateway.reconnects) == 0


def test_a_stream_that_grows_too_much_while_its_client_is_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "LIMITS", replace(LIMITS, kept_stream_bytes=4000))
    stage = make_stage()

    async def scenario() -> None:
        first = await left_after_3(stage)
        await asyncio.sleep(3.0)
        assert not is_working(stage)
        assert (await back(stage, last_id(first))).status == 410

    stage.play(scenario())


def test_a_client_that_is_here_reads_all_though_the_begin_is_kept_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "LIMITS", replace(LIMITS, kept_stream_bytes=1000))
    stage = make_stage()

    async def scenario() -> None:
        reply = await stage.client.request("POST", CHAT, encode(chat("a prompt", max_tokens=40)), ON)
        assert reply.is_done
        assert (await back(stage, reply.headers["x-cellgate-resume"])).status == 410
        *_, event = whole_events(reply).split(b"\n\n")[:-2]
        near_the_end = event.rpartition(b"id: ")[2].decode()
        assert (await back(stage, near_the_end)).events == [b"[DONE]"]

    stage.play(scenario())


def test_all_streams_together_are_bounded_and_those_longest_away_end_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = 30_000
    monkeypatch.setattr(reconnect, "LIMITS", replace(LIMITS, kept_streams_bytes=bound))
    stage = make_stage()

    async def scenario() -> None:
        parts = [await left_after_3(stage) for _ in range(8)]
        await asyncio.sleep(2.0)
        kept = stage.gate.gateway.reconnects
        assert 0 < kept.bytes <= bound
        statuses = [(await back(stage, last_id(part))).status or 0 for part in parts]
        assert statuses == sorted(statuses, reverse=True)
        assert set(statuses) == {410, 200}

    stage.play(scenario())


def test_a_gate_that_stops_leaves_nothing() -> None:
    stage = make_stage(timing=Timing(0.05, 0.2))

    async def scenario() -> None:
        await left_after_3(stage)
        assert len(stage.gate.gateway.reconnects) == 1

    stage.play(scenario())
    assert len(stage.gate.gateway.reconnects) == 0
