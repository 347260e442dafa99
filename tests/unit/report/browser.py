"""Debian's Chromium, headless, for looking at pages; installed in CI if it is missing, else its absence is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    # No page may reach the network: every name resolves to nowhere.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1366, 900


def _found() -> tuple[str, str] | None:
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def _installed() -> str:
    """Install the browser where this is a root's CI machine; returns why not otherwise."""
    if os.environ.get("CI") != "true":
        return "CI is not 'true', so nothing is installed here"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "not root on a Debian machine, so it cannot be installed"
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "chromium", "chromium-driver"]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
        if done.returncode:
            return f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}"
    return ""


def open_browser(profile: Path) -> Any:
    """A driver of a fresh browser; skips the test with the reason where there is none."""
    if not _found():
        why = _installed()
        if not _found():
            reason = f"NO PAGE WAS LOOKED AT: chromium and chromedriver are not on PATH; {why}"
            print(reason, file=sys.stderr)
            pytest.skip(reason)
    if shutil.which("chromedriver") is None or not _has_selenium():
        pytest.skip("NO PAGE WAS LOOKED AT: selenium is not installed; pip install -e .[dev]")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, driver = _found()  # type: ignore[misc]
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def _has_selenium() -> bool:
    import importlib.util

    return importlib.util.find_spec("selenium") is not None


def load(driver: Any, page: Path, height: int = HEIGHT) -> None:
    """Open a page on a laptop's screen, in light colours, and wait until it is built."""
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    driver.get(page.as_uri())
    assert driver.execute_script("return document.documentElement.getAttribute('data-ready')") == "true"


def settle(driver: Any) -> None:
    """Wait for the next two frames: canvases are drawn in the first."""
    driver.execute_async_script(
        "const d = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => d()));"
    )


def tab(driver: Any, name: str) -> None:
    """Open a tab of the page by its button."""
    driver.find_element("id", f"button-{name}").click()
    settle(driver)
