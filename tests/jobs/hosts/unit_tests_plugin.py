"""Plugin for Megatron's own unit tests, on CPU: with the kit off, armed and idle, or recording every test.

Loaded by `-p tests.jobs.hosts.unit_tests_plugin` into a pytest of its own; `MSPROBE_STATE` says which,
`MSPROBE_RESULTS` names the file for the outcome of each test.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
import warnings
from pathlib import Path

import pytest

from msprobe_megatron.job.devices import megatron_on_cpu

STATE = os.environ["MSPROBE_STATE"]
RESULTS = Path(os.environ["MSPROBE_RESULTS"])
_STEPS = {"idle": "[1000000]", "recording": "[0]"}
_numbers = itertools.count()
_outcomes: dict[str, str] = {}
_open: list = []

megatron_on_cpu.install()
# What their conftest would fetch from the network is not needed by these tests.
_download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
_download.download_and_extract_asset = lambda *args, **kwargs: True
sys.modules[_download.__name__] = _download
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.utils
    from packaging.version import Version

# Without TransformerEngine its version is None, which their conftest compares with numbers.
megatron.core.utils._te_version = Version("0.0.1")


def _record(module, level):
    from msprobe_megatron import attach

    number = next(_numbers)
    config = RESULTS.with_suffix(f".{level}.yaml")
    if not config.exists():
        config.write_text(f"output: {RESULTS.with_suffix('.out')}\nsteps: {_STEPS[STATE]}\ndump: {{level: {level}}}\n")
    session = attach(module, None, config, tag=f"{level}_{number}", step=0)
    session.schedule_begin("unit test", None)
    _open.append(session)


def _watching(original):
    """The outermost module that a test calls is attached, as a model of one step."""
    depth = [0]

    def __call__(self, *args, **kwargs):
        if depth[0] == 0 and any(True for _ in self.parameters()) and all(s._chunks[0] is not self for s in _open):
            depth[0] += 1  # attaching looks at the module, and must not be looked at itself
            try:
                _record(self, "L0")
            finally:
                depth[0] -= 1
        depth[0] += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    return __call__


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    if STATE == "off":
        yield
        return
    from torch import nn

    original = nn.Module.__call__
    # Every call of torch in the test, and every module.
    _record(nn.Identity(), "L1")
    nn.Module.__call__ = _watching(original)
    try:
        yield
    finally:
        nn.Module.__call__ = original
        for session in reversed(_open):
            session.step()
            session.close()
        _open.clear()


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    out = RESULTS.with_suffix(".out")
    faults = [line for file in out.glob("*/events.jsonl") for line in file.read_text().splitlines() if "fault" in line]
    recorded = len(list(out.glob("*/step_*/*/records.parquet")))
    RESULTS.write_text(json.dumps({"outcomes": _outcomes, "recorded": recorded, "faults": faults}))
