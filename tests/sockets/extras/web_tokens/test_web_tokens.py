"""JSON Web Tokens as keys: whose count, for how long, and what a page of keys may do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cellgate.extras import web_tokens
from cellgate.proxy.config.settings import JwtSettings, KeySettings
from tests.sockets.test_gate_keys import LARGE, bearer, head_of
from tests.wire.client import chat, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import STREAM, Received, Script, ScriptedUnit, listening, whole

ISSUER, AUDIENCE = "https://login.example", "cellgate"
SIGNER, STRANGER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
TENANT = '{"tenant": "team", "models": ["tiny"], "limits": {"requests_per_minute": 100}}'


def page(key: ec.EllipticCurvePrivateKey = SIGNER, kid: str = "one") -> bytes:
    public = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    secret = {"kty": "oct", "kid": "shared", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA"}
    return orjson.dumps({"keys": [{**public, "kid": kid}, secret, {"kty": "RSA"}, 7]})


def token(key: Any = SIGNER, algorithm: str = "ES256", kid: str = "one", **claims: Any) -> str:
    usual = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "team": "team"}
    told = {name: value for name, value in (usual | claims).items() if value is not None}
    return jwt.encode(told, key, algorithm=algorithm, headers={"kid": kid})


@asynccontextmanager
async def issued(tmp_path: Path, served: Script, *lines: str) -> AsyncIterator[Stage]:
    """A stage that takes tokens of an issuer whose page of keys is this."""
    file = tmp_path / "keys.jsonl"
    file.write_text("\n".join(lines or (TENANT,)))
    async with listening(ScriptedUnit(served)) as issuer:
        settings = JwtSettings(ISSUER, AUDIENCE, f"http://127.0.0.1:{issuer.port}/jwks", "team")
        async with stage(STREAM, keys=KeySettings(str(file), jwt=settings)) as here:
            await issuer.received()
            await asyncio.sleep(0.1)
            yield here


async def status(here: Stage, shown: str, **fields: Any) -> int:
    async with here.client() as client:
        return (await client.ask(chat(head=bearer(shown), **fields))).status


async def test_a_token_of_the_issuer_counts_and_has_what_its_tenant_has(tmp_path: Path) -> None:
    async with issued(tmp_path, whole(page())) as here:
        good = token()
        assert [await status(here, good) for _ in range(2)] == [200, 200]
        assert await status(here, good, model="other") == 403


async def test_no_other_token_counts(tmp_path: Path) -> None:
    async with issued(tmp_path, whole(page())) as here:
        wrong = {
            "another issuer": token(iss="https://evil.example"),
            "another audience": token(aud="other"),
            "expired": token(exp=time.time() - 60),
            "without an end": token(exp=None),
            "another signer": token(STRANGER),
            "an unknown key": token(STRANGER, kid="two"),
            "no tenant": token(team=None),
            "an unknown tenant": token(team="others"),
            "a shared secret": token(b"secret-secret-secret-secret-secret", "HS256", "shared"),
            "unsigned": token(None, "none"),
            "nonsense": "a.b.c",
            "huge": "a.b." + "c" * 9000,
        }
        for what, shown in wrong.items():
            assert await status(here, shown) == 401, what
            assert await answered_from_its_head(here, shown) == (401, "invalid_api_key")
        async with here.client() as client:
            assert (await client.ask(post(LARGE, bearer(token())))).status == 200


async def test_a_key_of_the_file_counts_while_the_page_is_none(tmp_path: Path) -> None:
    lines = TENANT, orjson.dumps({"key": "k", "sha256": sha256(b"sk-1").hexdigest()}).decode()
    for served in (whole(b"[]"), whole(b"x" * (2 << 20)), whole(b"{}", status="500 No")):
        async with issued(tmp_path, served, *lines) as here:
            assert await status(here, token()) == 401
            assert await status(here, "sk-1") == 200


async def test_a_token_ends_with_its_key_though_the_next_one_has_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An issuer whose keys have no ids, or always the same one."""
    monkeypatch.setattr(web_tokens, "SOONEST_S", 0.05)
    pages, asked = [page(), page(STRANGER)], asyncio.Event()

    async def serve(request: Received) -> None:
        body = pages.pop(0)
        request.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        if not pages:
            asked.set()

    async with issued(tmp_path, serve) as here:
        old = token()
        assert await status(here, old) == 200
        # An unknown id lets the gate ask again.
        assert await status(here, token(kid="another")) == 401
        await asked.wait()
        while await status(here, token(STRANGER)) != 200:  # noqa: ASYNC110 - nobody tells the test.
            await asyncio.sleep(0.01)
        assert await status(here, old) == 401


async def answered_from_its_head(here: Stage, shown: str) -> tuple[int, str]:
    """The status and the code of what comes back of a head, the body of which never comes."""
    async with here.client() as client:
        reply = await client.ask(head_of(post(LARGE, bearer(shown))))
    return reply.status, reply.error["code"]


async def test_a_large_body_is_refused_from_its_head_by_a_token_that_is_used_up(tmp_path: Path) -> None:
    limited = '{"tenant": "team", "limits": {"requests_per_minute": 1}}'
    async with issued(tmp_path, whole(page()), limited, TENANT.replace("team", "other")) as here:
        # Who signs in again has no more than the tenant has.
        assert [await status(here, token(jti=str(number))) for number in range(3)] == [200, 429, 429]
        assert await answered_from_its_head(here, token(jti="3")) == (429, "rate_limit_exceeded")
        assert await status(here, token(team="other")) == 200
