"""Tests against the ingresses themselves. Skipped where a program is missing; `make test` installs them."""
