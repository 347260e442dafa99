"""A torch_npu that is installed where no NPU is: the job runs on, and whoever asks for the NPU gets one sentence."""

import os
import subprocess
import sys

import pytest

BROKEN = 'raise {error}("libhccl.so: cannot open shared object file: No such file or directory")'
NO_DEVICE = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch_npu.npu")
module.is_available = module.is_initialized = lambda: False
torch._register_device_module("npu", module)
"""
JOB = """
import torch
import msprobe_megatron
from msprobe_megatron.job.devices import BackendError, select
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
open("probe.yaml", "w").write("output: out\\ndump: {level: mix, digest: true}\\nmonitor: {}\\n")
with msprobe_megatron.attach(net, optimizer, "probe.yaml") as session:
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert session.faults == [] and session.writer.counts.rows_written > 10
try:
    select("npu")
except BackendError as error:
    print(error)
"""


def python(folder, *words, **more):
    environment = {**os.environ, "PYTHONPATH": str(folder), **more}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=folder, timeout=300, check=False
    )


def install(folder, text):
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu/__init__.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BROKEN.format(error="Exception"), "torch_npu cannot be imported: libhccl.so: cannot open shared object"),
        (NO_DEVICE, "torch_npu sees no device"),
    ],
    ids=["any error", "no device"],
)
def test_a_job_on_the_cpu_is_recorded_and_the_npu_refused_with_the_reason(tmp_path, text, why):
    install(tmp_path, text)
    done = python(tmp_path, "-c", JOB)
    assert done.returncode == 0, done.stderr
    assert f"'npu' is not usable here: this process has no accelerator ({why}" in done.stdout
    assert "Traceback" not in done.stderr


def test_commands_say_why_torch_cannot_be_imported(tmp_path):
    """Where torch loads the extension by itself, `import torch` fails: no traceback, and how to go on."""
    install(tmp_path, BROKEN.format(error="ImportError"))
    facts = tmp_path / "torch_npu-2.13.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    done = python(tmp_path, "-m", "msprobe_megatron.cli", "bench", "device", "--only", "L0")
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("msprobe-megatron: torch cannot be imported by")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in line
    done = python(
        *(tmp_path, "-m", "msprobe_megatron.cli", "bench", "device", "--only", "L0"), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "accepted: a machine with an NPU, or an environment without torch_npu" in line
