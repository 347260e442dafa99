"""The compiled look's way into a process: for this torch and this Python only, and never needed."""

import sysconfig
from pathlib import Path

import pytest

from msprobe_megatron import native
from msprobe_megatron.native import looking


@pytest.fixture
def afresh(monkeypatch):
    native.load()
    for name, value in (("asked", False), ("module", None), ("reason", "not asked for")):
        monkeypatch.setattr(looking._State, name, value)


def test_without_headers_there_is_none_and_the_reason_is_told(afresh, monkeypatch, tmp_path):
    monkeypatch.setattr(looking.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert native.load_look() is None and native.look() is None
    assert native.why_no_look() in (f"{tmp_path}: no Python.h", "no kernel to look with")


def test_forbidden_with_the_kernel(afresh, monkeypatch):
    monkeypatch.setenv("MSPROBE_NATIVE", "0")
    assert native.load_look() is None and native.why_no_look() == "no kernel to look with"


def test_one_that_answers_wrongly_is_not_used(afresh, monkeypatch):
    monkeypatch.setattr(looking, "_tells_the_truth", lambda module: False)
    assert native.load_look() is None and native.why_no_look()


def test_another_torch_is_another_library(monkeypatch):
    before = looking._recipe()
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert looking._recipe().flags != before.flags


def test_where_there_is_a_compiler_and_headers_there_is_one(afresh):
    """Else every test of it would be skipped, and nobody would know that it does not compile any more."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if native.kernel() is None or not headers.is_file():
        pytest.skip(f"{native.why_not()} {headers}")
    assert native.load_look() is not None, native.why_no_look()
