"""Recovery in several gates, with an agreement of the test's own on who acts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from cellgate.proxy.extras.operator.plan import Claim, NotActingError
from tests.unit.operator.test_recovery import Ward


class Agreed:
    """What gates have agreed on, as a test says it."""

    def __init__(self) -> None:
        self.trouble = ""
        self.acts = True
        self.refusal = ""
        self.standing = set[str]()
        self.heard: list[Claim] = []
        self.claims: list[Claim] = []
        self.withdrawn: list[Claim] = []
        self.on_claim: Callable[[], object] = lambda: None

    def stand_for(self, cells: Collection[str]) -> None:
        self.standing = set(cells)

    def acts_for(self, _cell: str) -> bool:
        return self.acts

    def news(self) -> list[Claim]:
        news, self.heard = self.heard, []
        return news

    async def claim(self, claim: Claim) -> int:
        if self.refusal:
            raise NotActingError(self.refusal)
        self.claims.append(claim)
        self.on_claim()
        return 42

    async def withdraw(self, claim: Claim) -> None:
        self.withdrawn.append(claim)

    async def close(self) -> None: ...


async def test_an_attempt_is_claimed_and_its_command_gets_the_fencing_token() -> None:
    agreed = Agreed()
    ward = Ward(acting=agreed)
    ward.fall("a")
    await ward.wait(10.0)
    (claim,) = agreed.claims
    assert (claim.unit, claim.cell, claim.attempt, claim.rest_s) == ("a", "c", 1, 130.0)
    assert [(about["id"], about["fence"]) for about in ward.deeds] == [(claim.id, 42)]


async def test_a_refused_claim_cancels_the_attempt_and_counts_for_nothing() -> None:
    agreed = Agreed()
    agreed.refusal = "gate g2 acts for the cell"
    ward = Ward(acting=agreed)
    ward.fall("a")
    await ward.wait(10.0)
    assert (ward.deeds, ward.results) == ([], {"cancelled": 1})
    assert ward.entries[-1]["detail"] == "gate g2 acts for the cell; nothing was done"
    agreed.refusal = ""
    await ward.wait(1.0)
    assert [about["attempt"] for about in ward.deeds] == [1]


async def test_a_claim_is_withdrawn_when_the_unit_came_back_meanwhile() -> None:
    agreed = Agreed()
    ward = Ward(acting=agreed)
    agreed.on_claim = lambda: ward.rise("a")
    ward.fall("a")
    await ward.wait(10.0)
    assert (ward.deeds, agreed.withdrawn) == ([], agreed.claims)


async def test_the_attempt_of_another_gate_is_given_its_time_and_then_followed_by_one_of_ours() -> None:
    agreed = Agreed()
    ward = Ward(acting=agreed)
    agreed.acts = False
    ward.fall("a")
    await ward.wait(10.0)
    agreed.heard = [Claim("a", "c", "g2", "a-1", attempt=1, rest_s=130.0)]
    await ward.wait(1.0)
    agreed.acts = True
    await ward.wait(129.0)
    assert not ward.deeds
    await ward.wait(2.0)
    assert [about["attempt"] for about in ward.deeds] == [2]


def test_a_gate_that_may_not_act_lets_another_one() -> None:
    ward = Ward(acting=(agreed := Agreed()))
    assert agreed.standing == {"c"}
    ward.waits = "the gate is in panic"
    ward.now += 1.0
    ward.recovery.tick(ward.now)
    assert not agreed.standing


async def test_when_gates_cannot_agree_it_says_so_once_and_does_nothing() -> None:
    agreed = Agreed()
    ward = Ward(acting=agreed)
    agreed.acts, agreed.trouble = False, "Redis cannot be asked which gate acts: ConnectionError"
    ward.fall("a")
    for _ in range(20):
        await ward.wait(1.0)
    assert (ward.kinds, ward.deeds) == (["recovery_held"], [])
    assert ward.told[0].detail == f"{agreed.trouble}; nothing is done about a"
