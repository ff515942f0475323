"""The rank that a unit with data parallel ranks is asked for, and that the log names."""

from __future__ import annotations

import pytest

from cellgate.proxy.observe.log import Finished, json_line
from cellgate.router.nouns import Load, RankLoad
from tests.wire.client import chat
from tests.wire.stage import Stage, live, stage
from tests.wire.unit import STREAM

RANKS = RankLoad(0, running=9), RankLoad(1)


def show_ranks(here: Stage) -> None:
    """The engine's metrics show two ranks, of which the first is busy with requests of others."""
    [state] = here.plane.board
    here.plane.board.report(Load(state.unit.name, here.plane.now(), 9, ranks=RANKS))


@live
async def test_a_request_is_sent_to_a_rank_and_logged_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Finished] = []
    async with stage(STREAM) as here, here.client() as client:
        monkeypatch.setattr(here.gateway, "finished", records.append)
        await client.ask(chat())
        show_ranks(here)
        await client.ask(chat())
        await client.ask(chat(head="X-Data-Parallel-Rank: 0\r\n"))
        assert [request.get("x-data-parallel-rank") for request in here.unit.requests] == [None, "1", "0"]
        assert [rank.in_flight for state in here.plane.board for rank in state.ranks.ranks] == [0, 0]
    assert [record.rank for record in records] == [None, 1, None]
    assert [b'"rank":1' in json_line(0.0, record) for record in records] == [False, True, False]
