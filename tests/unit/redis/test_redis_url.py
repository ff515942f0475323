"""Which Redis a URL means."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.settings import Address
from cellgate.proxy.redis.commands import RedisKind, read_url


def test_sentinels_are_a_list_with_the_name_of_the_primary_and_a_database() -> None:
    url = read_url("redis+sentinel://s1:26379,[::1]:7000,s3/main/2")
    assert url.kind is RedisKind.SENTINEL
    assert url.hosts == (Address("s1", 26379), Address("::1", 7000), Address("s3", 26379))
    assert (url.primary, url.database, url.is_secured) == ("main", 2, False)


def test_a_cluster_is_a_list_of_nodes_to_begin_with() -> None:
    url = read_url("rediss+cluster://n1,n2:7001")
    assert url.kind is RedisKind.CLUSTER
    assert url.hosts == (Address("n1", 6379), Address("n2", 7001))
    assert url.is_secured


@pytest.mark.parametrize(
    "text",
    [
        "redis+sentinel://h:1",
        "redis+sentinel://h:1/main/none",
        "redis+sentinel://me:secret@h:1/main",
        "redis+sentinel://h:1,,h:2/main",
        "redis+cluster://",
        "redis+cluster://h:1/0",
        "redis+cluster://h:70000",
        "redis+cluster://me:secret@h:1",
        "redis://h1,h2",
    ],
)
def test_what_names_no_redis_is_refused_without_a_password(text: str) -> None:
    with pytest.raises(ValueError, match=r"redis\+cluster://HOST:PORT,HOST:PORT") as caught:
        read_url(text)
    assert "secret" not in str(caught.value)
