from pathlib import Path

import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.report.html.page import page
from tests.unit.report.browser import open_browser
from tests.unit.report.runs import make_run

_STEPS = 5
_RECIPES = {
    "golden": {"layout": "single"},
    "healthy": {"layout": "tp2_pp2"},
    "overflow": {"layout": "tp2_pp2", "fault": "overflow", "since": 3},
    "diverged": {"layout": "tp2_pp2", "fault": "attention_scale", "since": 2},
    "torn": {"layout": "tp2", "fault": "torn_weight"},
}


class Pages:
    """Runs, their data and their pages, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._data: dict[tuple[str, str], dict] = {}

    def run(self, name: str) -> Path:
        path = self._root / name
        return path if path.exists() else make_run(path, steps=_STEPS, **_RECIPES[name])

    def data(self, name: str, golden: str = "") -> dict:
        if (name, golden) not in self._data:
            other = open_run(self.run(golden)) if golden else None
            self._data[name, golden] = page_data(open_run(self.run(name)), other)
        return self._data[name, golden]

    def page(self, name: str, golden: str = "") -> Path:
        path = self._root / f"{name}_{golden}.html"
        if not path.exists():
            path.write_text(page(self.data(name, golden)), encoding="utf-8")
        return path


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
