"""The status page in a real browser: what it shows, on which screens, and what a click does."""

from __future__ import annotations

from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import (
    LINK_FAILED,
    TRANSFERRED,
    Ask,
    Cell,
    Fleet,
    ServingRole,
    Sign,
    SplitStep,
    Strength,
    Unit,
)
from cellgate.router.outliers import Outlier
from tests.browser.stage import TOKEN, Stage, before, failed_roll, fleet, leave
from tests.extras import needs

DESK = (1280, 860)
PHONE = (390, 844)
LOOKS = {"": (DESK, False), "-dark": (DESK, True), "-phone-dark": (PHONE, True), "-phone": (PHONE, False)}
"""What the page is looked at with; by what its photographs are called."""
FITS = "document.documentElement.scrollWidth <= innerWidth"
SPIKED = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


async def opened(stage: Stage, size: tuple[int, int] = DESK, *, dark: bool = False) -> None:
    """The page, once it shows units."""
    await stage.page.look(*size, dark=dark, phone=size == PHONE)
    await stage.page.open(stage.url)
    await stage.page.until("document.querySelector('.unit') !== null && events.length > 0")


def text(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


def click(selector: str) -> str:
    return f"document.querySelector({selector!r}).click()"


def twice(selector: str) -> str:
    """Click, note what the button says, and click again before it changes its mind."""
    script = "(b => { b.click(); const said = b.innerText; b.click(); return said; })"
    return f"{script}(document.querySelector({selector!r}))"


def hurt(stage: Stage) -> None:
    """A wedged unit, one that lost a process, one under suspicion, and a cell that is being emptied."""
    for strength in (Strength.STRONG, Strength.STRONG):
        stage.say(
            "a1", Sign.BAD, strength, "canary", "no token in 1.3 s, and nothing moved; /health says 200"
        )
    stage.kill_node("a2", "a2-1")
    stage.say("a3", Sign.BAD, Strength.STRONG, "progress", "stalled for 1.2 s with 4 requests in flight")
    for name in ("b1", "b2", "b3"):
        stage.drain(name)
    stage.now += 75.0
    for number, name in enumerate(("a3", "b1", "a4", "c1", "c1", "c2")):
        stage.board.open(name, Ask(prompt_bytes=12_000 * (number + 1)), stage.now, retry=False)


@before(fleet(1, 3))
async def test_what_is_up_and_not_well_needs_attention_with_the_command_that_helps(stage: Stage) -> None:
    stage.board.units["a1"].outlier = Outlier(0.5)
    lost = "agent a2-1:9911 unreachable for 22 s"
    stage.say("a2", Sign.NEUTRAL, Strength.WEAK, "agent", lost, "a2-1")
    await opened(stage)
    shown = await stage.page.run(text("#trouble"))
    assert "Needs attention: 2 units" in shown
    assert "up, slow" in shown
    assert "a token takes 2.0 times as long as on other units of its cell" in shown
    assert "up, node not watched" in shown
    assert "agent a2-1:9911 unreachable for 22 s (source agent, node a2-1)" in shown
    assert "Next: cellgate why a2. You can start the agent of node a2-1 again" in shown
    told = await stage.page.run(text("#events"))
    assert "unit a1 (cell a) is up (was starting): one token in 40 ms" in told
    await stage.photograph("not-well")


@before(fleet(3, 4))
async def test_trouble_comes_first_with_its_reason_and_its_node(stage: Stage) -> None:
    hurt(stage)
    for name, (size, dark) in LOOKS.items():
        await opened(stage, size, dark=dark)
        run = stage.page.run
        shown = await run(text("#trouble"))
        assert "Needs attention: 3 units" in shown
        assert shown.index("no token in 1.3 s") < shown.index("stalled for") < shown.index("drained")
        assert "cell a, for 1m 15s, node a2-1" in shown
        assert "3 of 4 units: b1, b2, b3" in shown
        assert "1 still in flight there" in shown
        assert await run("[...document.querySelectorAll('.node.bad')].map(n => n.innerText).join()") == "a2-1"
        assert "drained" in await run("document.querySelectorAll('.cell')[1].innerText")
        assert await run(text("#summary")) == "7 of 12 units in rotation"
        assert await run(FITS), "it scrolls sideways"
        await stage.photograph(f"status-page{name}")
    await run(click("#trouble li button"))
    await stage.page.until("document.querySelectorAll('#detail-story li').length >= 2")
    story = await run(text("#detail-story"))
    assert "no token in 1.3 s" in story
    assert "a2" not in story, "of no other unit"
    await stage.photograph("story")


@before(fleet(5, 100, nodes=4))
async def test_five_hundred_units_are_a_map_that_can_be_filtered(stage: Stage) -> None:
    stage.kill_node("d7", "d7-3")
    stage.drain("b20")
    for name, size in {"-phone": PHONE, "": DESK}.items():
        await opened(stage, size)
        run = stage.page.run
        assert await run("document.querySelectorAll('.unit').length") == 500
        assert await run("document.querySelectorAll('.node').length") == 2000 + await run(
            "document.querySelectorAll('#trouble .node').length"
        )
        assert await run(FITS), "it scrolls sideways"
        await stage.photograph(f"status-page-500{name}")
        await run("$('filter').value = 'd7'; $('filter').dispatchEvent(new Event('input'))")
        assert await run("[...document.querySelectorAll('.unit')].filter(u => u.offsetParent).length") == 11


@needs("operator")
@before(fleet(2, 2))
async def test_a_roll_that_has_stopped_says_at_which_unit_and_why(stage: Stage) -> None:
    stage.roll = failed_roll()
    await opened(stage)
    told = await stage.page.run(text("#roll"))
    assert "Roll 5f3c to 2.0: stopped, 1 of 4 units done" in told
    assert "unit a2: it has not restarted 100 s after its command; for 4m 11s; conducted by gate-7" in told
    rows = "[...document.querySelectorAll('#roll li')].map(row => row.innerText.replaceAll('\\n', ' '))"
    first, second = await stage.page.run(rows)
    assert all(part in first for part in ("a2", "proving, old software", "cell a, for 12 s"))
    assert all(part in second for part in ("b1", "failed", "it went DOWN while it was watched"))
    await stage.photograph("roll")
    stage.roll = failed_roll(status="done")
    await stage.page.until("$('roll').hidden")


@before(fleet(1, 2))
async def test_a_flip_is_on_the_page_at_once_not_with_the_next_poll(stage: Stage) -> None:
    await opened(stage)
    await stage.page.until(f"{text('#live')} === '● live'")
    await stage.page.run("clearTimeout(due); look = (old => () => old().then(() => clearTimeout(due)))(look)")
    stage.kill_node("a1", "a1-1")
    await stage.page.until(
        f"{text('#events li')}.includes('a1 (cell a) is down (was up): gone: process 4711')"
    )
    await stage.page.until("document.querySelector('.unit.down') !== null")


@before(fleet(1, 3))
async def test_a_unit_tells_why_and_is_drained_with_the_token_after_a_second_click(stage: Stage) -> None:
    stage.kill_node("a1", "a1-1")
    await opened(stage)
    page, board = stage.page, stage.board
    await page.run(click(".unit.down"))
    await page.until(f"{text('#detail-why')}.includes('a1 is down')")
    assert "gone: process 4711" in await page.run(text("#detail-nodes"))
    await stage.photograph("detail")
    assert await page.run(twice("#detail-drain")) == "Drain: sure?"
    # A page in a browser is not trusted as a person at this machine is.
    await page.until("$('key').open")
    assert [each.drained for each in board] == [False, False, False]
    await page.run(f"$('key-token').value = {TOKEN!r}; {click('#key button')}")
    await page.until("sessionStorage.getItem('cellgate-token') !== null")
    await page.run(twice("#detail-drain"))
    await page.until(f"{text('#detail-drain')} === 'Undrain'")
    assert [each.drained for each in board] == [True, False, False]
    assert await page.run("localStorage.length + document.cookie.length") == 0
    await page.run("$('detail').close()")
    await page.run(twice(".cell button"))
    await page.until(f"{text('.cell > div')}.includes('Undrain cell')")
    assert [each.drained for each in board] == [True, True, True]
    # In one go, which is one event.
    await page.until(f"{text('#events li')}.includes('cell a drained by 127.0.0.1')")


roles: dict[str, ServingRole] = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
units = tuple(Unit(name, "a", f"http://{name}:8000", role=role) for name, role in roles.items())


@before(Fleet((Cell("a", transfer="nixl"),), units))
async def test_roles_are_on_the_page_and_the_links_of_a_unit_are_told(stage: Stage) -> None:
    pairs, now = stage.board.pairs, stage.now
    for prefiller in ("p1", "p2"):
        pairs.apply(SplitStep(TRANSFERRED, prefiller, "d1", 4000, 0.1), now)
        pairs.apply(SplitStep(TRANSFERRED, prefiller, "d1", 4000, 0.1), now)
    pairs.apply(SplitStep(LINK_FAILED, "p1", "d2", reason="unit d2 answered 500"), now)
    stage.events.add(Action("link_lost", "gate", "d2", "link p1 -> d2: unit d2 answered 500"))
    await opened(stage)
    page = stage.page
    cards = await page.run(text(".units"))
    assert (cards.count("prefill"), cards.count("decode")) == (2, 2)
    assert cards.count("The link from p1 to d2 is avoided: transfers failed.") == 2
    await stage.photograph("roles")
    await page.run("[...document.querySelectorAll('.unit')].at(-1).click()")
    await page.until(f"{text('#detail-links')}.includes('p1 → d2')")
    assert "avoided for 5.0 s more, after 1 failures in a row" in await page.run(text("#detail-links"))
    await stage.photograph("links")


@before(fleet(1, 2))
async def test_a_second_click_does_what_the_first_one_was_told(stage: Stage) -> None:
    await opened(stage)
    page, board = stage.page, stage.board
    await page.run(f"sessionStorage.setItem('cellgate-token', {TOKEN!r})")
    await page.run(click(".cell button"))
    for name in ("a1", "a2"):
        stage.drain(name)
    await page.until("document.querySelectorAll('.unit.drained').length === 2")
    await page.run(click(".cell button"))
    await page.until(f"{text('.cell > div')}.includes('Undrain cell') && !document.querySelector('.sure')")
    assert [each.drained for each in board] == [True, True]
    await page.run("openDetail('a1')")
    await page.until(f"{text('#detail-drain')} === 'Undrain'")
    await page.run(click("#detail-drain"))
    opened_now = "$('detail').close(); openDetail('a2'); $('detail-drain').disabled"
    assert await page.run(opened_now), "nothing is known of a2 yet"
    await page.until("!$('detail-drain').disabled")
    assert await page.run(text("#detail-drain")) == "Undrain"


@before(fleet(1, 2))
async def test_from_elsewhere_the_page_asks_for_the_token_before_it_shows_anything(stage: Stage) -> None:
    await stage.page.send_with({"X-Forwarded-For": "192.0.2.9"})
    await stage.page.look(*DESK)
    await stage.page.open(stage.url)
    await stage.page.until("typeof $ === 'function' && $('key').open")
    assert await stage.page.run("document.querySelectorAll('.unit').length") == 0
    await stage.page.run(click("#key button:last-child"))
    await stage.page.until(f"{text('#notice')}.startsWith('Without the admin token')")
    await stage.page.run(click("#notice"))
    await stage.page.run(f"$('key-token').value = 'a guess'; {click('#key button')}")
    await stage.page.until("!sessionStorage.getItem('cellgate-token') || $('key').open")
    await stage.page.until("$('key').open")
    await stage.page.run(f"$('key-token').value = {TOKEN!r}; {click('#key button')}")
    await stage.page.until("document.querySelectorAll('.unit').length === 2")


@before(fleet(1, 2))
async def test_text_from_outside_stays_text(stage: Stage) -> None:
    for _ in range(2):
        stage.say("a1", Sign.BAD, Strength.STRONG, "canary", f"it answered {SPIKED}")
    await opened(stage)
    await stage.page.run(click(".unit.down"))
    await stage.page.until(f"{text('#detail-why')}.includes('onerror')")
    assert await stage.page.run("document.querySelectorAll('img').length") == 0
    assert await stage.page.run("document.scripts.length") == 1
    assert "owned" not in await stage.page.run("document.title")
    assert "<img src=x" in await stage.page.run(text("#trouble"))


@before(fleet(1, 2))
async def test_a_gate_that_is_gone_is_said_so_and_what_was_known_stays_pale(stage: Stage) -> None:
    await opened(stage)
    assert await stage.page.run("document.getElementById('past').hidden"), "a gate that has just started"
    await leave(stage.server, stage.listening)
    await stage.page.until(f"{text('#notice')}.includes('has not answered since')")
    assert await stage.page.run("document.querySelectorAll('.stale .unit').length") == 2
    assert await stage.page.run(text("#live")) == "○ lost"
    await stage.photograph("gone")


@before(fleet(3, 4))
async def test_the_last_hour_is_drawn_and_told_in_figures(stage: Stage) -> None:
    steps = 200
    stage.history = {
        "step_s": 10.0,
        "requests": [20.0 + 10 * (step % 7) for step in range(steps)],
        "failed": [5.0 if step in (120, 121) else 0.0 for step in range(steps)],
        "faulty": [30.0] * steps,
        "ttft_s": [None if step < 5 else 0.2 + 0.01 * (step % 9) for step in range(steps)],
        "tokens": [3000.0 + 100 * (step % 11) for step in range(steps)],
        "usable": [12 if step < 150 else 11 for step in range(steps)],
        "waiting": [0] * steps,
    }
    await opened(stage)
    run = stage.page.run
    await stage.page.until("document.querySelectorAll('#past polyline').length === 7")
    shown = await run(text("#past"))
    assert "units in rotation\n12" in shown, "those of now"
    assert "4xx/s\n30" in shown
    assert "TTFT, mean\n210 ms" in shown
    line = "document.querySelector('#past polyline.ttft_s').getAttribute('points')"
    assert await run(f"{line}.trim().split(/\\s+/).length") == steps - 5
    await stage.photograph("past")


@before(fleet(2, 2))
async def test_a_slash_goes_to_the_filter_and_escape_empties_it(stage: Stage) -> None:
    await opened(stage)
    run = stage.page.run
    key = "new KeyboardEvent('keydown', {key: '%s', bubbles: true, cancelable: true})"
    press = f"document.activeElement.dispatchEvent({key})"
    await run(press % "/")
    assert await run("document.activeElement.id") == "filter"
    seen = "[...document.querySelectorAll('.unit')].filter(unit => !unit.hidden).length"
    await run("filter.value = 'tiny'; filter.dispatchEvent(new Event('input'))")
    assert await run(seen) == 4, "each serves the model tiny"
    await run("filter.value = 'a1'; filter.dispatchEvent(new Event('input'))")
    assert await run(seen) == 1
    await run(press % "Escape")
    assert await run(seen) == 4
