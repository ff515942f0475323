"""What becomes of a configuration that is read again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.app import App
from cellgate.proxy.config.load_process import ConfigError


@pytest.mark.parametrize(("error", "is_said"), [(ConfigError(["no"]), False), (KeyError("x"), True)])
def test_a_reload_that_fails_by_a_defect_is_said(error: Exception, *, is_said: bool) -> None:
    async def fail() -> str:
        raise error

    async def scenario() -> list[Any]:
        said: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["exception"]))
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        App._reloaded(cast("Any", SimpleNamespace(_reloads={task})), task)
        return said

    assert asyncio.run(scenario()) == ([error] if is_said else [])
