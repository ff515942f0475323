"""What is said of the helpers of a gate: certificates, Redis, the guardrail and others that may fail."""

from __future__ import annotations

import ssl
import time
from collections import Counter
from pathlib import Path

import pytest

from cellgate.proxy.config.settings import GuardrailSettings, Settings, Tls
from cellgate.proxy.observe.counters import GUARDRAIL, TallyKey
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.helpers import Helpers, HelperTrouble, counted_helpers
from cellgate.proxy.process.certificates import (
    Expiry,
    ends_of,
    expiries,
    expiry_words,
    note_shown,
    shown_by_helpers,
    trouble_of,
)
from cellgate.router.nouns import Fleet
from tests.real.certificates import authority, signed_by

DAY_S = 86400.0


class Bench:
    """Helpers with one that says `trouble`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        self.helpers = Helpers(self.events, lambda: self.now)
        self.trouble: HelperTrouble | None = None
        self.helpers.watch(lambda: {"Redis": self.trouble})

    def look(self, trouble: HelperTrouble | None, after_s: float = 1.0) -> list[str]:
        """The kinds of all events, once it says this."""
        self.trouble = trouble
        self.now += after_s
        self.helpers.tick(self.now)
        return [event["kind"] for event in self.events.last()]


def test_a_helper_that_fails_is_one_event_however_long_it_lasts_and_one_when_it_works_again() -> None:
    bench = Bench()
    assert bench.look(None) == []
    assert bench.look(HelperTrouble("does not answer")) == ["helper_lost"]
    for _ in range(100):
        bench.look(HelperTrouble("does not answer, for another reason"))
    assert bench.helpers.shown() == [
        {"helper": "Redis", "weight": "lost", "says": "does not answer, for another reason", "since_s": 100.0}
    ]
    assert [family.samples[0].value for family in bench.helpers.collect()] == [0.0]
    assert bench.look(None) == ["helper_lost", "helper_back"]
    assert bench.helpers.shown() == []
    assert bench.events.last()[-1]["line"] == "a helper of the gate works again: Redis, after 101 s"


def test_what_the_helper_said_itself_is_shown_and_not_told_twice() -> None:
    bench = Bench()
    assert bench.look(HelperTrouble("a mistake in line 3", has_event=True)) == []
    assert bench.helpers.shown()[0]["says"] == "a mistake in line 3"
    assert bench.look(None) == []


def test_what_ends_soon_is_told_again_when_it_has_ended() -> None:
    bench = Bench()
    assert bench.look(HelperTrouble("ends in 12 days", "soon")) == ["helper_ages"]
    assert [family.samples[0].value for family in bench.helpers.collect()] == [1.0]
    assert bench.look(HelperTrouble("has ended", "grave")) == ["helper_ages", "helper_lost"]


def test_a_guardrail_fails_while_no_question_gets_a_verdict_in_any_process_of_the_gate() -> None:
    workers: Counter[TallyKey] = Counter()
    settings = Settings(fleet=Fleet(), guardrail=GuardrailSettings("http://127.0.0.1:1/check"))
    (guardrail,) = counted_helpers(settings, workers)
    assert guardrail.ask() == {"guardrail": None}
    workers[GUARDRAIL, "request", "too_large"] += 5  # The client's doing.
    assert guardrail.ask() == {"guardrail": None}
    workers[GUARDRAIL, "request", "timeout"] += 1
    trouble = guardrail.ask()["guardrail"]
    assert trouble is not None
    assert trouble.says == (
        "http://127.0.0.1:1/check gives no verdict (timeout): requests get 503 (guardrail.fail: closed)"
    )
    assert trouble.weight == "grave", "each request gets 503 because of it"
    assert guardrail.ask()["guardrail"] == trouble, "nothing was asked since"
    workers[GUARDRAIL, "request", "timeout"] += 1
    workers[GUARDRAIL, "answer", "denied"] += 1
    assert guardrail.ask() == {"guardrail": None}, "it answers others: slow, not gone"


def test_the_end_of_a_certificate_is_read_as_openssl_reads_it(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    gate = signed_by(ca, tmp_path, "gate")
    context = ssl.create_default_context(cafile=ca.cert)
    (shown,) = context.get_ca_certs()
    assert ends_of(ca.cert) == [ssl.cert_time_to_seconds(str(shown["notAfter"]))]
    chain = tmp_path / "chain.pem"
    chain.write_text(Path(gate.cert).read_text() + Path(ca.cert).read_text())
    assert ends_of(str(chain)) == [*ends_of(gate.cert), *ends_of(ca.cert)]
    tls = Tls(cert=str(chain), key=gate.key, ca=ca.cert)
    assert [(one.of, one.file) for one in expiries(tls)] == [("tls.cert", str(chain)), ("tls.ca", ca.cert)]


@pytest.mark.parametrize("text", ["", "x", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"])
def test_what_is_no_certificate_has_no_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "no.pem").write_text(text)
    assert ends_of(str(tmp_path / "no.pem")) == ends_of(str(tmp_path / "absent.pem")) == []


def test_a_certificate_is_spoken_of_from_a_month_before_its_end() -> None:
    now = time.time()
    assert expiry_words(now + 31 * DAY_S, now) == ""
    assert expiry_words(now + 12 * DAY_S, now).startswith("expires in 12 days, on ")
    assert expiry_words(now - 3 * DAY_S, now).startswith("has expired 3 days ago, on ")
    assert expiry_words(now - 5 * 60, now).startswith("has expired 5 minutes ago, on ")
    soon = trouble_of(Expiry("tls.cert", "a.pem", now + 5 * DAY_S), now)
    over = trouble_of(Expiry("tls.cert", "a.pem", now - 5 * DAY_S), now)
    unit = trouble_of(Expiry("unit a1", "", now - 5 * DAY_S), now)
    assert [each and each.weight for each in (soon, over, unit)] == ["soon", "grave", "lost"]
    assert over is not None
    assert "clients refuse connections to this gate; renew the file" in over.says


def test_what_a_helper_showed_last_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.process.certificates._SHOWN", {})
    for certificate in (
        {"notAfter": "Jan  1 00:00:00 2026 GMT"},
        {"notAfter": "Jan  2 00:00:00 2026 GMT"},
        None,
        {},
    ):
        note_shown("Redis", certificate)
    [shown] = shown_by_helpers()
    assert shown == Expiry("Redis", "", 1767312000.0)
    trouble = trouble_of(shown, shown.end + DAY_S)
    assert trouble is not None
    assert trouble.says.endswith("the gate refuses Redis; renew it there")
