"""Trusted peers: this machine, the networks that the configuration names, callers with the token. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network


class Peers:
    """Trusts loopback and `networks` (10.0.0.0/8, 2001:db8::/32, or a single address).

    Raises ValueError for what is no network, or has bits beyond its mask.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks: list[Network] = [ip_network(network) for network in networks]

    def trusts(self, peer: str) -> bool:
        """Whether an address (no port) is trusted. What is no address is not."""
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        # A socket that speaks both families shows an IPv4 peer like this.
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or any(address in network for network in self._networks)


def gates_token(token: str) -> str:
    """What a gate shows to another one that has the same admin token: good for naming a unit, and no more."""
    return hmac.new(token.encode(), b"x-cellgate-unit", "sha256").hexdigest()


def payer_at(peer: str, forwarded_for: str, peers: Peers) -> str:
    """The address that pays for what came from a peer: its own, or if it is trusted, the last one that it
    says it speaks for and that is not trusted itself. Of IPv6 the network of a customer (/64).
    """
    chain = [each.strip() for each in forwarded_for.split(",")] if forwarded_for else []
    address = peer
    while chain and peers.trusts(address):
        if not _is_address(said := chain.pop()):
            break
        address = said
    return _customer(address)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _customer(text: str) -> str:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_token(given: bytes, token: str) -> bool:
    """Whether this is the token, compared in constant time."""
    return hmac.compare_digest(given.strip(), token.encode())
