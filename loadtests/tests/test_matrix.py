"""The matrix compares answers, and knows which differences the documentation names."""

from __future__ import annotations

from loadtests.matrix import PAGE, Answer, differences, is_named, named_differences


def test_a_difference_of_each_part_is_seen() -> None:
    one = Answer(200, (("Server", "a"), ("Date", "1")), b'{"id":"1","text":"a"}')
    assert list(differences(one, one._replace(lines=(("server", "a"), ("date", "2"))))) == []
    assert list(differences(one, one._replace(body=b'{"id":"2","text":"a"}'))) == []
    other = Answer(400, (("server", "b"),), b"{}")
    assert list(differences(one, other)) == ["status 200 -> 400", "server", "body of 21 -> 2 bytes"]


def test_only_what_the_documentation_names_may_differ() -> None:
    named = named_differences(PAGE.read_text())
    assert is_named("x-request-id", named)
    assert is_named("x-cellgate-unit", named)
    for difference in ("server", "body of 1 -> 2 bytes", "status 200 -> 502", "the request"):
        assert not is_named(difference, named)
