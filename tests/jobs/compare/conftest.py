import sys

import pytest


@pytest.fixture(scope="session")
def runs(jobs, tmp_path_factory):
    """Clean and faulty runs, each trained once."""
    from tests.jobs.compare.layouts import Runs

    return Runs(jobs, tmp_path_factory.mktemp("compare"))


@pytest.fixture
def on_a_terminal(monkeypatch):
    """Call it, and what is printed from then on goes to a screen of 100 columns without colours."""

    def switch():
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return switch
