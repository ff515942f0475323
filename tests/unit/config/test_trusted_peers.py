"""Who is trusted by address."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.settings import Peers


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_this_machine_is_trusted(peer: str) -> None:
    assert Peers().trusts(peer)


@pytest.mark.parametrize("peer", ["10.0.0.1", "", "here", "127.0.0.1:80", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_nobody_else_is_unless_named(peer: str) -> None:
    assert not Peers().trusts(peer)


@pytest.mark.parametrize(
    ("peer", "is_trusted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.0.0.1", False),
        ("2001:db8::7", True),
        ("fe80::1%eth0", True),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
    ],
)
def test_named_networks_are_trusted(peer: str, is_trusted: bool) -> None:
    peers = Peers(["10.0.0.0/8", "2001:db8::/32", "fe80::/10", "192.0.2.7"])
    assert peers.trusts(peer) is is_trusted


@pytest.mark.parametrize("network", ["10.0.0.1/8", "ten", "", "10.0.0.0/33"])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"does not appear|has host bits"):
        Peers([network])
