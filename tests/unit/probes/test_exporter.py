"""The exporter probe: presets and rules against pages as exporters show them, look after look."""

from __future__ import annotations

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.exporter import ExporterProbe, RuleError
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply

GOOD = (Sign.GOOD, Strength.WEAK)
DOUBT = (Sign.BAD, Strength.WEAK)
FIRST, SECOND = (Sign.BAD, Strength.STRONG), (Sign.BAD, Strength.FATAL)
NOTHING = (Sign.NEUTRAL, Strength.WEAK)

DCGM = """# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",device="nvidia0",err_msg="No Error"} 0
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-2",device="nvidia1",err_msg="of GPU 1"} %d
DCGM_FI_DEV_GPU_TEMP{gpu="0"} 79
"""
XID_COUNT = 'DCGM_EXP_XID_ERRORS_COUNT{gpu="1",window_size_in_ms="300000",xid="%d"} 2\n'
NEURON = """execution_errors_total{error_type="hardware",runtime_tag="9"} %s
execution_errors_total{error_type="numerical",runtime_tag="9"} %s
hardware_ecc_events_total{event_type="mem_ecc_uncorrected",neuron_device_index="0"} 4.0
"""
NODE = """node_filesystem_readonly{device="/dev/root",fstype="ext4",mountpoint="/"} %s
node_vmstat_oom_kill 3
node_memory_MemAvailable_bytes %s
"""


class Looks:
    """One probe that looks at page after page."""

    def __init__(self, *, rule: str = "", preset: str = "") -> None:
        self._answer: Answer = Trouble.OWN
        self.patient = FakePatient(lambda _: self._answer, node=Node("n1", Role.FOLLOWER))
        self.probe = ExporterProbe("http://n1:9400/metrics", rule, preset)
        self.reason = ""

    def __call__(self, answer: Answer | str) -> tuple[Sign, Strength]:
        self._answer = reply(200, answer.encode()) if isinstance(answer, str) else answer
        (evidence,) = look(self.probe, self.patient)
        assert isinstance(evidence, Evidence)
        self.reason = evidence.reason
        return evidence.sign, evidence.strength


@pytest.mark.parametrize("xid", [48, 64, 74, 79, 95])
def test_an_xid_that_needs_a_reset_is_fatal_when_it_stays(xid: int) -> None:
    looks = Looks(preset="dcgm")
    assert [looks(DCGM % 0), looks(DCGM % xid), looks(DCGM % xid)] == [GOOD, FIRST, SECOND]
    assert looks.reason.startswith(f'DCGM_FI_DEV_XID_ERRORS == {xid}: DCGM_FI_DEV_XID_ERRORS{{gpu="1",')
    assert looks.reason.endswith(f"is {xid}")
    assert looks(DCGM % 0) == GOOD


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_an_xid_of_an_application_or_a_repair_is_none(xid: int) -> None:
    looks = Looks(preset="dcgm")
    assert looks(DCGM % xid) == GOOD
    assert looks(DCGM % 0 + XID_COUNT % xid) == GOOD


def test_a_fatal_xid_hidden_by_a_later_one_is_counted() -> None:
    assert Looks(preset="dcgm")(DCGM % 45 + XID_COUNT % 95) == FIRST


def test_growth_counts_from_the_second_look() -> None:
    looks = Looks(preset="neuron")
    assert looks(NEURON % (7, 0)) == GOOD
    assert looks(NEURON % (7, 5)) == GOOD
    assert looks(NEURON % (8, 5)) == FIRST
    assert looks(NEURON % (9, 5)) == SECOND
    assert looks(NEURON % (9, 5)) == GOOD


def test_a_counter_that_began_anew_grew_by_what_it_has() -> None:
    looks = Looks(preset="neuron")
    assert [looks(NEURON % (7, 0)), looks(NEURON % (0, 0)), looks(NEURON % (2, 0))] == [GOOD, GOOD, FIRST]


def test_a_failed_look_does_not_forget_the_last_values() -> None:
    looks = Looks(preset="neuron")
    assert [looks(NEURON % (7, 0)), looks(Trouble.TIMEOUT), looks(NEURON % (8, 0))] == [GOOD, DOUBT, FIRST]


def test_a_file_system_is_bad_when_it_becomes_read_only_not_when_it_is() -> None:
    looks = Looks(preset="node")
    assert [looks(NODE % (1, 8e9)), looks(NODE % (0, 8e9)), looks(NODE % (1, 8e9))] == [GOOD, GOOD, FIRST]
    assert looks(NODE % (1, 8e9)) == GOOD


def test_a_machine_without_memory_is_bad_while_it_is() -> None:
    looks = Looks(preset="node")
    assert [looks(NODE % (0, 1e6)), looks(NODE % (0, 1e6)), looks(NODE % (0, 8e9))] == [FIRST, SECOND, GOOD]


def test_a_rule_of_ones_own() -> None:
    looks = Looks(rule='load{cpu="0"} > 100')
    assert looks('load{cpu="0"} 100\nload{cpu="1"} 900\n') == GOOD
    assert looks('load{cpu="0"} 101\n') == FIRST
    assert looks.probe.name == 'exporter n1:9400/metrics load{cpu="0"} > 100'


def test_a_page_without_the_samples_says_nothing_but_takes_a_bad_word_back() -> None:
    looks = Looks(rule="x > 0")
    assert looks("<html>\n") == NOTHING
    assert looks.reason == "the page has no sample of x; check the URL and the rule"
    assert [looks("x 1"), looks("y 1"), looks("y 1")] == [FIRST, GOOD, NOTHING]


@pytest.mark.parametrize("answer", [Trouble.REFUSED, Trouble.TIMEOUT, Trouble.BROKEN, reply(500), reply(404)])
def test_an_exporter_that_is_gone_is_no_node_that_is_gone(answer: Answer) -> None:
    looks = Looks(preset="dcgm")
    assert [looks(answer) for _ in range(3)] == [DOUBT] * 3


def test_ten_megabytes_are_too_much() -> None:
    looks = Looks(preset="dcgm")
    assert looks("y 1\n" * (10 << 18)) == DOUBT
    assert looks.reason == "more than 4194304 bytes"


def test_too_many_lines_of_a_metric_are_too_much() -> None:
    looks = Looks(rule="x > 0")
    assert looks("x 1\n" * 100_000) == DOUBT
    assert looks.reason == "more than 262144 bytes of lines that begin with x"


@pytest.mark.parametrize(("rule", "preset"), [("", ""), ("x > 0", "dcgm"), ("x", "")])
def test_it_goes_by_one_rule_or_one_preset(rule: str, preset: str) -> None:
    with pytest.raises(RuleError):
        ExporterProbe("http://n/metrics", rule, preset)
