"""Conducts an engine's own operations for an operator: pause and sleep, resume and wake.

1. A unit is out of rotation before its engine stands still: it is drained first, so other gates know, too.
2. When the engine goes on, the unit has to show work before it gets requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.probes.engines import ENGINES, EngineControl, engine
from cellgate.proxy.control.hold_watch import HoldWatch
from cellgate.router.unit_state import UnitState

ENGINE_ANSWER_S = 30.0
"""The timeout of an operation that waits for no requests."""
EngineAction = Literal["pause", "sleep", "resume", "wake"]
STILL: tuple[EngineAction, ...] = ("pause", "sleep")
ONWARD: tuple[EngineAction, ...] = ("resume", "wake")
DEFAULT_MODE = "wait"
_ENGINE_EXCERPT = 160
_HINT = "vLLM has it with VLLM_SERVER_DEV_MODE=1, sleeping also needs --enable-sleep-mode"


class EngineControlError(Exception):
    """An operation failed. `str()` is one line that says what to do."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineController:
    """The operations of one gate. `wait_s` is how long requests may take to finish in mode `wait`."""

    fetch_of: Callable[[UnitState], Fetch]
    set_drain: Callable[[str, bool], object]
    hold_watch: HoldWatch
    wait_s: float

    async def act_on_engine(self, state: UnitState, action: EngineAction, mode: str) -> str:
        """Do it; returns the mode that was used. Raises ConductError."""
        control = _control(state, action)
        mode = _mode(state, action, control, mode)
        if action in STILL:
            await self._stand_still(state, action, control, mode)
        else:
            await self._unpause(state, action, control)
        return mode

    async def _stand_still(self, state: UnitState, action: str, control: EngineControl, mode: str) -> None:
        name, was_drained = state.unit.name, state.drained
        self.set_drain(name, True)
        try:
            reply = await self._post(state, control, mode, self.wait_s)
        except FetchError as error:
            reason = (
                f"unit {name}: {action} ({mode}) was not answered: {error}; it stays drained, because its "
            )
            reason += (
                f"engine may still do it: see cellgate why {name}, then resume or wake it, or undrain it"
            )
            raise EngineControlError(HTTPStatus.BAD_GATEWAY, reason) from None
        if reply.status >= HTTPStatus.BAD_REQUEST:
            self.set_drain(name, was_drained)
            raise _refused(state, action, control, reply)
        self.hold_watch.ask(state)

    async def _unpause(self, state: UnitState, action: str, control: EngineControl) -> None:
        try:
            reply = await self._post(state, control, "", ENGINE_ANSWER_S)
        except FetchError as error:
            reason = (
                f"unit {state.unit.name}: {action} was not answered: {error}; it stays as it is: try again"
            )
            raise EngineControlError(HTTPStatus.BAD_GATEWAY, reason) from None
        if reply.status >= HTTPStatus.BAD_REQUEST:
            raise _refused(state, action, control, reply)
        self.hold_watch.prove(state)
        self.set_drain(state.unit.name, False)

    async def _post(self, state: UnitState, control: EngineControl, mode: str, timeout_s: float) -> Reply:
        """Raises FetchError."""
        word = control.modes.get(mode, "")
        return await self.fetch_of(state)(
            "POST",
            control.path.replace("{mode}", word),
            body=control.body.replace("{mode}", word).encode(),
            timeout_s=timeout_s,
        )


def _control(state: UnitState, action: str) -> EngineControl:
    control = engine(state.engine).controls.get(action)
    if control is None:
        able = ", ".join(name for name, surfaces in ENGINES.items() if action in surfaces.controls)
        own = f"engine {state.engine}" if state.engine else "its engine, which is not known yet,"
        reason = f"unit {state.unit.name}: {own} has no {action} that the gate knows; these have: {able}"
        raise EngineControlError(HTTPStatus.CONFLICT, reason)
    return control


def _mode(state: UnitState, action: str, control: EngineControl, mode: str) -> str:
    """The mode to use; empty for an operation that has none."""
    if not control.modes:
        return ""
    if not mode:
        return DEFAULT_MODE if DEFAULT_MODE in control.modes else next(iter(control.modes))
    if mode not in control.modes:
        known = ", ".join(control.modes)
        reason = (
            f"unit {state.unit.name}: {action} of engine {state.engine} has the modes {known}, not {mode!r}"
        )
        raise EngineControlError(HTTPStatus.BAD_REQUEST, reason)
    return mode


def _refused(state: UnitState, action: str, control: EngineControl, reply: Reply) -> EngineControlError:
    path = control.path.partition("?")[0]
    said = ascii(reply.body[:_ENGINE_EXCERPT].decode("utf-8", "replace"))
    reason = (
        f"unit {state.unit.name}: its engine refused to {action}: POST {path}: HTTP {reply.status} {said}; "
    )
    hint = _HINT if reply.status == HTTPStatus.NOT_FOUND else "see its log"
    return EngineControlError(HTTPStatus.BAD_GATEWAY, f"{reason}nothing has changed; {hint}")
