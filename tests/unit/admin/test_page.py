"""The status page as a file: nothing from elsewhere, its policy fits it, and its words can be read."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from cellgate.proxy.admin.pages import load_page

TEXT = files("cellgate.proxy.admin").joinpath("page.html").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", block))
    for block in re.findall(r":root \{(.*?)\}", TEXT, re.DOTALL)
)


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2.2: 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "colour", ["ink", "muted", "up", "suspect", "down", "starting", "probation", "drained"]
)
def test_every_word_can_be_read_in_both_themes(theme: dict[str, str], colour: str) -> None:
    # 4.5 is what WCAG 2.2 AA asks of text of this size.
    assert contrast(theme[colour], theme["card"]) >= 4.5


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|//[a-z]+\.|@import|<link(?! rel=\"icon\" href=\"data:,\")| src=", TEXT)


def test_the_policy_lets_only_this_script_and_this_style_run() -> None:
    body, headers = load_page()
    policy = dict(rule.split(" ", 1) for rule in dict(headers)["Content-Security-Policy"].split("; "))
    assert body == TEXT.encode()
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["style-src"])
    assert policy["script-src"] != policy["style-src"]


def test_nothing_is_ever_read_as_html() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", TEXT)
