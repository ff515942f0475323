"""Each way to act on a unit is carried out by its own module, within its time."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, get_args

import pytest

from cellgate.proxy.config.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    RestartService,
    RunCommand,
    UnitAction,
)
from cellgate.proxy.extras.operator import actions
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from tests.sockets.test_recovery_deeds import ABOUT


def act(remedy: Remedy) -> RecoveryReport:
    async def main() -> RecoveryReport:
        return await actions.action_runner(ssl.create_default_context)(remedy, ABOUT)

    return asyncio.run(main())


def test_every_way_is_known() -> None:
    orchestrated = set(get_args(UnitAction)) - {RunCommand, CallWebhook, RestartService}
    assert set(actions._ORCHESTRATED) == orchestrated


def test_a_service_is_restarted_by_systemctl_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "systemctl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "systemctl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    report = act(Remedy("audit", RestartService("vllm@{unit}.service")))
    assert report.result is RecoveryResult.OK
    assert report.output == "--no-ask-password --no-block restart -- vllm@a1.service\n"


def test_an_orchestrator_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setitem(actions._ORCHESTRATED, ReplacePods, forever)
    report = act(Remedy("audit", ReplacePods(), timeout_s=0.05))
    assert report.result is RecoveryResult.TIMEOUT
    assert report.detail == "not finished within 0.05 s; a part may have been done"
