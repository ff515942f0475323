"""Scenarios: the whole gate before simulated engines, held to the invariants after each."""
