"""What does not keep the rules yet. A line goes with the change that mends it; none is added."""

from __future__ import annotations

OPEN: dict[str, tuple[str, ...]] = {
    "names that mean two things": (),
    "files of one name": (),
    "files over 400 lines": (
        "tests/laws/test_transport_laws.py",
        "tests/sockets/test_admin.py",
        "tests/unit/config/test_load.py",
        "tests/unit/probes/test_agent.py",
        "tests/unit/probes/test_agent_link.py",
    ),
    "functions over 50 lines": (
        "tests/scenarios/harness.py Stage.__init__",
        "tests/sockets/test_admin.py test_a_unit_is_shown_with_the_evidence_behind_its_verdict",
        "tests/sockets/test_admin.py test_a_unit_is_shown_with_the_evidence_behind_its_verdict.check",
    ),
    "subclasses of what is composed": (),
}
"""By rule: the keys of what is found."""
