"""Who may ask what of the admin port."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from cellgate.proxy.admin.http import refusal
from cellgate.proxy.config.settings import Peers
from tests.sockets.admin_stage import NOBODY, RELAYED, Port, run


def test_a_relayed_caller_sees_only_what_is_for_everyone() -> None:
    async def check(port: Port) -> None:
        for path, status in (("/livez", 200), ("/readyz", 503), ("/metrics", 200), ("/metrics/engine", 200)):
            async with port.client.get(port.url + path, headers=RELAYED) as reply:
                assert reply.status == status
        for path in ("/units", "/units/a1", "/events", "/healthz/unit/a1", "/nowhere"):
            status, body = await port.get(path, RELAYED)
            assert (status, body["error"]["code"]) == (403, "forbidden")
        assert (await port.post("/units/a1/drain", RELAYED))[0] == 403
        assert not port.board.units["a1"].drained

    run(check)


def test_with_a_token_a_relayed_caller_may_do_everything_and_without_it_nothing() -> None:
    async def check(port: Port) -> None:
        for wrong in ({}, {"Authorization": "Bearer secret2"}, {"Authorization": "Basic secret"}):
            async with port.client.get(port.url + "/units", headers=RELAYED | wrong) as reply:
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "secret" not in await reply.text()
        assert (await port.post("/units/a1/drain", RELAYED | {"Authorization": "Bearer secret"}))[0] == 200
        assert (await port.get("/units"))[0] == 200

    run(check, token="secret")


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.0.2.1", False),
        ("192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        (None, False),
        ("localhost", False),
    ],
)
def test_who_counts_as_this_machine(peer: str | None, local: bool) -> None:
    assert (refusal("GET", "/units", peer, {}, None, NOBODY) is None) is local
    assert (refusal("POST", "/units/a1/drain", peer, {}, "token", NOBODY) is None) is local


def test_only_reading_is_for_everyone() -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert refusal("GET", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("HEAD", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("POST", path, "192.0.2.1", {}, None, NOBODY) is not None


@pytest.mark.parametrize(
    "path", ["/units", "/units/a1", "/events", "/status", "/healthz/unit/a1", "/livez/", "//livez", "/x"]
)
def test_all_else_is_for_trusted_networks_and_for_who_has_the_token(path: str) -> None:
    peers = Peers(["10.0.0.0/8"])
    assert refusal("GET", path, "10.1.2.3", {}, None, peers) is None
    assert refusal("GET", path, "::ffff:10.1.2.3", {}, None, peers) is None
    assert refused("GET", path, "11.1.2.3", {}, None, peers) is HTTPStatus.FORBIDDEN
    assert refused("GET", path, "11.1.2.3", {}, "right", peers) is HTTPStatus.UNAUTHORIZED
    assert refused("GET", path, "10.1.2.3", RELAYED, None, peers) is HTTPStatus.FORBIDDEN
    for given in ("Bearer right", "bearer  right"):
        assert refusal("GET", path, "11.1.2.3", {"Authorization": given}, "right", peers) is None
    for given in ("Bearer wrong", "Bearer righ", "Basic right", "right", "Bearer \udcff", "Bearer "):
        headers = {"Authorization": given}
        assert refused("GET", path, "11.1.2.3", headers, "right", peers) is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.1.2.3", "192.0.2.1"])
@pytest.mark.parametrize("token", [None, "right"])
@pytest.mark.parametrize("given", ["Bearer wrong", "bearer  righ", "Bearer ", "Bearer"])
def test_a_token_that_is_shown_and_wrong_is_refused_from_anywhere(
    peer: str, token: str | None, given: str
) -> None:
    asked = ("POST", "/units/a1/drain", peer, {"Authorization": given}, token, Peers(["10.0.0.0/8"]))
    assert refused(*asked) is HTTPStatus.UNAUTHORIZED
    right = {"Authorization": "Bearer right"}
    assert (refusal("POST", "/units/a1/drain", peer, right, token, NOBODY) is None) is (token == "right")


def test_what_is_for_everyone_needs_no_right_token() -> None:
    wrong = {"Authorization": "Bearer of another"}
    assert refusal("GET", "/metrics", "192.0.2.1", wrong, "right", NOBODY) is None
    # Another scheme is no token of ours: a proxy or a browser has put it there.
    assert refusal("GET", "/units", "127.0.0.1", {"Authorization": "Basic x"}, "right", NOBODY) is None


def refused(*asked: Any) -> HTTPStatus:
    """The status of a refusal."""
    no = refusal(*asked)
    assert no is not None
    return no[0]


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    refusal("GET", "/units", "192.0.2.1", {"Authorization": "Bearer wrong"}, "right", NOBODY)
    assert compared == [(b"wrong", b"right")]


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1:9901", True),
        ("localhost:9901", True),
        ("[::1]:9901", True),
        ("10.0.0.1:9901", True),
        ("evil.example:9901", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_name_made_to_point_at_this_machine_opens_nothing(host: str, is_here: bool) -> None:
    asked = "GET", "/units", "127.0.0.1", {"Host": host}, "token", NOBODY
    assert (refusal(*asked) is None) is is_here


def test_callers_of_trusted_networks_may_use_names() -> None:
    peers = Peers(("10.0.0.0/8",))
    assert refusal("GET", "/units", "10.1.2.3", {"Host": "gate.cells.svc:9901"}, "token", peers) is None


def test_who_may_not_drain_may_not_see_or_clear_refused_prompts() -> None:
    async def check(port: Port) -> None:
        assert (await port.get("/poison", RELAYED))[0] == 401
        assert (await port.post("/poison/clear", RELAYED))[0] == 401

    run(check, token="t0ken")
