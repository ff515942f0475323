"""Six faults on real processes: the page, `cellgate units` and `cellgate why` name the present cause first.

With CELLGATE_PHOTOS=FOLDER it leaves a photograph of the page for each fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from loadtests.kit.agents import IMAGE, Agents
from loadtests.simunit.process import SimUnit, sim_units
from tests.browser.chromium import Page, tab
from tests.browser.stage import PHOTOS
from tests.wire.process import ROOT, GateProcess

pytestmark = pytest.mark.nightly

USERS = 9
_DESK = (1280, 860)


@dataclass(frozen=True)
class Fault:
    """What happens to unit a1, how it ends, and what is told of it: the word, the cause, what helps."""

    hurt: Callable[[SimUnit, Agents], object]
    heal: Callable[[SimUnit, Agents], object]
    word: str
    cause: str
    helps: str


def _restart(unit: SimUnit, agents: Agents) -> None:
    unit.restart()
    agents.follow(unit)


def _heal(unit: SimUnit, _: Agents) -> object:
    return unit.fault("heal")


FAULTS = {
    "slow": Fault(
        lambda unit, _: unit.fault("slow", factor=3.0),
        _heal,
        "up, slow",
        "slow: a token takes ",
        "compare clocks, temperatures and links",
    ),
    "hang": Fault(
        lambda unit, _: unit.fault("freeze_engine"), _heal, "down", "no token", "check its engine's log"
    ),
    "refused": Fault(
        lambda unit, _: unit.fault("error_rate", rate=1.0, status=401),
        _heal,
        "down",
        "401",
        "compare its key",
    ),
    "leader-killed": Fault(
        lambda unit, _: unit.kill(), _restart, "down", "gone: process ", "check node a1-0"
    ),
    "follower-stopped": Fault(
        lambda unit, _: unit.signal_follower(signal.SIGSTOP),
        lambda unit, _: unit.signal_follower(signal.SIGCONT),
        "down",
        "stopped: process ",
        "check node a1-1",
    ),
    "agent-gone": Fault(
        lambda _, agents: os.kill(agents.pid("a1-1"), signal.SIGKILL),
        lambda _, agents: agents.restart("a1-1", IMAGE),
        "up, node not watched",
        "unreachable",
        "start the agent of node a1-1",
    ),
}


@asynccontextmanager
async def users(url: str) -> AsyncIterator[None]:
    """So many stream one answer after another; what fails is asked again."""
    body = {"model": "sim", "prompt": "Once", "stream": True, "max_tokens": 60}

    async def stream(client: aiohttp.ClientSession) -> None:
        while True:
            with suppress(aiohttp.ClientError):
                async with client.post(f"{url}/v1/completions", json=body) as reply:
                    await reply.read()
            await asyncio.sleep(0.05)

    async with aiohttp.ClientSession() as client:
        tasks = [asyncio.create_task(stream(client)) for _ in range(USERS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def told(gate: GateProcess, *words: str) -> list[str]:
    """The lines that a command prints about a1."""
    command = [sys.executable, "-m", "cellgate", *words, "--admin", f"127.0.0.1:{gate.admin_port}"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return [line for line in out.decode().splitlines() if line.startswith("a1 ")]


async def check(name: str, fault: Fault, page: Page, gate: GateProcess) -> None:
    """All three say the same, now."""
    card = "document.querySelector('#trouble li').innerText.replaceAll('\\n', ' ')"
    row = f"document.querySelector('#trouble li') !== null && {card}"
    wanted = f"({row}).toString().includes({fault.cause!r}) && {card}.includes({fault.word!r})"
    await page.until(wanted)
    shown = await page.run(row)
    assert shown.startswith("a1"), shown
    assert f"You can {fault.helps}" in shown
    assert "Needs attention: 1 unit" in await page.run("document.querySelector('#trouble').innerText")
    [units], [why] = await told(gate, "units"), await told(gate, "why", "a1")
    print(f"{name}\n  page:  {shown}\n  units: {units}\n  why:   {why}")
    assert fault.cause in units
    assert fault.cause in why
    if PHOTOS:
        (Path(PHOTOS) / f"fault-{name}.png").write_bytes(await page.photograph())


async def night(gate: GateProcess, unit: SimUnit, agents: Agents, browser: int) -> None:
    """One fault after the other."""
    async with tab(browser) as page, users(gate.url):
        await page.look(*_DESK)
        await page.open(f"http://127.0.0.1:{gate.admin_port}/")
        is_well = (
            "document.querySelectorAll('.unit.in').length === 3 && document.getElementById('trouble').hidden"
        )
        for name, fault in FAULTS.items():
            await page.until(is_well)
            await asyncio.to_thread(fault.hurt, unit, agents)
            await check(name, fault, page, gate)
            await asyncio.to_thread(fault.heal, unit, agents)
        await page.until(is_well)
        assert page.problems == []


def test_six_faults_are_named_by_their_present_cause(tmp_path: Path, browser: int) -> None:
    names = ("a1", "a2", "a3")
    with sim_units(names, step_ms=20, prefill_tokens_per_s=8000) as units, Agents(units) as agents:
        rows = [{"name": each.name, "url": each.url, "nodes": agents.nodes(each.name)} for each in units]
        cells = [{"name": "a", "units": rows}]
        with GateProcess(tmp_path, {}, cells=cells) as gate:
            asyncio.run(night(gate, units[0], agents, browser))
