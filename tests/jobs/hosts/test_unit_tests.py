"""A selection of Megatron-core's own unit tests gives the same results with the kit off, armed idle, and recording."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Those that run in one process on a CPU in a few seconds, whatever their outcome there.
FILES = (
    "transformer/test_mlp.py",
    "transformer/test_module.py",
    "transformer/test_spec_customization.py",
    "transformer/test_transformer_block.py",
    "transformer/moe/test_moe_layer.py",
    "transformer/moe/test_sequential_mlp.py",
    "tensor_parallel/test_random.py",
    "tensor_parallel/test_tensor_parallel_utils.py",
    "tensor_parallel/test_initialization.py",
    "fusions/test_torch_softmax.py",
    "fusions/test_bias_dropout_fusion.py",
    "models/test_base_embedding.py",
    "test_num_microbatches_calculator.py",
    "test_optimizer_param_scheduler.py",
)
FEWEST = 60


def results(host, state, folder):
    """Outcome of each test in one state of the kit."""
    files = [f"tests/unit_tests/{name}" for name in FILES if (host.checkout / "tests/unit_tests" / name).exists()]
    path = os.pathsep.join([str(host.checkout), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Their package `tests` comes first on the path; the plugin is found under a name of its own.
    (folder / "msprobe_unit_tests.py").write_text((ROOT / "tests/jobs/hosts/unit_tests_plugin.py").read_text())
    settings = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = folder / f"{state}.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "msprobe_unit_tests", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
        + ["--continue-on-collection-errors", "--tb=line", *files],
        cwd=host.checkout,
        env={**os.environ, **settings, "PYTHONPATH": path, "MSPROBE_STATE": state, "MSPROBE_RESULTS": str(found)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text())


def test_megatrons_own_tests_in_three_states(megatron_lm, tmp_path):
    if not (megatron_lm.checkout / "tests/unit_tests/conftest.py").exists():
        pytest.skip(f"Megatron-LM {megatron_lm.version()} has no tests/unit_tests")
    off = results(megatron_lm, "off", tmp_path)
    passed = [name for name, outcome in off["outcomes"].items() if outcome == "passed"]
    assert len(passed) >= FEWEST, f"only {len(passed)} of them run here"
    for state in ("idle", "recording"):
        found = results(megatron_lm, state, tmp_path)
        assert found["outcomes"] == off["outcomes"], state
        assert found["faults"] == []
        assert (found["recorded"] > len(passed) // 2) == (state == "recording")
        print(f"{state}: {len(passed)} passed as without the kit, {found['recorded']} records")
