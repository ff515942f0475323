"""Tests of the load tools themselves; `make test-all` runs them."""
