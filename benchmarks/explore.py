"""The explorer in headless Chromium: the time from a slider's move to the picture and to the plot of all schedules, the
time to paint a large timeline again, and the size of the page.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from benchmarks.report import Report

SIZES = (4, 8), (8, 32), (16, 64)  # ranks and microbatches
SCHEDULES = "1f1b", "zb-v"
LARGE = 64, 1024
PICTURE = """
const [name, value, done] = arguments;
const {Page} = await import("./page.js");
const {paint} = Page.prototype;
const start = performance.now();
Page.prototype.paint = function () {
  const fresh = this.data !== Page.measured;
  Page.measured = this.data;
  paint.call(this);
  if (!fresh) return;
  Page.prototype.paint = paint;
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
};
const slider = document.getElementById(`field-${name}`).parentElement.querySelector("[type=range]");
slider.value = value;
slider.dispatchEvent(new Event("input", {bubbles: true}));
"""
PLOT = """
const [name, value, done] = arguments;
const start = performance.now();
const seen = new MutationObserver(() => {
  seen.disconnect();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
});
seen.observe(document.querySelector("#scatter .plot"), {childList: true});
const slider = document.getElementById(`field-${name}`).parentElement.querySelector("[type=range]");
slider.value = value;
slider.dispatchEvent(new Event("input", {bubbles: true}));
"""
PAINT = """
const [rounds, done] = arguments;
const {Page} = await import("./page.js");
const {paint} = Page.prototype;
let page = null;
Page.prototype.paint = function () { page = this; paint.call(this); };
window.dispatchEvent(new KeyboardEvent("keydown", {key: "0"}));
await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
Page.prototype.paint = paint;
const times = [];
for (let round = 0; round < rounds; round++) {
  const start = performance.now();
  page.paint();
  page.charts[0].lanes.getContext("2d").getImageData(0, 0, 1, 1);
  times.push(performance.now() - start);
}
done(times);
"""
WEIGHT = """
const [done] = arguments;
const loaded = ["navigation", "resource"].flatMap((type) => performance.getEntriesByType(type));
const files = loaded.filter(({initiatorType}) => initiatorType !== "fetch");
done(["encodedBodySize", "decodedBodySize"].map((size) => files.reduce((sum, file) => sum + file[size], 0)));
"""


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 30
    report = Report(
        "explore", f"explore: the page in headless Chromium, {rounds} moves each", ["", "median ms", "slowest ms"]
    )
    with _page() as page:
        page.open()
        sent, text = page.run(WEIGHT)
        for ranks, microbatches in SIZES:
            for schedule in SCHEDULES:
                page.open(schedule=schedule, ranks=ranks, microbatches=microbatches)
                _row(
                    report,
                    f"slider to picture, {schedule}, {ranks} x {microbatches}",
                    page.moves("latency", rounds, PICTURE),
                )
        for ranks, microbatches in SIZES:
            page.open(ranks=ranks, microbatches=microbatches)
            _row(
                report,
                f"slider to plot of all schedules, {ranks} x {microbatches}",
                page.moves("latency", rounds, PLOT),
            )
        for schedule in ("1f1b", "zb-h1"):
            page.open(schedule=schedule, ranks=LARGE[0], microbatches=LARGE[1])
            _row(report, f"repaint, {schedule}, {LARGE[0]} x {LARGE[1]:,}", page.run(PAINT, rounds))
    report.notes.append(
        "targets: 50 ms from the slider to the picture at 8 x 32, 300 ms to the plot; 50 ms for a repaint"
    )
    report.data["page bytes"] = {"sent": sent, "text": text}
    report.notes.append(f"the page is sent in {sent / 1000:.0f} kB ({text / 1000:.0f} kB unpacked); target: 100 kB")
    return report


def _row(report: Report, label: str, milliseconds: list[float]) -> None:
    report.data[label] = milliseconds
    report.rows.append([label, f"{statistics.median(milliseconds):.1f}", f"{max(milliseconds):.1f}"])


class _Open:
    """The explorer's page in a browser."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, **fields: object) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        self.browser.get("about:blank")
        self.browser.get(f"{self.url}#{urlencode(fields)}")
        settled = "return !document.documentElement.hasAttribute('data-asking') && !!document.querySelector('.chart')"
        WebDriverWait(self.browser, 120, poll_frequency=0.05).until(lambda browser: browser.execute_script(settled))

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script that may await, and ends with a call of its last argument."""
        return self.browser.execute_async_script(f"(async function () {{ {script} }})(...arguments)", *arguments)

    def moves(self, name: str, rounds: int, script: str) -> list[float]:
        """The times of moves of the slider of a field, after two that are not counted."""
        times = [self.run(script, name, f"{0.05 * (1 + number % 20):.2f}") for number in range(rounds + 2)]
        return times[2:]


@contextmanager
def _page() -> Iterator[_Open]:
    import shutil
    import threading

    from selenium import webdriver

    from pipeflow.tools.explore.server import Server

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    with Server() as server, tempfile.TemporaryDirectory() as folder:
        for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"):
            options.add_argument(argument)
        options.add_argument(f"--user-data-dir={Path(folder, 'profile')}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        browser.set_script_timeout(120)
        try:
            yield _Open(browser, server.url)
        finally:
            browser.quit()
            server.shutdown()
            thread.join()
