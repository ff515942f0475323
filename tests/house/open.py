"""What does not keep the rules yet. A line goes with the change that mends it; none is added."""

from __future__ import annotations

_NAMES = """
Bounds Event Headers Host Key Kind Known Limits LostError Member Merged Message Place Plan Ports Question
Reading Record Report Result Role Row Said Settle Sink Standing State TOKEN_VARIABLE Told View
Waiting Watch Ways Word explain framed merge name_of plan read standing view_of why_not why_refused
"""

OPEN: dict[str, tuple[str, ...]] = {
    "names that mean two things": tuple(_NAMES.split()),
    "files of one name": ("commands", "link", "schema"),
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
