"""A Megatron nobody has seen yet, or none at all: a sentence that names release and function, never a traceback."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import torch
import megatron.core, megatron.core.pipeline_parallel.schedules
from megatron.training import training
model, optimizer, _ = training.setup_model_and_optimizer()
for _ in range(2):
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
TREE = {
    "pretrain_gpt.py": SCRIPT,
    "probe.yaml": "output: ./out\nsteps: [0]\ndump: {level: L0, task: statistics}\n",
    "megatron/core/package_info.py": "__version__ = '9.9.0'\n",
    "megatron/core/__init__.py": "from megatron.core import package_info, parallel_state\n",
    "megatron/core/parallel_state.py": "def model_parallel_is_initialized():\n    return False\n",
    "megatron/core/pipeline_parallel/__init__.py": "",
    "megatron/core/pipeline_parallel/schedules.py": "def run_microbatches(batches):\n    pass\n",
    "megatron/training/__init__.py": "",
    "megatron/training/training.py": """
def setup_model_and_optimizer(*arguments):
    import torch
    model = torch.nn.Linear(2, 2)
    return [model], torch.optim.SGD(model.parameters(), 0.1), None
""",
}


def run(folder, changes, *words):
    for name, text in {**TREE, **changes}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE")}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


JOB = ("-m", "msprobe_megatron.run", "pretrain_gpt.py", "--msprobe-config", "probe.yaml")


def test_a_release_whose_schedules_have_other_names(tmp_path):
    done = run(tmp_path, {}, *JOB)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    untried, said = done.stderr.splitlines()
    assert "megatron-core 9.9.0: this kit was tried with" in untried
    assert all(word in said for word in ("cannot patch", "forward_backward_no_pipelining", "megatron-core is 9.9.0"))


def test_a_release_whose_groups_are_asked_in_another_way_trains_on(tmp_path):
    done = run(tmp_path, {"megatron/core/parallel_state.py": ""}, *JOB)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (said,) = done.stderr.splitlines()
    assert "could not attach" in said and "training continues without the probe (megatron-core: 9.9.0)" in said


def test_without_megatron(tmp_path):
    (tmp_path / "loop.py").write_text(
        "import sys\nsys.modules['megatron'] = None\nimport torch\nfrom msprobe_megatron import attach\n"
        "from msprobe_megatron.cli import main\n"
        "model = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with attach(model, optimizer, 'probe.yaml'):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
        "sys.exit(main(['patches']))\n"
    )
    done = run(tmp_path, {}, "loop.py")
    assert done.returncode == 0, done.stderr
    assert "no megatron-core is installed here" in done.stdout
    assert (tmp_path / "out/step_000000/rank_00000/records.parquet").is_file()


def test_a_release_that_lacks_a_module_of_its_own(tmp_path):
    (tmp_path / "look.py").write_text("from msprobe_megatron.cli import main\nmain(['patches'])\n")
    done = run(tmp_path, {"megatron/core/__init__.py": "import megatron.core.nowhere\n"}, "look.py")
    assert "Traceback" not in done.stdout + done.stderr
    assert "a megatron-core that cannot be imported: No module named 'megatron.core.nowhere'" in " ".join(
        done.stdout.split()
    )
