"""The table of an exchange's life: each pair of a state and an event has a row, or a reason why it cannot be.

And what really happens keeps to it: whatever scene is played, no exchange goes where its row does not lead.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cellgate.proxy.request.answers import IMPOSSIBLE, TABLE
from cellgate.proxy.request.exchange import Exchange, ExchangeEvent, ExchangeState, Transition
from tests.laws.test_defect_laws import SCENES, run


def test_each_pair_has_a_row_or_a_reason_why_it_cannot_be_and_each_state_is_reached_and_left() -> None:
    for pair in product(ExchangeState, ExchangeEvent):
        assert (pair in TABLE) is not (pair in IMPOSSIBLE), pair
        assert IMPOSSIBLE.get(pair, "has a row"), pair
    from_over = {row.follows for (state, _), row in TABLE.items() if state is ExchangeState.OVER}
    assert from_over == {(ExchangeState.OVER,)}
    reached = {state for (before, _), row in TABLE.items() for state in row.follows if state != before}
    assert reached == set(ExchangeState) - {ExchangeState.PARSING}


@pytest.mark.parametrize("scene", SCENES)
def test_what_happens_keeps_to_the_table(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []
    for pair, row in list(TABLE.items()):
        monkeypatch.setitem(TABLE, pair, kept(pair, row, wrong))
    run(scene, lambda _name: None)
    assert wrong == []


def kept(pair: tuple[ExchangeState, ExchangeEvent], row: Transition, wrong: list[str]) -> Transition:
    """The row, with a word if it leads elsewhere."""

    def act(exchange: Exchange, *args: Any) -> Any:
        result = row.action(exchange, *args)
        if exchange.state not in row.follows:
            wrong.append(f"{pair[0].name} {pair[1].name} leads to {exchange.state.name}")
        return result

    return Transition(act, row.follows)
