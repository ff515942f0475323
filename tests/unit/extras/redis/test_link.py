"""The way to Redis: which one a URL means, a Cluster, what is written again, what is left at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, cast
from unittest.mock import AsyncMock, Mock
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from cellgate.extras.redis.commands import RedisCommands
from cellgate.extras.redis.link import RedisLink
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import LIMITS_SLICE, QUIET_BEATS, SharedLimits, UnitChanges
from cellgate.extras.redis_client.cluster import ClusterClient
from cellgate.extras.redis_client.connect import RedisKind, read_url
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command, RedisClient, ServerClient
from cellgate.proxy.admission.limits import MINUTE_S, KeyCounts, LimitLedger
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules
from cellgate.proxy.config.settings import Address, Settings, Tls
from cellgate.proxy.process.listeners import own_url
from cellgate.router.nouns import Ask, Fleet


def test_sentinels_are_a_list_with_the_name_of_the_primary_and_a_cluster_is_one_of_nodes() -> None:
    url = read_url("redis+sentinel://s1:26379,[::1]:7000,s3/main/2")
    assert url.kind is RedisKind.SENTINEL
    assert url.hosts == (Address("s1", 26379), Address("::1", 7000), Address("s3", 26379))
    assert (url.primary, url.database, url.is_secured) == ("main", 2, False)
    url = read_url("rediss+cluster://n1,n2:7001")
    assert (url.kind, url.is_secured) == (RedisKind.CLUSTER, True)
    assert url.hosts == (Address("n1", 6379), Address("n2", 7001))


def test_what_names_no_redis_is_refused_without_a_password() -> None:
    for scheme, rests in (
        ("sentinel", ("h:1", "h:1/main/none", "me:secret@h:1/main", "h:1,,h:2/main")),
        ("cluster", ("", "h:1/0", "h:70000", "me:secret@h:1")),
    ):
        for text in (*(f"redis+{scheme}://{rest}" for rest in rests), "redis://h1,h2"):
            with pytest.raises(ValueError, match=r"redis\+cluster://HOST:PORT,HOST:PORT") as caught:
                read_url(text)
            assert "secret" not in str(caught.value)


# Where a gate says that it can be reached.

SETTINGS = Settings(Fleet(), listen=Address("10.0.0.7", 0))


def test_it_is_where_it_listens_or_where_the_configuration_says() -> None:
    assert own_url(SETTINGS, 8000) == "http://10.0.0.7:8000"
    assert own_url(replace(SETTINGS, listen=Address("fd00::7", 0)), 8000) == "http://[fd00::7]:8000"
    assert own_url(replace(SETTINGS, tls=Tls(cert="c", key="k")), 8443) == "https://10.0.0.7:8443"
    assert own_url(replace(SETTINGS, advertise="http://gate-7:80"), 8000) == "http://gate-7:80"
    for host in ("0.0.0.0", "::"):
        # A machine without a network of that family has none to tell.
        url = own_url(replace(SETTINGS, listen=Address(host, 0)), 8000)
        assert not url or not ip_address(urlsplit(url).hostname or "").is_unspecified


# A Cluster of which one node tells the slots: where commands go, and what redirections and failures do.

A, B = Address("a", 1), Address("b", 2)
HALF = 8192
LOW, HIGH = "cellgate:cells", "cellgate:flips"


class Nodes:
    """Node `a` has the lower half of the slots; `says` may answer for a node instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.owners = [(0, HALF - 1, A), (HALF, 16383, B)]
        self.says: Callable[[str, str], Any] = lambda at, word: f"{word} at {at}"

    def client(self) -> ClusterClient:
        return ClusterClient([A], lambda at: cast(Redis, _Node(self, at.host)))

    def answer(self, at: str, command: tuple[Any, ...]) -> Any:
        self.asked.append((at, str(command[0])))
        if command[0] == "CLUSTER":
            return [[first, last, [at.host.encode(), at.port, b"id"]] for first, last, at in self.owners]
        return self.says(at, str(command[0]))

    def looks(self) -> int:
        return sum(word == "CLUSTER" for _, word in self.asked)


class _Node:
    """A node, and the one pipeline that it has at a time."""

    def __init__(self, nodes: Nodes, host: str) -> None:
        self.nodes, self.host, self.connection_pool = nodes, host, self
        self.commands: list[tuple[Any, ...]] = []

    def pipeline(self, *, transaction: bool) -> _Node:
        assert not transaction
        self.commands = []
        return self

    async def disconnect(self) -> None:
        """Nothing to do."""

    def execute_command(self, *words: Any) -> None:
        self.commands.append(words)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        answers = [self.nodes.answer(self.host, command) for command in self.commands]
        if isinstance(answers[0], RedisConnectionError):
            raise answers[0]
        return answers


def exchange(client: ClusterClient, *commands: tuple[str, ...]) -> list[Any]:
    return asyncio.run(client.exchange(commands))


def test_each_command_goes_to_the_node_that_has_its_key() -> None:
    nodes = Nodes()
    at = {True: "a", False: "b"}
    client = nodes.client()
    for key in (LOW, HIGH):
        owner = at[key_slot(key.encode()) < HALF]
        script = ("EVAL", "return 1", "1", key)
        assert exchange(client, ("GET", key), script) == [f"GET at {owner}", f"EVAL at {owner}"]
    assert exchange(client, ("PUBLISH", HIGH, "x")) == ["PUBLISH at a"]
    assert nodes.looks() == 1


def test_a_moved_slot_is_followed_at_once_and_the_table_is_read_again() -> None:
    nodes = Nodes()
    client = nodes.client()
    nodes.owners = [(0, 16383, A)]
    nodes.says = lambda at, word: AskError("5 b:2") if at == "a" else f"{word} at {at}"
    assert exchange(client, ("GET", LOW)) == ["GET at b"]
    assert nodes.asked[-2:] == [("b", "ASKING"), ("b", "GET")], "it is being moved"
    nodes.says = lambda at, word: MovedError("5 b:2") if at == "a" else f"{word} at {at}"
    assert exchange(client, ("GET", LOW)) == ["GET at b"]
    nodes.owners = [(0, 16383, B)]
    assert exchange(client, ("GET", LOW)) == ["GET at b"]
    assert nodes.looks() == 2
    assert nodes.asked[-1] == ("b", "GET")


def test_a_node_that_fails_fails_the_exchange_and_the_table_is_read_again() -> None:
    nodes = Nodes()
    nodes.owners = [(0, 16383, B)]
    client = nodes.client()
    nodes.says = lambda _at, _word: RedisConnectionError("gone")
    with pytest.raises(RedisConnectionError, match="gone"):
        exchange(client, ("GET", LOW))
    nodes.owners, nodes.says = [(0, 1, A)], lambda at, word: f"{word} at {at}"
    with pytest.raises(RedisConnectionError, match="no node of the cluster has slot"):
        exchange(client, ("GET", LOW))
    nodes.owners = [(0, 16383, A)]
    assert exchange(client, ("GET", LOW)) == ["GET at a"]


def test_heartbeats_are_read_by_one_command_and_one_by_one_while_their_slot_is_moved() -> None:
    names, asked = Names(), list[str]()
    assert len({key_slot(names.beat(gate).encode()) for gate in ("g1", "g2", "g3")}) == 1
    moved: list[Any] = [[b"1", None]]

    async def answer(commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        asked.extend(str(word) for word, *_ in commands)
        return moved if commands[0][0] == "MGET" else [b"1", b"2"]

    async def read() -> list[tuple[str, Any]]:
        commands = RedisCommands(cast("RedisClient", Mock(exchange=answer)), names)
        return [found async for found in commands.get_beats(["g1", "g2"])]

    assert asyncio.run(read()) == [("g1", b"1"), ("g2", None)]
    moved = [TryAgainError("Multiple keys request during rehashing of slot")]
    assert asyncio.run(read()) == [("g1", b"1"), ("g2", b"2")]
    assert asked == ["MGET", "MGET", "GET", "GET"]


# A gate that ends leaves no connection to Redis, whatever it was doing.


class Lost:
    """A client whose server is gone. Its connections take a moment to close."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.is_closed = False

    async def exchange(self, *_: object) -> list[Any]:
        raise ConnectionError

    async def pubsub(self) -> object:
        raise ConnectionError

    async def disconnect(self) -> None:
        self.closing.set()
        await asyncio.sleep(0.01)
        self.is_closed = True


def link(connect: Callable[[], RedisClient]) -> RedisLink:
    roster, now, rng = Roster("g1", 0.25), asyncio.get_running_loop().time, random.Random(1)
    done: dict[str, Any] = {"on_flip": lambda _: None, "tell": lambda _: None}
    return RedisLink(
        connect, "g1", UnitChanges, roster, now=now, rng=rng, names=Names(), all_cells=True, **done
    )


def limits(connect: Callable[[], RedisClient]) -> SharedLimits:
    ledger = LimitLedger(lambda: 0.0, KeyCounts(frozenset), None)
    return SharedLimits(ledger, connect, Names(), lambda: 1, lambda _: None, random.Random(1))


@pytest.mark.parametrize("make", [link, limits])
async def test_who_ends_while_a_lost_server_is_left_closes_all_connections(make: Callable[..., Any]) -> None:
    clients: list[Lost] = []

    def connect() -> RedisClient:
        clients.append(Lost())
        return cast("RedisClient", clients[-1])

    user = make(connect)
    user.start()
    await asyncio.sleep(0)
    await clients[0].closing.wait()
    await user.close()
    assert all(client.is_closed for client in clients)


async def test_one_server_that_cannot_be_left_keeps_no_connection_to_others_open() -> None:
    close, refuse = AsyncMock(), AsyncMock(side_effect=ConnectionError("it does not close"))
    redis, sentinel = (Mock(connection_pool=Mock(disconnect=way)) for way in (refuse, close))
    with pytest.raises(ConnectionError, match="it does not close"):
        await ServerClient(redis, [sentinel]).disconnect()
    close.assert_awaited_once()


# Which counters a gate asks Redis about, and for which window it takes of them.

AT = 1_751_328_000.0
LIMIT, TOKENS = 1000, 100


class Counters:
    """A Redis that counts; it forgets a key that expires in the past, as Redis does."""

    def __init__(self, gate: LimitsGate) -> None:
        self.gate = gate
        self.shares: dict[str, dict[str, str]] = {}
        self.increments = 0
        self.before_answer: Callable[[], object] = lambda: None

    async def exchange(self, commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        await asyncio.sleep(0)
        self.before_answer()
        return [self.answer(*map(str, command)) for command in commands]

    def answer(self, verb: str, key: str = "", *rest: str) -> list[bytes]:
        """Also to PING, which has no key."""
        shares = self.shares.setdefault(key, {})
        if verb == "HSET":
            self.increments += 1
            shares[rest[0]] = rest[1]
        elif verb == "EXPIREAT" and int(rest[0]) <= self.gate.now:
            del self.shares[key]
        return [share.encode() for share in shares.values()]


class LimitsGate:
    """A gate with a key for each of `keys`, of limits of a minute that it shares with another gate."""

    def __init__(self, keys: int) -> None:
        self.now = AT
        self.redis = Counters(self)
        limits, tenant = LimitRules(tokens_per_minute=LIMIT), TenantRules("t")
        ring = {b"%d" % n: Key(f"k{n}", tenant, limits=limits) for n in range(keys)}
        self.ledger = LimitLedger(lambda: self.now, KeyCounts(frozenset), None)
        self.ledger.take(KeyRing(ring, {"t": tenant}))
        client = cast("RedisClient", self.redis)
        self.sharing = SharedLimits(
            self.ledger, lambda: client, Names(), lambda: 2, lambda _: None, random.Random(1)
        )

    def ask(self, number: int = 0) -> bool:
        charge = f"k{number}", TOKENS, 0, self.now
        return isinstance(self.ledger.admit(charge, Ask(model="m", tenant="t")), bytes)

    def share(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.sharing._share(cast("RedisClient", self.redis)))


def test_a_limit_whose_window_is_over_is_not_asked_for_until_it_is_used_again() -> None:
    gate = LimitsGate(1)
    gate.ask()
    gate.share()
    gate.now += 2 * MINUTE_S + 1.0
    gate.redis.increments = 0
    gate.share(4 * QUIET_BEATS)
    assert gate.redis.increments == 0
    gate.ask()
    gate.share()
    assert gate.redis.increments == 1


def test_what_was_due_in_one_window_is_not_taken_in_the_next_one() -> None:
    keys = LIMITS_SLICE + 1
    gate = LimitsGate(keys)
    for number in range(keys):
        gate.ask(number)

    def a_minute_ends() -> None:
        gate.now = AT + MINUTE_S
        gate.ask(keys - 1)
        gate.redis.before_answer = lambda: None

    counter = f"cellgate:limit:key:k{keys - 1}:tokens_per_minute:{int(AT)}"
    gate.redis.shares[counter] = {"another gate": str(LIMIT)}
    gate.redis.before_answer = a_minute_ends
    gate.share()
    for _ in range(3):
        gate.share()
        assert gate.ask(keys - 1), "the limit of this minute is hardly used"
