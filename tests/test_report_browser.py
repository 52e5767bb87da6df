"""The report in headless Chromium: what a person does with it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_opd.report.page import write_page
from trl_opd.report.serve import make_server

from .generated_run import HOSTILE, make_records, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens an address; at the end no error may have come."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(address: str, **settings: Any) -> Any:
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_page(write_run(tmp_path / "run", make_records(5, 3, 30))).as_uri()


def test_tooltip_on_focus_and_arrow_keys(opened: Any, small: str) -> None:
    page = opened(small)
    first = page.locator(".sample").first.locator(".tok")
    first.nth(0).focus()
    tip = page.locator("#tip")
    assert tip.is_visible()
    told = tip.inner_text()
    assert "student's log-prob" in told
    assert "teacher's log-prob" in told
    assert "The teacher's likeliest tokens" in told
    assert tip.locator("table").nth(1).locator("tr").count() == 4
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert first.nth(2).evaluate("e => e === document.activeElement")
    assert first.nth(2).inner_text().strip() in tip.inner_text()
    assert page.locator(".sample").first.locator(".tok[tabindex='0']").count() == 1, "one stop for the tab key"
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_sign_shows_without_colour(opened: Any, small: str) -> None:
    page = opened(small)
    style = "e => getComputedStyle(e).borderBottomStyle"
    assert page.locator(".tok.up").first.evaluate(style) == "solid"
    assert page.locator(".tok.down").first.evaluate(style) == "dotted"


def test_the_slider_changes_the_step(opened: Any, small: str) -> None:
    page = opened(small)
    assert page.locator("#step-now").inner_text() == "5 of 5"
    before = page.locator(".sample").first.inner_text()
    page.locator("#step").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step-now").inner_text() == "4 of 5"
    assert page.locator(".sample").first.inner_text() != before


def test_a_chart_chooses_a_step_and_worst_tokens_lead_to_their_place(opened: Any, small: str) -> None:
    page = opened(small)
    chart = page.locator("figure.card svg").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + 60)
    assert page.locator("#step-now").inner_text() in ("1 of 5", "2 of 5")
    page.locator("#worst button").first.click()
    page.wait_for_timeout(600)
    assert page.evaluate("document.activeElement.classList.contains('tok')")
    assert page.evaluate("document.activeElement.classList.contains('down')")


def test_dark_and_light(opened: Any, small: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = opened(small, color_scheme="dark")
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    light = page.evaluate(ground)
    assert dark == "rgb(18, 20, 23)"
    assert light == "rgb(247, 247, 245)"
    assert opened(small, color_scheme="light").evaluate(ground) == light


def test_a_phones_width_needs_no_scrolling_sideways(opened: Any, small: str) -> None:
    page = opened(small, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".tok").nth(20).focus()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_hostile_completions_are_text(opened: Any, tmp_path: Path) -> None:
    page = opened(write_page(write_run(tmp_path / "run", make_records(2, 2, 0, texts=HOSTILE))).as_uri())
    assert page.title() == "run · distillation report"
    assert page.locator("#sample-list img, #sample-list script").count() == 0
    shown = page.locator(".sample").first.locator(".tok").all_text_contents()
    lone = HOSTILE.index("\ud800")
    assert shown[:lone] + shown[lone + 1 :] == HOSTILE[:lone] + HOSTILE[lone + 1 :]


def test_a_long_run_loads_in_time(opened: Any, tmp_path: Path) -> None:
    path = write_page(write_run(tmp_path / "run", make_records(200, 8, 100)))
    assert path.stat().st_size < 5e6
    page = opened(path.as_uri())
    milliseconds = page.evaluate("performance.now()")
    print(f"{path.stat().st_size / 1e6:.2f} MB, ready within {milliseconds:.0f} ms")
    assert milliseconds < 2000


def test_watching_reloads_and_stays_in_place(opened: Any, tmp_path: Path) -> None:
    write_run(tmp_path, make_records(5, 3, 30))
    with make_server(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = opened(f"http://127.0.0.1:{server.server_address[1]}/", viewport={"width": 900, "height": 500})
        page.locator("#step").focus()
        page.keyboard.press("ArrowLeft")
        page.evaluate("scrollTo({top: 700, behavior: 'instant'})")
        write_run(tmp_path, make_records(6, 3, 30))
        deadline = time.monotonic() + 15
        while page.locator("#step").get_attribute("max") != "5" and time.monotonic() < deadline:
            page.wait_for_timeout(200)
        page.wait_for_selector("html[data-ready]")
        assert page.locator("#step-now").inner_text() == "4 of 6"
        assert abs(page.evaluate("scrollY") - 700) <= 20
        server.shutdown()
