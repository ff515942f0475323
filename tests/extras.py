"""Tests of the core that need an extra: where one was taken out (docs/architecture.md), they go with it."""

from __future__ import annotations

import pytest

from cellgate.extras import EXTRAS, ExtraName, MissingExtraError


def needs(name: ExtraName) -> pytest.MarkDecorator:
    """Marks a test, or a case of one."""
    return pytest.mark.skipif(name not in EXTRAS, reason=str(MissingExtraError(name)))
