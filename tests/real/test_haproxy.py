"""A real HAProxy with the project's configurations: what the agent port says is what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.proxy.config.settings import Address
from cellgate.proxy.process.listeners import listen
from cellgate.router.nouns import Sign, Strength
from cellgate.router.outliers import Outlier
from tests.real.asking import post, steadily, until
from tests.real.haproxy import Haproxy, Server, haproxy
from tests.real.tiny_gate import TinyGate, listening
from tests.wire.stage import live

FIRST, SECOND = "10.0.0.1", "10.0.0.2"
NO_HEALTH_CHECK = {"http-check expect status 200": "http-check expect rstatus ."}
"""So that what is seen is the agent's doing alone."""


async def until_server(here: Haproxy, name: str, **fields: object) -> Server:
    """Wait until HAProxy holds this of a server."""

    def is_so() -> bool:
        server = here.servers().get(name)
        return server is not None and all(getattr(server, field) == value for field, value in fields.items())

    await until(is_so)
    return here.servers()[name]


def is_drained(here: Haproxy, name: str) -> bool:
    """Whether a server gets nothing new: by its health URL (NOLB), by its agent, or by both."""
    return here.servers()[name].status.startswith(("NOLB", "DRAIN"))


@live
async def test_a_gate_says_how_much_it_can_take_whether_it_has_units_and_is_ready(tmp_path: Path) -> None:
    one, other = TinyGate(), TinyGate()
    async with listening(one, other):
        gates = {FIRST: one, SECOND: other}
        with haproxy(tmp_path, gates) as here:
            await until_server(here, "gate1", status="UP", weight=100, places=10)
            one.board.units["u"].outlier = Outlier(0.4)
            await until_server(here, "gate1", status="UP", weight=60)
            one.board.units["u"].outlier = Outlier()
            await until_server(here, "gate1", weight=100)
            # Without units it is down with a reason, and comes back by itself.
            one.tell(Sign.BAD, Strength.FATAL)
            server = await until_server(here, "gate1", agent_says="via agent : down (0/1 units usable)")
            assert server.status.startswith("DOWN")
            assert set(await steadily(here.port, rps=100.0, seconds=0.5)) == {200}
            assert one.served == 0
            for _ in range(3):
                one.tell(Sign.GOOD)
            await until_server(here, "gate1", status="UP", weight=100)
            # Each load balancer gets its part of the places.
            with haproxy(tmp_path, gates, node="lb2") as there:
                await until_server(there, "gate1", places=5)
                await until_server(here, "gate1", places=5)
            # An operator's drain in HAProxy is undone by the gate's ready. This is why docs/ingress.md says:
            # drain at the gate, or disable the agent first.
            here.command("set server gates/gate1 state drain")
            await until_server(here, "gate1", status="UP")
            here.command("disable agent gates/gate1")
            here.command("set server gates/gate1 state drain")
            asked = one.agent.counts["up"]
            await steadily(here.port, rps=50.0, seconds=0.5)
            assert one.agent.counts["up"] <= asked + 1
            assert here.servers()["gate1"].status == "DRAIN"


@live
async def test_a_stopping_gate_drains_and_down_stays_until_up_is_said(tmp_path: Path) -> None:
    """The trap: when the agent port is gone, its last word stands."""
    one, other = TinyGate(), TinyGate()
    async with listening(one, other):
        with haproxy(tmp_path, {FIRST: one, SECOND: other}, changed=NO_HEALTH_CHECK) as here:
            await until_server(here, "gate1", places=10)
            one.stopping = True
            await until_server(here, "gate1", status="DRAIN (agent)")
            assert set(await steadily(here.port, rps=100.0, seconds=0.5)) == {200}
            assert one.served == 0
            # Its successor is ready.
            one.stopping = False
            await until_server(here, "gate1", status="UP", weight=100)
            one.tell(Sign.BAD, Strength.FATAL)
            await until_server(here, "gate1", status="DOWN (agent)")
            await one.agent.close()
            for _ in range(3):
                one.tell(Sign.GOOD)
            await steadily(here.port, rps=20.0, seconds=1.0)
            assert here.servers()["gate1"].status == "DOWN (agent)"
            await one.agent.start(await listen(Address("127.0.0.1", one.agent_port), 16))
            await until_server(here, "gate1", status="UP")


@live
async def test_what_is_no_question_changes_nothing(tmp_path: Path) -> None:
    one, other = TinyGate(), TinyGate()
    async with listening(one, other):
        changed = {'agent-send "gate ${HAPROXY_LOCALPEER}\\n"': 'agent-send "what is up?\\n"'}
        with haproxy(tmp_path, {FIRST: one, SECOND: other}, changed=changed) as here:
            await until(lambda: one.agent.counts["malformed"] > 5)
            server = here.servers()["gate1"]
            assert (server.status, server.weight, server.places) == ("UP", 100, 512)
            assert await post(here.port) == 200


@live
async def test_haproxy_that_balances_units_asks_for_each_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELLGATE_ADMIN_TOKEN", "s3cret")
    one, other = TinyGate(), TinyGate()
    # Here units have other names than the one that a tiny gate has.
    changed = {"server a1 ": "server u ", '"a1 ': '"u '}
    async with listening(one, other):
        with haproxy(
            tmp_path, {FIRST: one, SECOND: other}, configuration="haproxy-units.cfg", changed=changed
        ) as here:
            await until_server(here, "u", status="UP", places=10)
            # Nobody knows a2: drained, as on its health URL.
            await until(lambda: is_drained(here, "a2"))
            assert await post(here.port) == 200
            assert one.asked_for == ["u"]
            one.board.drain("u", drained=True)
            await until(lambda: is_drained(here, "u"))
            one.board.drain("u", drained=False)
            await until_server(here, "u", status="UP", weight=100)
