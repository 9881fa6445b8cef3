"""What the report's script does, in a real browser with a real mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, Browser
from quiverfl.results.report.page import write_report
from run_folders import write_comparison

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine"),
]

CHART = "document.querySelector('#curves .chart')"
TIP = f"{CHART}.querySelector('.tip')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_comparison(folder / "runs", (0, 1), rounds=20, clients=15)
    write_report([folder / "runs"], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, page: Path) -> Iterator[Browser]:
    """The page, freshly opened; a script that fails, or asks for anything, fails the test."""
    window.window(1400)
    window.open(page)
    window.console.clear()
    window.requests.clear()
    yield window
    assert window.console == []
    assert [r for r in window.requests if r != page.as_uri()] == []


def place(browser: Browser, element: str) -> dict[str, float]:
    """Where an element is in the window, once it is scrolled to."""
    browser.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
    found = browser.evaluate(f"{element}.getBoundingClientRect().toJSON()")
    assert isinstance(found, dict)
    return found


def drag(browser: Browser, element: str, begin: float, end: float) -> None:
    """Across the middle of an element, from one share of its width to another."""
    box = place(browser, element)
    y = box["top"] + 0.4 * box["height"]
    start, stop = (box["left"] + share * box["width"] for share in (begin, end))
    browser.mouse("Moved", start, y)
    browser.mouse("Pressed", start, y, clicks=1)
    browser.mouse("Moved", (start + stop) / 2, y, clicks=1)
    browser.mouse("Moved", stop, y, clicks=1)
    browser.mouse("Released", stop, y, clicks=1)


def ticks(browser: Browser, kind: str) -> list[str]:
    script = f"[...{CHART}.querySelectorAll('.tick.{kind}')].map((t) => t.textContent)"
    found = browser.evaluate(script)
    assert isinstance(found, list)
    return found


def first_column(browser: Browser, table: str) -> list[str]:
    name = "(row) => row.cells[0].lastChild.textContent"  # behind the key
    found = browser.evaluate(f"[...document.querySelectorAll('{table} tbody tr')].map({name})")
    assert isinstance(found, list)
    return found


RIGHT = "getBoundingClientRect().right"
BEYOND = f"(t, c) => t.{RIGHT} > c.{RIGHT} + 1"


def test_nothing_is_cut_off_at_the_right(browser: Browser) -> None:
    """Tables have room in a wide window; the last number below a chart has it in any."""
    tables = "[...document.querySelectorAll('.wide')]"
    assert browser.evaluate(f"{tables}.length") > 3
    assert browser.evaluate(f"{tables}.filter((t) => t.scrollWidth > t.clientWidth).length") == 0
    for width in (1400, 420):
        browser.window(width)
        browser.until(f"{CHART}.querySelector('svg').clientWidth <= {CHART}.clientWidth")
        cut = (
            "[...document.querySelectorAll('.chart')].flatMap((c) => "
            f"[...c.querySelectorAll('.tick')].filter((t) => ({BEYOND})(t, c)))"
        )
        assert browser.evaluate(f"{cut}.length") == 0, width
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_pointer_is_told_the_values(browser: Browser) -> None:
    box = place(browser, CHART)
    browser.mouse("Moved", box["left"] + box["width"] - 11, box["top"] + 60)
    text = browser.evaluate(f"{TIP}.hidden ? '' : {TIP}.innerText")
    assert text.startswith("round 20\n"), "rounds are counted from one"
    assert [text.count(label) for label in ("DFedPGP", "FedAvg", "Local")] == [1, 1, 1]
    assert text.count("%") == 9, "the mean of two seeds and their range, of three experiments"
    browser.mouse("Moved", 2, 2)
    assert browser.evaluate(f"{TIP}.hidden")


def test_an_experiment_is_switched_off_everywhere_and_on_again(browser: Browser) -> None:
    lines = f"{CHART}.querySelectorAll('.line').length"
    switch = "document.querySelector('.legend button[data-label=FedAvg]')"
    others = "document.querySelectorAll('#clients .chart')[0].querySelectorAll('.point').length"
    assert browser.evaluate(lines) == 3
    assert browser.evaluate(others) == 3 * 2 * 15
    browser.evaluate(f"{switch}.click()")
    assert browser.evaluate(lines) == 2
    assert browser.evaluate(others) == 2 * 2 * 15
    pressed = "document.querySelectorAll('.legend button[aria-pressed=false]').length"
    assert browser.evaluate(pressed) == 2, "both legends say so"
    browser.evaluate(f"{switch}.click()")
    assert browser.evaluate(lines) == 3


def test_a_drag_zooms_and_a_double_click_goes_back(browser: Browser) -> None:
    before = ticks(browser, "middle")
    drag(browser, CHART, 0.6, 0.9)
    zoomed = ticks(browser, "middle")
    assert zoomed != before
    assert min(int(text) for text in zoomed) >= 10
    reset = f"{CHART}.parentElement.querySelector('.reset')"
    assert not browser.evaluate(f"{reset}.hidden")
    box = place(browser, CHART)
    x, y = box["left"] + 100, box["top"] + 100
    for clicks in (1, 2):
        browser.mouse("Pressed", x, y, clicks=clicks)
        browser.mouse("Released", x, y, clicks=clicks)
    assert ticks(browser, "middle") == before
    assert browser.evaluate(f"{reset}.hidden")


def test_the_early_rounds_are_one_click_away(browser: Browser) -> None:
    def lowest() -> float:
        return min(float(text.removesuffix(" %")) for text in ticks(browser, "end"))

    late = lowest()
    browser.evaluate(f"{CHART}.parentElement.querySelector('.range').click()")
    assert lowest() < late


def test_a_table_is_sorted_by_the_title_that_is_clicked(browser: Browser) -> None:
    table = "#results .wide table"
    assert first_column(browser, table)[:3] == ["Local", "FedAvg", "DFedPGP"]
    title = f"document.querySelectorAll('{table} thead tr:last-child th')[1]"
    browser.evaluate(f"{title}.click()")
    assert browser.evaluate(f"{title}.getAttribute('aria-sort')") == "descending"
    assert first_column(browser, table)[:3] == ["DFedPGP", "FedAvg", "Local"]
    browser.evaluate(f"{title}.click()")
    assert first_column(browser, table)[:3] == ["Local", "FedAvg", "DFedPGP"]


def test_bytes_are_sorted_by_their_size_not_by_their_letters(browser: Browser) -> None:
    """kB against MB: Local sent nothing, FedAvg kilobytes or megabytes."""
    cost = "[...document.querySelectorAll('#results .wide table')].at(-1)"
    title = f"{cost}.querySelectorAll('thead tr:last-child th')[1]"
    assert browser.evaluate(f"{title}.innerText").startswith("bytes")
    browser.evaluate(f"{title}.click()")
    rows = browser.evaluate(f"[...{cost}.tBodies[0].rows].map((r) => r.cells[1].innerText)")
    assert [text.split()[1] for text in rows] == ["MB", "MB", "B"]
    assert float(rows[0].split()[0]) > float(rows[1].split()[0])


def test_clients_of_another_seed_and_stage_can_be_looked_at(browser: Browser) -> None:
    def rows() -> list[Any]:
        script = "[...document.querySelectorAll('.people tbody tr')].map((r) => r.innerText)"
        found = browser.evaluate(script)
        assert isinstance(found, list)
        return found

    def choose(name: str, option: int) -> None:
        select = f"document.querySelector('.clients select[name=\"{name}\"]')"
        browser.evaluate(f"{select}.value = {option}; {select}.onchange()")

    first = rows()
    assert len(first) == 12
    browser.evaluate("document.querySelector('.clients .more').click()")
    assert len(rows()) == 15
    choose("data of", 1)
    second = rows()
    assert second[:12] != first
    choose("stage", 1)
    assert rows() != second


def test_dark_follows_the_system_until_somebody_chooses(browser: Browser) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.chart text')).fill"
    assert browser.evaluate(ground) == "rgb(255, 255, 255)"
    browser.window(1400, dark=True)
    assert browser.evaluate(ground) == "rgb(22, 23, 26)"
    assert browser.evaluate(ink) == "rgb(178, 181, 187)"
    browser.evaluate("document.querySelector('.theme').click()")
    assert browser.evaluate(ground) == "rgb(255, 255, 255)"
    browser.evaluate("document.querySelector('.theme').click(); localStorage.clear()")
    assert browser.evaluate(ground) == "rgb(22, 23, 26)"


@pytest.mark.parametrize("width", [1400, 420])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    browser.window(width)
    browser.until(f"document.documentElement.clientWidth <= {width}")
    browser.until(f"document.documentElement.scrollWidth <= {width}")


def test_without_scripts_the_page_is_whole(window: Browser, page: Path) -> None:
    window.window(1400)
    window.scripts(on=False)
    try:
        window.open(page)
        text = page.read_text()
        assert window.evaluate("document.querySelectorAll('.chart, button, select').length") == 0
        shown = "[...document.querySelectorAll('svg')].filter((s) => s.clientWidth > 20).length"
        assert window.evaluate(shown) == text.count("<svg")
    finally:
        window.scripts(on=True)
