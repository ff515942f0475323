"""What does not keep the rules yet. A line goes with the change that mends it; none is added."""

from __future__ import annotations

_NAMES = """
Bounds Event Headers Host Key Kind Known Limits LostError Member Merged Message Place Plan Ports Question
Reading Record Report Result Role Row Said Settle Sink Standing State TOKEN_VARIABLE Tell Told View
Waiting Watch Ways Word explain framed merge name_of plan read standing view_of why_not why_refused
"""

OPEN: dict[str, tuple[str, ...]] = {
    "arrows that run up": (
        # The gate is the data plane and the control plane at once.
        "gate -> control",
        "control -> gate",
        "gate -> tracing",
        "request -> control",
        "request -> gate",
        "ingress -> wire",
        # Both processes of a gate with workers are composed there.
        "workers -> app",
    ),
    "circles of modules": (
        "app + workers",
        "control + gate + request",
        "metrics",
        "request",
        "router",
        "workers",
    ),
    "names that mean two things": tuple(_NAMES.split()),
    "files of one name": ("commands", "link", "schema"),
    "files over 400 lines": (
        "proxy/gate.py",
        "tests/laws/test_transport_laws.py",
        "tests/sockets/test_admin.py",
        "tests/unit/config/test_load.py",
        "tests/unit/probes/test_agent.py",
        "tests/unit/probes/test_agent_link.py",
    ),
    "functions over 50 lines": (
        "proxy/gate.py Gate.__init__",
        "proxy/workers/worker.py WorkerGate.__init__",
        "tests/scenarios/harness.py Stage.__init__",
        "tests/sockets/test_admin.py test_a_unit_is_shown_with_the_evidence_behind_its_verdict",
        "tests/sockets/test_admin.py test_a_unit_is_shown_with_the_evidence_behind_its_verdict.check",
    ),
    "subclasses of what is composed": (
        "BrainGate",
        "WorkerGate",
    ),
}
"""By rule: the keys of what is found."""
