"""The status page for everybody: axe-core finds no barrier that it calls serious or critical."""

from __future__ import annotations

from typing import Any

from tests.browser.stage import Stage, before, fleet
from tests.browser.test_page import LOOKS, click, hurt, opened
from tests.real.programs import axe

LOOK = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations
  .filter(each => ['serious', 'critical'].includes(each.impact))
  .map(each => [each.id, each.help,
    each.nodes.slice(0, 3).map(node => node.html + ' ' + node.failureSummary)]))"""


async def barriers(stage: Stage) -> list[Any]:
    """What axe-core finds in the page as it stands."""
    # The page's policy forbids scripts of others, so it comes by the debugger, and as text.
    if not await stage.page.run("typeof axe === 'object'"):
        await stage.page.run(f"{axe().read_text()};0")
    found: list[Any] = await stage.page.run(LOOK)
    return found


@before(fleet(3, 4))
async def test_nobody_is_kept_out(stage: Stage) -> None:
    hurt(stage)
    for size, dark in LOOKS.values():
        await opened(stage, size, dark=dark)
        assert await barriers(stage) == []
        await stage.page.run(click("#trouble li button"))
        await stage.page.until("document.querySelectorAll('#detail-story li').length >= 2")
        assert await barriers(stage) == []
    # Neither by the question for the token.
    await stage.page.send_with({"X-Forwarded-For": "192.0.2.9"})
    await stage.page.open(stage.url)
    await stage.page.until("typeof $ === 'function' && $('key')?.open")
    assert await barriers(stage) == []
