"""Tests of the core that need an extra: where one was taken out (docs/architecture.md), they go with it."""

from __future__ import annotations

import pytest

from cellgate.extras import EXTRAS, ExtraName, MissingExtraError


def needs(name: ExtraName) -> pytest.MarkDecorator:
    """Marks a test, or a case of one."""
    return pytest.mark.skipif(name not in EXTRAS, reason=str(MissingExtraError(name)))


ONE_OR_TWO_WORKERS = [1, pytest.param(2, marks=needs("workers"))]
"""For tests of a gate of one process that must hold for one of several as well."""
