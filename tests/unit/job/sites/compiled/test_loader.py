"""The compiled look's way into a process: for this torch and this Python only, and never needed."""

import sysconfig
from pathlib import Path

import pytest

from msprobe_megatron.job.measure import native
from msprobe_megatron.job.sites.compiled import loader


@pytest.fixture
def afresh(monkeypatch):
    native.load()
    for name, value in (("attempted", False), ("module", None), ("reason", "not requested")):
        monkeypatch.setattr(loader._State, name, value)


def test_without_headers_there_is_none_and_the_reason_is_told(afresh, monkeypatch, tmp_path):
    monkeypatch.setattr(loader.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert loader.load() is None and loader.module() is None
    assert loader.why_not() in (f"{tmp_path}: no Python.h", "no compiled kernel")


def test_forbidden_with_the_kernel(afresh, monkeypatch):
    monkeypatch.setenv("MSPROBE_NATIVE", "0")
    assert loader.load() is None and loader.why_not() == "no compiled kernel"


def test_one_that_answers_wrongly_is_not_used(afresh, monkeypatch):
    monkeypatch.setattr(loader, "_passes_self_test", lambda module: False)
    assert loader.load() is None and loader.why_not()


def test_another_torch_is_another_library(monkeypatch):
    before = loader._recipe()
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert loader._recipe().flags != before.flags


def test_where_there_is_a_compiler_and_headers_there_is_one(afresh):
    """Else every test of it would be skipped, and nobody would know that it does not compile any more."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if native.kernel() is None or not headers.is_file():
        pytest.skip(f"{native.why_not()} {headers}")
    assert loader.load() is not None, loader.why_not()
