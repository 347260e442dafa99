"""The fused kernel without a device: its results under Triton's interpreter, its code as compiled for four targets."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@needs_triton
def test_results_under_the_interpreter():
    """Every dtype, shape and stride class of the CPU tests; interpreted.py has the cases."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted.py")],
        cwd=HERE.parents[4],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100


@needs_triton
@pytest.mark.parametrize(
    "target",
    [("cuda", "80", "32"), ("cuda", "90", "32"), ("cuda", "100", "32"), ("hip", "gfx942", "64")],
    ids=["sm_80", "sm_90", "sm_100", "gfx942"],
)
def test_compiled_ahead_of_time(target, tmp_path):
    """No register is spilled to memory, a load is a vector of 16 bytes, and no float is added atomically."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.job.measure.fused.ahead_of_time", *target],
        cwd=HERE.parents[4],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout)
    assert len(facts) == 6 * 4 + 3
    assert {name: fact["spilled"] for name, fact in facts.items() if fact["spilled"]} == {}
    assert {name: fact["float_atomics"] for name, fact in facts.items() if fact["float_atomics"]} == {}
    vectors = {name: fact["widest"] for name, fact in facts.items() if not name.startswith("strided")}
    assert vectors == dict.fromkeys(vectors, 16)
