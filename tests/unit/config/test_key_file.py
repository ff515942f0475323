"""The file of keys: what it makes, and a line for each mistake."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from cellgate.proxy.config.key_file import PROBLEMS_MAX, KeyFileError, keys_in, read_keys

A, B = (sha256(text).hexdigest() for text in (b"a", b"b"))


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(KeyFileError) as caught:
        keys_in("keys", text.encode())
    return caught.value.problems


def test_a_key_has_what_its_tenant_says_and_its_own_goes_first() -> None:
    ring = keys_in(
        "keys",
        f"""# who may come in
{{"key": "alice", "sha256": "{A}", "tenant": "team", "limits": {{"in_flight": 2}}, "expires": "2027-01-31"}}
{{"key": "bob", "sha256": "{B}", "models": ["small"]}}

{{"tenant": "team", "models": ["large"], "priority": [5, 9], "limits": {{"tokens_per_minute": 100}}}}
{{"model": "large", "prompt": 0.5, "completion": 1.5}}
""".encode(),
    )
    alice, bob = (ring.keys[bytes.fromhex(digest)] for digest in (A, B))
    assert (alice.tenant.name, alice.models, alice.priority) == ("team", frozenset({"large"}), (5, 9))
    assert (alice.limits.in_flight, alice.tenant.limits.tokens_per_minute) == (2, 100)
    assert alice.expires_at == 1_801_353_600.0
    assert (bob.tenant.name, bob.models, bob.priority) == ("bob", frozenset({"small"}), (0, 1_000_000))
    assert ring.prices["large"].completion == 1.5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "keys:1: expected a JSON object: unexpected end of data at column 2"),
        (
            f'{{"key": "a", "sha256": "{A}", "tenat": "t"}}',
            "keys:1: tenat: unknown field; did you mean 'tenant'?",
        ),
        (
            '{"key": "a", "sha256": "sk-secret"}',
            "keys:1: sha256: expected the SHA-256 of a key, 64 hexadecimal digits (see cellgate keys new)",
        ),
        (
            '{"tenant": "a b"}',
            "keys:1: tenant: expected a name of at most 128 letters, digits, '.', '_', '@' and '-'",
        ),
        (
            '{"tenant": "t", "limits": {"in_flight": -1}}',
            "keys:1: limits.in_flight: expected a whole number, 0 or more",
        ),
        (
            '{"tenant": "t", "limits": {"tokens": 1}}',
            "keys:1: limits.tokens: expected one of requests_per_minute, tokens_per_minute, in_flight, "
            "tokens_per_day, tokens_per_month, cost_per_day, cost_per_month",
        ),
        (
            '{"tenant": "t", "priority": [2, 1]}',
            "keys:1: priority: expected [LOWEST, HIGHEST], whole numbers from -1000000 to 1000000",
        ),
        ('{"tenant": "t", "models": []}', "keys:1: models: expected a list of models; leave it out for all"),
        (
            f'{{"key": "a", "sha256": "{A}", "expires": "soon"}}',
            "keys:1: expires: expected a time such as 2027-01-31 or 2027-01-31T12:00:00Z",
        ),
        ('{"model": "m", "prompt": "1"}', "keys:1: prompt: expected a number, 0 or more"),
    ],
)
def test_each_mistake_is_one_line_with_its_place(line: str, problem: str) -> None:
    assert problems(line) == (problem,)


def test_duplicates_are_found_and_all_mistakes_are_told_at_once() -> None:
    text = f"""{{"key": "a", "sha256": "{A}"}}
{{"key": "b", "sha256": "{A.upper()}"}}
{{"key": "a", "sha256": "{B}"}}
{{"tenant": "t"}}
{{"tenant": "t"}}
"""
    assert problems(text) == (
        "keys:2: sha256: duplicate of key 'a'",
        "keys:3: key: duplicate key 'a'",
        "keys:5: tenant: duplicate tenant 't'",
    )
    told = problems("[]\n" * (PROBLEMS_MAX + 3))
    assert (len(told), told[-1]) == (PROBLEMS_MAX + 1, "and 3 more")


def test_no_mistake_shows_a_key(tmp_path: Path) -> None:
    secret = "sk-very-secret"
    told = problems(
        f'{{"key": "{secret} ", "sha256": "{secret}", "expires": "{secret}", "limits": "{secret}"}}'
    )
    assert len(told) == 4
    assert secret not in "".join(told)
    with pytest.raises(KeyFileError, match="expected a readable file"):
        read_keys(str(tmp_path / "nowhere"))
