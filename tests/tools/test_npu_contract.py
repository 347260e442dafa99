"""tools/npu_contract.py: what the kit touches is read from its source, what a wheel has from the wheel."""

import zipfile

import pytest

from tools.npu_contract import Wheel, kit, main, report, touched

FILES = {
    "torch_npu/__init__.py": "import torch_npu.npu\nfrom torch_npu.npu.streams import Event\n__version__ = '9'\n",
    "torch_npu/npu/__init__.py": (
        "from .random import *\nfrom .streams import Stream, Event as Event\nfrom . import memory\n"
        "def current_device():\n    pass\nif True:\n    is_available = lambda: True\n"
    ),
    "torch_npu/npu/random.py": "def get_rng_state():\n    pass\ndef seed_all(seed):\n    pass\n",
    "torch_npu/npu/memory.py": "def memory_allocated():\n    pass\n",
    "torch_npu/npu/streams.py": (
        "import torch_npu._C\nclass Stream(torch_npu._C._NPUStreamBase):\n    def wait_event(self, event): pass\n"
        "class Base:\n    def record(self):\n        pass\nclass Event(Base):\n    def wait(self):\n        pass\n"
    ),
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "torch_npu-9.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("current_device", "present"),
        ("is_available", "present"),
        ("get_rng_state", "present"),
        ("memory", "present"),
        ("Event", "present"),
        ("Event().record", "present"),
        ("Event().wait", "present"),
        ("Event().elapsed_time", "missing"),
        ("Stream().wait_event", "present"),
        ("Stream().query", "unseen"),
        ("memory_allocated", "missing"),
        ("torch_npu.Event", "present"),
        ("torch_npu.__version__", "present"),
        ("torch_npu.profiler", "missing"),
    ],
)
def test_a_wheel_says_what_it_has(wheel, path, state):
    assert Wheel(wheel).state(path) == state


def of(text):
    return set(touched([("file.py", text)]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch.npu.synchronize()", {"synchronize"}),
        ("import torch\ntorch.cuda.memory_stats", {"memory_stats"}),
        ("import torch\nx = getattr(torch, 'npu', None)\nif x: x.is_available()", {"is_available"}),
        ("import torch\ngetattr(torch, device.type).get_rng_state()", {"get_rng_state"}),
        ("import torch\ngetattr(torch, name).itemsize", set()),
        ("import torch\nfor m in (torch.npu, torch.cuda):\n    m.empty_cache()", {"empty_cache"}),
        ("import torch\ntorch.get_device_module('npu').current_stream().query()", {"current_stream", "Stream().query"}),
        (
            "import sys\nm = sys.modules.get('torch_npu')\nm.npu.set_device(0)\nm.profiler",
            {"set_device", "torch_npu.profiler"},
        ),
        ("import torch\ndef f():\n    return torch.npu\ndef g():\n    f().seed()", {"seed"}),
        (
            "import torch\nclass C:\n    def __init__(self, name, m):\n        self.m = m\n"
            "    def f(self):\n        e = self.m.Event()\n        e.record()\nC('x', torch.npu)",
            {"Event", "Event().record"},
        ),
        ("import torch\ntorch.zeros(1).npu\nother.cuda.thing", set()),
    ],
)
def test_what_is_touched_is_followed(text, found):
    assert of(text) == found


def test_the_kit_touches_what_it_is_known_to_touch():
    """Found by the source alone: an independent list, by reading, of what must be among it."""
    paths = touched(kit())
    assert {"current_device", "is_available", "get_rng_state", "set_rng_state", "manual_seed_all"} <= set(paths)
    assert {"Event", "Event().record", "Event().synchronize", "memory_allocated"} <= set(paths)
    assert any(place.startswith("msprobe_megatron/job/devices/base.py:") for place in paths["Event().record"])


def test_the_report_names_what_is_missing_and_where(wheel, capsys):
    text, good = report(Wheel(wheel), {"current_device": {"a.py:1"}, "frobnicate": {"b.py:2"}})
    assert not good
    assert text.splitlines()[1:] == ["  missing  frobnicate: b.py:2"]
    assert report(Wheel(wheel), {"current_device": {"a.py:1"}})[1]
    assert main([str(wheel)]) == 1
    assert "missing  is_initialized" in capsys.readouterr().out
