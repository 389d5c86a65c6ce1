"""Makes the pictures of explore.md: each part of the explorer's page in light, dark and as wide as a phone. Needs
Chromium: make pictures
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from PIL import Image
from selenium import webdriver

from pipeflow.tools.explore.server import Server
from pipeflow.tools.explore.tour import STEPS

FOLDER = Path(__file__).parent / "pictures" / "explore"
WIDE, PHONE, PHONE_HIGH = 1180, 390, 760  # pixels
COLOURS = 64  # of a picture
PATIENCE = 30  # seconds for a page to be painted
READY = "return !document.documentElement.hasAttribute('data-asking') && document.querySelector('.chart') !== null"


class Shot(NamedTuple):
    """One part of the page.

    Attributes:
        name: name of its files.
        fields: the fields of the link that shows it.
        high: height in pixels on a wide screen.
        at, phone_at: selector of what stands at the upper edge, on a wide screen and on a phone; empty: all from the
            top of the page.
        script: what is done before; JavaScript.
        files: files that are open, by their names.
    """

    name: str
    fields: Mapping[str, str]
    high: int = 620
    at: str = ""
    phone_at: str = ""
    script: str = ""
    files: Mapping[str, str] = {}


ROWS = """\
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B1 2B0 2F1 2F2 2B2 2F3 2B3"""
SHOTS = (
    Shot("page", {"schedule": "zb-v"}),
    Shot("tour", {"tour": "2", **STEPS[1].goal}, 640),
    Shot(
        "reading",
        {"schedule": "zb-h1", "colour": "microbatch", "from": "8", "to": "16", "memory_cap": "3"},
        720,
        phone_at="#tools",
    ),
    Shot(
        "export", {"schedule": "1f1b"}, 480, phone_at="#tools", script="document.querySelector('#export').open = true"
    ),
    Shot(
        "model",
        {"schedule": "zb-v", "model": "gpt3-175b", "ranks": "8", "tensor": "8", "microbatches": "32"},
        760,
        phone_at="#charts",
    ),
    Shot("beside", {"schedule": "1f1b,eager-1f1b"}, 860, phone_at="#tools"),
    Shot("scatter", {"schedule": "zb-v"}, 560, "#scatter", "#scatter"),
    Shot("hand", {"schedule": "custom", "rows": ROWS, "placement": "0.1.2", "edit": "1"}, 620, phone_at="#tools"),
)


@contextmanager
def browser(width: int, height: int, *, dark: bool) -> Iterator[Any]:
    """A headless Chromium whose window has this size."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield driver
    finally:
        driver.quit()


def taken(driver: Any, url: str, shot: Shot, at: str) -> bytes:
    """A PNG of the page with few colours."""
    driver.get(url)
    for name, text in shot.files.items():
        driver.execute_script("sessionStorage.setItem(...arguments)", f"file:{name}", text)
    driver.get("about:blank")
    driver.get(f"{url}#{urlencode(shot.fields)}")
    _wait(driver)
    driver.execute_script(shot.script)
    _wait(driver)
    if at:
        script = "const top = document.querySelector(arguments[0]).getBoundingClientRect().top; scrollTo(0, top - 56)"
        driver.execute_script(script, at)
    time.sleep(0.4)  # what follows the size of the window
    _wait(driver)
    seen = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(seen))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        file, "png", optimize=True
    )
    return file.getvalue()


def _wait(driver: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not driver.execute_script(READY):
        if time.monotonic() > end:
            raise TimeoutError("the page is not ready")
        time.sleep(0.02)
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def main() -> None:
    folder, names = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for shot in SHOTS:
            if names and shot.name not in names:
                continue
            for dark in (False, True):
                with browser(WIDE, shot.high, dark=dark) as driver:
                    picture = taken(driver, server.url, shot, shot.at)
                    (folder / f"{shot.name}{'-dark' * dark}.png").write_bytes(picture)
            with browser(PHONE, PHONE_HIGH, dark=False) as driver:
                picture = taken(driver, server.url, shot, shot.phone_at)
                (folder / f"{shot.name}-phone.png").write_bytes(picture)
        server.shutdown()


if __name__ == "__main__":
    main()
