"""What a scrape shows of Redis and of the gates there."""

from __future__ import annotations

import random
from dataclasses import replace

from cellgate.extras.redis.link import LinkState, RedisLink, redis_metrics
from cellgate.extras.redis.reports import Seen, UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import UnitChanges
from cellgate.extras.redis_client.redis_names import Names
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Verdict
from tests.unit.observe.test_metrics import NOW, a_board, samples


def a_link() -> tuple[RedisLink, Roster]:
    roster = Roster("me")
    link = RedisLink(
        lambda: None,  # type: ignore[arg-type,return-value]
        "me",
        UnitChanges,
        roster,
        now=lambda: NOW,
        rng=random.Random(1),
        on_flip=lambda _: None,
        tell=lambda _: None,
        names=Names(),
    )
    return link, roster


def test_redis_is_up_once_it_answers_and_its_peers_are_who_was_heard_just_now() -> None:
    link, roster = a_link()
    board = a_board("u", "v")
    board.remote_load = {"u": RemoteLoad(7)}
    shown = samples(redis_metrics(link, board))
    assert shown.pop("cellgate_redis_up") == 0
    assert shown.pop("cellgate_in_flight_elsewhere{unit=u}") == 7
    assert len(shown) == 18
    assert set(shown.values()) == {0}
    link.state = LinkState.WELL
    link.counts["connects"] = 2
    for gate, age_s in (("one", 0.1), ("other", 0.7), ("gone", 0.8)):
        view = UnitReport("u", "c", gate, Verdict.UP)
        roster.update(("u", gate), Seen(view, age_s), NOW)
        roster.update(("v", gate), Seen(replace(view, unit="v"), age_s), NOW)
    shown = samples(redis_metrics(link, board))
    assert shown["cellgate_redis_up"] == 1
    assert shown["cellgate_redis_peers"] == 2
    assert shown["cellgate_redis_connects_total{result=established}"] == 2
