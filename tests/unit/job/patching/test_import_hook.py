import importlib
import inspect
import sys

import pytest

from msprobe_megatron.job.patching import patch_set


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("def work():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    before = list(sys.meta_path)
    yield "late_module"
    patch_set.forget()
    sys.modules.pop("late_module", None)
    assert sys.meta_path == before


def test_callback_comes_after_execution_and_before_anyone_binds_a_name(module_name):
    seen = []

    def callback(module):
        seen.append(module.work())
        module.work = lambda: 2

    patch_set.when_imported(module_name, callback)
    assert seen == []
    late = importlib.import_module(module_name)
    assert seen == [1]
    assert late.work() == 2


def test_module_keeps_its_own_loader_and_source(module_name):
    patch_set.when_imported(module_name, lambda module: None)
    module = importlib.import_module(module_name)
    assert "SourceFileLoader" in type(module.__loader__).__name__
    assert module.__spec__.loader is module.__loader__
    assert "return 1" in inspect.getsource(module.work)


def test_callback_comes_at_once_when_the_module_is_there(module_name):
    importlib.import_module(module_name)
    seen = []
    patch_set.when_imported(module_name, seen.append)
    assert [m.__name__ for m in seen] == [module_name]


def test_other_imports_are_left_alone(module_name):
    patch_set.when_imported("never_imported_module", lambda module: None)
    assert importlib.import_module(module_name).work() == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_imported_module")
