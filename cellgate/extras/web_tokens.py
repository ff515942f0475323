"""JSON Web Tokens as keys (RFC 7519): verified by the issuer's public keys, which are fetched off the path.

A token that was verified is known by its SHA-256 until it expires: a signature takes ten times as long as
the rest of a request's way in.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

import aiohttp
import jwt
import orjson
from jwt.types import Options

from cellgate.proxy.config.key_file import Key, KeyRing
from cellgate.proxy.config.settings import JwtSettings
from cellgate.proxy.observe.counters import JWKS, tally
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.certificates import note_shown
from cellgate.proxy.process.tasks import end_tasks

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys. A shared secret would let whoever verifies also sign."""
WEB_TOKEN_BYTES = 8192
VERIFIED_MAX = 16_384
"""Tokens that are known to be good; of more, those that were verified first are verified again."""
PAGE_BYTES = 1 << 20
FETCH_S = 5.0
"""How long a fetch may take."""
PERIOD_S, SOONEST_S = 300.0, 10.0
"""The keys are fetched so often; and at most so often when a token names one that is not known."""
_REQUIRED: Options = {"require": ["exp", "iss", "aud"]}

PublicKeys = dict[str | None, jwt.PyJWK]


class WebTokens:
    """Tokens of one issuer. The page with its keys is verified by the system's authorities, and by the one in
    the file `ca`, if there is one.
    """

    def __init__(self, settings: JwtSettings, ca: str | None) -> None:
        self._settings = settings
        self._tls = ssl.create_default_context()
        if ca is not None:
            self._tls.load_verify_locations(ca)
        self._keys: PublicKeys = {}
        self._verified: dict[bytes, dict[str, Any]] = {}
        self._wanted = asyncio.Event()
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    # -- tokens --------------------------------------------------------------------------------------------

    def key(self, token: bytes, digest: bytes, ring: KeyRing) -> Key | None:
        """The key that a token stands for; None: it is none that counts."""
        if len(token) > WEB_TOKEN_BYTES or token.count(b".") != 2:
            return None
        claims = self._verified.get(digest) or self._verify(token, digest)
        tenant = ring.tenants.get(str(claims.get(self._settings.tenant_claim))) if claims else None
        if claims is None or tenant is None:
            return None
        return Key("", tenant, tenant.models, tenant.priority, expires_at=float(claims["exp"]))

    def _verify(self, token: bytes, digest: bytes) -> dict[str, Any] | None:
        try:
            key = self._keys.get(jwt.get_unverified_header(token).get("kid"))
            if key is None:
                self._wanted.set()
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                options=_REQUIRED,
            )
        except (jwt.PyJWTError, ValueError):
            return None
        if len(self._verified) >= VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = claims
        return claims

    # -- the issuer's keys ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Fetch the keys, and again and again until `close`."""
        self._task = asyncio.create_task(self._follow(), name="jwks")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    async def _follow(self) -> None:
        while True:
            try:
                self._take(_public_keys(await self._fetch()))
            except Exception as error:  # Whatever the page is: it must be fetched again.
                self._lost(error)
            await asyncio.sleep(SOONEST_S)
            self._wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S - SOONEST_S):
                    await self._wanted.wait()

    async def _fetch(self) -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self._settings.jwks_url, ssl=self._tls, allow_redirects=False) as reply,
        ):
            if reply.connection is not None and (there := reply.connection.transport) is not None:
                note_shown("JSON Web Tokens", there.get_extra_info("peercert"))
            if reply.status != 200:
                raise ValueError(f"it answered {reply.status}")
            page = await reply.content.read(PAGE_BYTES + 1)
            while len(page) <= PAGE_BYTES and (more := await reply.content.read(PAGE_BYTES)):
                page += more
            if len(page) > PAGE_BYTES:
                raise ValueError(f"it is larger than {PAGE_BYTES} bytes")
            return page

    def _take(self, keys: PublicKeys) -> None:
        if self._is_lost:
            log_line("info", f"keys of JSON Web Tokens: {self._settings.jwks_url} answers again")
        self._is_lost = False
        tally(JWKS, "fetched")
        if _material(keys) != _material(self._keys):
            # A key that was withdrawn must not live on in what it has signed.
            self._verified.clear()
        self._keys = keys

    def _lost(self, error: Exception) -> None:
        if not self._is_lost:
            why = one_line(f"{type(error).__name__}: {error}")[:200]
            where = self._settings.jwks_url
            log_line(
                "error", f"keys of JSON Web Tokens: {where} is no set of keys ({why}); the old ones hold"
            )
        self._is_lost = True
        tally(JWKS, "failed")


def _material(keys: PublicKeys) -> dict[str | None, object]:
    """The keys themselves: an issuer may give a new one the id of an old one."""
    return {name: key.key for name, key in keys.items()}


def _public_keys(page: bytes) -> PublicKeys:
    """The keys of a set (RFC 7517), but for secret ones. Raises ValueError."""
    found = orjson.loads(page)
    listed = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it has no list of keys")
    keys: PublicKeys = {}
    for each in listed:
        if isinstance(each, dict) and each.get("kty") in ("RSA", "EC", "OKP"):
            with suppress(jwt.PyJWTError):
                keys[each.get("kid")] = jwt.PyJWK.from_dict(each)
    if not keys:
        raise ValueError("it has no public key")
    return keys
