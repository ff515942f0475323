"""TLS of one process: towards clients, units, webhooks, and callers of the admin port.

Contexts are made of files, and made again when these (cert-manager) or the configuration change.
Files that do not fit together change nothing. A context that verifies others by the system's authorities is
created on first use, because these take 2 MB.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cellgate.proxy.config.checks import check_certificates, files_of
from cellgate.proxy.config.settings import Tls
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process import signals
from cellgate.proxy.process.certificates import Expiry, expiries, trouble_of
from cellgate.proxy.process.signals import WatchedFiles

WHAT = "certificates"


class LiveTls:
    """The contexts of now. Raises ValueError or OSError when the files cannot be used at the start.

    A gate with workers has the same files in several processes; `is_quiet`: another one reports them.
    """

    def __init__(self, tls: Tls, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._tls = tls
        self._files = WatchedFiles(files_of(tls))
        self._contexts = _made(tls)
        self.expiries: list[Expiry] = expiries(tls)
        self._refused = ""
        self._to_clients = self._contexts.clients
        self._webhooks: ssl.SSLContext | None = None
        if self._to_clients is not None:
            self._to_clients.sni_callback = self._use_newest

    # -- contexts ------------------------------------------------------------------------------------------

    def clients(self) -> ssl.SSLContext | None:
        """For a listener, for good: each handshake uses the newest certificate. None: no TLS."""
        return self._to_clients

    def units(self) -> ssl.SSLContext:
        """For the next connection to an https unit: verified by the configured authority, or the system's."""
        if self._contexts.units is None:
            self._contexts = replace(self._contexts, units=_verifying(self._tls))
        units = self._contexts.units
        assert units is not None
        return units

    def webhooks(self) -> ssl.SSLContext:
        """For the next call of a webhook: verified by the system's authorities, and by the configured one."""
        if self._webhooks is None:
            self._webhooks = ssl.create_default_context()
            if self._tls.ca is not None:
                self._webhooks.load_verify_locations(self._tls.ca)
        return self._webhooks

    def admin(self) -> ssl.SSLContext | None:
        """For the next connection to the admin port. None: no TLS."""
        return self._contexts.admin

    # -- changes -------------------------------------------------------------------------------------------

    def tick(self, _now: float) -> None:
        """Use new files, once they are complete."""
        if self._files.changed():
            self.renew()

    def take(self, tls: Tls) -> None:
        """The configuration was read again: other files, perhaps. Whether clients speak TLS stays."""
        if (tls.cert is None) is not (self._tls.cert is None):
            tls = replace(tls, cert=self._tls.cert, key=self._tls.key)
        if tls != self._tls:
            self._tls, self._files = tls, WatchedFiles(files_of(tls))
            self.renew()

    def renew(self) -> None:
        """Read the files again; what they make replaces all contexts, or none."""
        try:
            self._contexts = _made(self._tls)
        except (ValueError, OSError) as error:
            self._refused = str(error)
            if not self.is_quiet:
                signals.refused(WHAT, self._refused)
            return
        self.expiries, self._refused = expiries(self._tls), ""
        self._webhooks = None
        if not self.is_quiet:
            signals.taken(WHAT)
            log_line("info", f"{WHAT} reloaded: new connections use them")

    def troubles(self) -> Mapping[str, HelperTrouble | None]:
        """What is wrong with the files, by certificate."""
        wall = time.time()
        found: dict[str, HelperTrouble | None] = {one.of: trouble_of(one, wall) for one in self.expiries}
        if found or self._refused:
            refused = f"new files are not used, those before stay: {self._refused}"
            found[WHAT] = HelperTrouble(refused) if self._refused else None
        return found

    def _use_newest(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if self._contexts.clients is not None:
            handshake.context = self._contexts.clients


@dataclass(frozen=True, slots=True)
class _Contexts:
    """Made of the files of one moment. `units` is None while only the system's authorities are known."""

    clients: ssl.SSLContext | None
    units: ssl.SSLContext | None
    admin: ssl.SSLContext | None


def _made(tls: Tls) -> _Contexts:
    check_certificates(tls)
    verifies = tls.ca is not None or tls.unit_cert is not None
    return _Contexts(
        _serving(tls.cert, tls.key),
        _verifying(tls) if verifies else None,
        _serving(tls.admin_cert, tls.admin_key, tls.admin_client_ca),
    )


def _serving(cert: str | None, key: str | None, client_ca: str | None = None) -> ssl.SSLContext | None:
    """For those who connect here, if a certificate is configured. One of `client_ca` may be shown."""
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["http/1.1"])
    if client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(client_ca)
        # A resumed session would not show its certificate again, however long ago that was revoked.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _verifying(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.unit_cert is not None:
        context.load_cert_chain(tls.unit_cert, tls.unit_key)
    return context
