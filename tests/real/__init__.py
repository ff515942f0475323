"""Tests with real programs around the gate. Skipped where one is missing; `make test-all` installs them."""
