"""Where a gate says that it can be reached."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest

from cellgate.proxy.config.settings import Address, Settings, Tls
from cellgate.proxy.process.listeners import own_url
from cellgate.router.nouns import Fleet

SETTINGS = Settings(Fleet(), listen=Address("10.0.0.7", 0))


def test_it_is_where_it_listens() -> None:
    assert own_url(SETTINGS, 8000) == "http://10.0.0.7:8000"
    assert own_url(replace(SETTINGS, listen=Address("fd00::7", 0)), 8000) == "http://[fd00::7]:8000"
    assert own_url(replace(SETTINGS, tls=Tls(cert="c", key="k")), 8443) == "https://10.0.0.7:8443"


def test_or_where_the_configuration_says() -> None:
    assert own_url(replace(SETTINGS, advertise="http://gate-7:80"), 8000) == "http://gate-7:80"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_who_listens_everywhere_says_one_address_or_nothing(host: str) -> None:
    """A machine without a network of that family has none to tell."""
    url = own_url(replace(SETTINGS, listen=Address(host, 0)), 8000)
    assert not url or not ip_address(urlsplit(url).hostname or "").is_unspecified
