"""What an engine says that it is, over the answers of an epoch."""

from __future__ import annotations

from itertools import accumulate

from cellgate.router.nouns import UNKNOWN_BUILD, Build


def told(*fingerprints: str, version: str = "") -> Build:
    news = [UNKNOWN_BUILD, Build(version=version), *(Build(each) for each in fingerprints)]
    return list(accumulate(news, Build.updated))[-1]


def test_a_build_is_its_fingerprint_or_else_its_version() -> None:
    assert told("fp", "fp", "", version="1.2").key == "fp"
    assert told(version="1.2").key == "1.2"
    assert told().key == ""


def test_an_engine_that_was_restarted_unseen_is_another_build() -> None:
    assert told("fp", "other", "other").key == "other"


def test_a_fingerprint_made_up_for_each_answer_says_nothing() -> None:
    assert told("a", "b", "c").key == told("a", "b", "c", "d", "d", "d").key == ""
    assert told("a", "b", "c", version="1.2") == Build("", "1.2", 2)


def test_builds_are_compared_by_what_both_tell() -> None:
    whole, started = Build("vllm-1.2-abc", "1.2"), Build("", "1.2")
    assert not started.differs(whole)
    assert not whole.differs(started)
    assert Build("", "1.3").differs(whole)
    assert Build("vllm-1.2-def", "1.2").differs(whole)
    assert not Build("vllm-1.2-abc").differs(started)
