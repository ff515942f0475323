"""Gates agree by Leases on who acts: one at a time, whatever happens to gates and the API server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cellgate.extras.operator import leases
from cellgate.extras.operator.action_settings import LeasePlace
from cellgate.extras.operator.leases import KubernetesLeases
from cellgate.extras.operator.plan import Claim, NotActingError
from cellgate.extras.orchestrators import ApiError, connected
from loadtests.kit.fake_kubernetes import FakeKubernetes
from tests.kubernetes_api import kubernetes_api, rights_given, rights_used

RULES = Path(__file__).parents[4] / "deploy" / "recovery" / "kubernetes-leases-rbac.yaml"
LEASE_S = 0.6
POLL_S = 0.01
CLAIM = Claim("u1", "East", "", "u1-1", attempt=1, rest_s=60.0)


class Clock:
    """The gates' clock: it moves while a test waits, so that a Lease outlasts what holds this process up."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


class Gate(KubernetesLeases):
    """One gate's side, and the tokens that it had."""

    def __init__(self, place: LeasePlace, name: str) -> None:
        self.tokens: list[int] = []
        self.heard: list[Claim] = []
        super().__init__(place, name, CLOCK, lambda _, token: self.tokens.append(token))
        self.stand_for({"East"})
        self.start()

    @property
    def acts(self) -> bool:
        return self.acts_for("East")

    def rests(self) -> bool:
        return not self.acts

    def listen(self) -> list[Claim]:
        self.heard += self.news()
        return self.heard

    def freeze(self) -> None:
        """As SIGSTOP does: no more renewals, and it still believes that it acts."""
        assert self._task is not None
        self._keep_looking = asyncio.Event().wait  # type: ignore[assignment]
        self._give_back = self._nothing  # type: ignore[method-assign]
        self._task.cancel()
        self._held["East"].ours_until += 60.0

    async def _nothing(self) -> None: ...


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CLAIM_RENEW_S", 0.05)
    monkeypatch.setattr(leases, "LEASE_S", LEASE_S)


@asynccontextmanager
async def among(folder: Path, gates: int) -> AsyncIterator[tuple[FakeKubernetes, list[Gate]]]:
    async with kubernetes_api() as api:
        place = LeasePlace("prod", api.kubeconfig(folder))
        found = [Gate(place, f"g{number}") for number in range(gates)]
        try:
            yield api, found
        finally:
            for gate in found:
                await gate.close()


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(POLL_S)
        CLOCK.now_s += POLL_S
    raise AssertionError("it never came true")


async def acting(gates: list[Gate]) -> Gate:
    await until(lambda: sum(gate.acts for gate in gates) == 1)
    return next(gate for gate in gates if gate.acts)


async def test_one_acts_and_the_others_hear_of_its_claims(tmp_path: Path) -> None:
    async with among(tmp_path, 3) as (api, gates):
        one = await acting(gates)
        others = [gate for gate in gates if gate is not one]
        await until(lambda: not any(gate.trouble for gate in gates))
        assert await one.claim(CLAIM) == 1 == one.tokens[0]
        for other in others:
            await until(other.listen)
            (heard,) = other.heard
            assert (heard.id, heard.gate, heard.rest_s) == ("u1-1", one._gate, 60.0)
            with pytest.raises(NotActingError, match=f"gate {one._gate} acts"):
                await other.claim(CLAIM)
        assert one.news() == []
        assert rights_used(api) == rights_given(RULES)
        (lease,) = api.objects.all("leases")
        assert lease["metadata"]["name"].startswith("cellgate-east-")


async def test_another_goes_on_when_it_stops_or_may_not_act(tmp_path: Path) -> None:
    async with among(tmp_path, 2) as (_api, gates):
        one = await acting(gates)
        one.stand_for(())
        await until(lambda: not one.acts)
        two = await acting(gates)
        assert two is not one
        assert two.tokens == [2]
        one.stand_for({"East"})
        await two.close()
        assert not two.acts
        await until(lambda: one.acts)


async def test_a_gate_that_stood_still_is_refused_when_another_has_taken_the_lease(tmp_path: Path) -> None:
    async with among(tmp_path, 2) as (_api, gates):
        one = await acting(gates)
        one.freeze()
        (two,) = (gate for gate in gates if gate is not one)
        await until(lambda: two.acts)
        assert one.acts, "it does not know yet"
        async with connected(one._place.kubeconfig) as one._api:
            with pytest.raises(NotActingError, match="409 Operation cannot be fulfilled"):
                await one.claim(CLAIM)
        assert one.rests()
        assert await two.claim(CLAIM) == 2


async def test_without_the_api_server_nobody_acts(tmp_path: Path) -> None:
    async with among(tmp_path, 2) as (api, gates):
        one = await acting(gates)
        await api.stop()
        await until(lambda: all(gate.trouble and not gate.acts for gate in gates))
        assert one.trouble.startswith("which gate acts is not known: the API server cannot be reached")
        await api.start()
        await acting(gates)
        await until(lambda: not any(gate.trouble for gate in gates))


async def test_a_right_that_is_missing_is_named_and_a_refusal_takes_no_lease_from_other_cells(
    tmp_path: Path,
) -> None:
    async with among(tmp_path, 1) as (api, (one,)):
        api.lacks = {("create", "leases")}
        rule = '{apiGroups: ["coordination.k8s.io"], resources: [leases], verbs: [create]}'
        await until(lambda: rule in one.trouble)
        assert one.rests()
        api.lacks = set()
        await acting([one])
        step = one._step

        async def refused(cell: str) -> None:
            if cell == "A":
                raise ApiError("leases is invalid", 422)
            await step(cell)

        one._step = refused  # type: ignore[method-assign]
        one.stand_for({"A", "East"})
        await until(lambda: one.trouble == "which gate acts is not known: leases is invalid")
        await acting([one])
        asked: list[str] = []

        async def away(cell: str) -> None:
            asked.append(cell)
            raise TimeoutError

        # A server that does not answer is not asked for every cell.
        one._step = away  # type: ignore[method-assign]
        one.stand_for({"A", "B", "East"})
        assert await one._round() == "which gate acts is not known: the API server does not answer"
        assert set(asked) == {"A"}


async def test_a_withdrawn_claim_is_not_heard_by_the_next_gate(tmp_path: Path) -> None:
    async with among(tmp_path, 1) as (_api, gates):
        one = await acting(gates)
        await one.claim(CLAIM)
        await one.claim(replace(CLAIM, unit="u2", id="u2-1"))
        await one.withdraw(CLAIM)
        one.stand_for(())
        next_one = Gate(one._place, "next")
        await until(lambda: next_one.acts)
        assert [claim.id for claim in next_one.news()] == ["u2-1"]
        await next_one.close()


async def test_each_attempt_is_granted_once_while_gates_come_and_go(tmp_path: Path) -> None:
    async with among(tmp_path, 3) as (_api, gates):
        rng, granted = random.Random(7), list[int]()
        for number in range(12):
            one = await acting(gates)
            tokens = []
            for gate in gates:
                try:
                    tokens.append(await gate.claim(replace(CLAIM, id=f"u1-{number}")))
                except NotActingError:
                    continue
            assert len(tokens) == 1
            granted += tokens
            if rng.random() < 0.5:
                one.stand_for(())
                await until(one.rests)
                await acting(gates)
                one.stand_for({"East"})
        assert granted == sorted(granted), "tokens grow"
        assert granted[-1] > 2
