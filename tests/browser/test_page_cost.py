"""What the status page costs the browser in which it stays open all day."""

from __future__ import annotations

from cellgate.router.nouns import Ask
from tests.browser.stage import Stage, before, fleet
from tests.browser.test_page import opened

WINDOWS, WINDOW_S = 4, 3.0
LIMIT_MS = 50.0
"""Of script in a second, with 500 units that all change."""


@before(fleet(5, 100, nodes=4))
async def test_five_hundred_busy_units_take_less_than_a_twentieth_of_the_scripts_time(stage: Stage) -> None:
    await opened(stage)
    await stage.page.until("document.querySelectorAll('.unit').length === 500")
    taken_ms: list[float] = []
    # Wall time: what else runs on the machine makes some windows longer, and none shorter.
    while not taken_ms or (min(taken_ms) >= LIMIT_MS and len(taken_ms) < WINDOWS):
        for unit in stage.board.units:
            stage.board.open(unit, Ask(prompt_bytes=4000), stage.now, retry=False)
        stage.now += WINDOW_S
        taken_ms.append(await stage.page.script_ms(WINDOW_S) / WINDOW_S)
    print(f"script, ms a second: {', '.join(f'{each:.1f}' for each in taken_ms)}")
    busy = f"document.body.innerText.includes('{100 * len(taken_ms)} in flight')"
    assert await stage.page.run(busy), "nothing changed"
    assert min(taken_ms) < LIMIT_MS, taken_ms
