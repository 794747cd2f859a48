# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site and the pages of plans in Chromium: nothing in the console, nothing wider
than a phone, search, and the clicks of a newcomer. Needs Selenium, Chromium and its driver."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import viz
from harness import framework
from site_pages import QUESTIONS, Page, targets

selenium = framework("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

PHONE = 390  # pixels


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine. One server outlives every page: a browser asks for icons when
    a page has loaded, and a server that has gone then is an error in the next test's console."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    assert address  # serves for as long as there is a browser
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


def said_nothing(browser: Any) -> bool:
    lines = [x for x in browser.get_log("browser") if x["level"] in ("SEVERE", "WARNING")]
    assert not lines, lines
    return True


def has_loaded(browser: Any, wanted: str) -> bool:
    """Say whether a page is there as a whole: its address comes before its text."""
    here: str = browser.current_url
    return here.split("#")[0] == wanted and bool(
        browser.execute_script("return document.readyState === 'complete'")
    )


def width(browser: Any, pixels: int | None) -> None:
    if pixels is None:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    else:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )


def test_pages_on_a_phone(browser: Any, address: str, site: Path, pages: dict[Path, Page]) -> None:
    """Every page: no error in the console, nothing missing, nothing to scroll sideways."""
    width(browser, PHONE)
    wide = []
    for path in pages:
        browser.get(f"{address}/{path.relative_to(site.resolve())}")
        said_nothing(browser)
        found = browser.execute_script("return document.documentElement.scrollWidth")
        if found > PHONE:
            wide.append((path.name, found))
    width(browser, None)
    assert not wide


def test_the_front_page_is_one_screen(browser: Any, address: str) -> None:
    """What it is, for whom, how fast in two pictures, and two commands, on a laptop."""
    screen = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(f"{address}/index.html")
    pictures = browser.find_elements(By.CSS_SELECTOR, "img.half")
    commands = browser.find_elements(By.CSS_SELECTOR, "div.highlight-bash pre")
    assert len(pictures) == 2
    assert all(word in commands[0].text for word in ("examples.serve", "pytest"))
    for shown in (*pictures, commands[0]):
        assert shown.size["height"] > 50
        assert shown.location["y"] + shown.size["height"] <= screen["height"]
    assert commands[0].get_property("scrollWidth") <= commands[0].get_property("clientWidth")
    width(browser, None)


def test_search(browser: Any, address: str, pages: dict[Path, Page]) -> None:
    assert pages
    for words, finds in (("window", True), ("xyzzyplugh", False)):
        browser.get(f"{address}/search.html?q={words}")
        summary = WebDriverWait(browser, 20).until(
            lambda b: b.find_element(By.CSS_SELECTOR, "#search-results .search-summary").text
        )
        results = browser.find_elements(By.CSS_SELECTOR, "#search-results ul.search li a")
        assert bool(results) == finds, summary
    said_nothing(browser)


def clicks_to(question: str, pages: dict[Path, Page]) -> list[Path]:
    """Pages from the front to an answer, by the fewest links."""
    front = next(path for path in pages if path.name == "index.html")
    ways = [[front]]
    for _ in range(3):
        for way in ways:
            if pages[way[-1]].says(*QUESTIONS[question]):
                return way
        ways = [
            [*way, target]
            for way in ways
            for target, _ in targets(way[-1], pages[way[-1]])
            if target in pages
        ]
    raise AssertionError(question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_clicks(
    browser: Any, address: str, site: Path, pages: dict[Path, Page], question: str
) -> None:
    """Two clicks on links that are there, in a browser, lead to a page that shows the answer."""
    way = clicks_to(question, pages)
    assert len(way) <= 3
    browser.get(f"{address}/{way[0].relative_to(site.resolve())}")
    for page in way[1:]:
        wanted = f"{address}/{page.relative_to(site.resolve())}"
        links = browser.find_elements(By.CSS_SELECTOR, "a[href]")
        link = next(x for x in links if x.get_property("href").split("#")[0] == wanted)
        browser.execute_script("arguments[0].click()", link)
        WebDriverWait(browser, 20).until(lambda b, wanted=wanted: has_loaded(b, wanted))
    text = browser.execute_script("return document.body.textContent")
    assert all(word in " ".join(text.split()) for word in QUESTIONS[question])
    said_nothing(browser)


def test_a_page_of_a_plan(browser: Any, tmp_path: Path) -> None:
    """A thousand requests: zoom, a click on a bar that was split, and back."""
    rng = np.random.default_rng(0)
    lens = np.concatenate([[4_000_000], rng.integers(1, 2000, 999)])
    task = flashbsr.TaskInfo(32, 8, 128, num_workers=16)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(flashbsr.Ragged(np.arange(1001), np.concatenate([[0], np.cumsum(lens)])))
    viz.write_page(attention.plan_info, tmp_path / "plan.html")
    for pixels in (None, PHONE):
        width(browser, pixels)
        browser.get(f"file://{tmp_path}/plan.html")
        canvas = browser.find_element(By.TAG_NAME, "canvas")
        drawn = "return document.querySelector('canvas').toDataURL()"
        whole = browser.execute_script(drawn)
        said = browser.find_element(By.ID, "said")
        left = 110 - canvas.size["width"] // 2
        middle = 15 - canvas.size["height"] // 2  # of the first lane
        ActionChains(browser).move_to_element_with_offset(canvas, left, middle).perform()
        assert said.text.startswith("r0, KV head")
        ActionChains(browser).click().perform()
        assert browser.execute_script(drawn) != whole
        browser.find_element(By.ID, "all").click()
        assert browser.execute_script(drawn) == whole
        browser.execute_script(
            "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -400, clientX: 200}))",
            canvas,
        )
        assert browser.execute_script(drawn) != whole
        assert browser.execute_script("return document.documentElement.scrollWidth") <= (
            pixels or 1200
        )
        said_nothing(browser)
    width(browser, None)
