"""The oath's first line: installed but not asked for, the kit is not there."""

import json
import subprocess
import sys
import textwrap

import pytest

# Parts that a job without a probe file must never load.
_HEAVY = (
    *("job.session", "job.patching", "job.sites", "job.features", "job.measure", "job.record"),
    *("patches", "run_directory", "analysis", "report"),
)

_REPORT = """
import json, sys
kit = sorted(name for name in sys.modules if name.split(".")[0] == "msprobe_megatron")
modules = [type(finder).__module__ for finder in sys.meta_path]
foreign = [name for name in modules if name == "msprobe_megatron.job.patching.patch_set"]
patched = []
if "megatron.core.pipeline_parallel.schedules" in sys.modules:
    import inspect, megatron.core.pipeline_parallel.schedules as s
    import megatron.core.tensor_parallel.random as r
    for owner, names in ((s, ("forward_step", "backward_step", "forward_backward_no_pipelining",
                             "forward_backward_pipelining_with_interleaving",
                             "forward_backward_pipelining_without_interleaving")),
                         (r.CheckpointFunction, ("forward", "backward"))):
        for name in names:
            function = getattr(owner, name)
            ours = hasattr(function, "__wrapped__") or "megatron" not in inspect.getsourcefile(function)
            if ours or hasattr(function, "__msprobe_patch__"):
                patched.append(name)
    import torch
    if hasattr(torch.distributed.all_reduce, "__msprobe_patch__"):
        patched.append("all_reduce")
print("REPORT" + json.dumps({"kit": kit, "hooks": foreign, "patched": patched}))
"""


def run(tmp_path, code, *argv, module=()):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code) + _REPORT)
    done = subprocess.run(
        [sys.executable, *module, str(script), *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("REPORT")[2])


_MEGATRON = """
from msprobe_megatron.job.devices import megatron_on_cpu
megatron_on_cpu.install()
import megatron.core.pipeline_parallel.schedules, megatron.core.tensor_parallel.random
"""


def heavy(report):
    parts = tuple(f"msprobe_megatron.{part}." for part in _HEAVY)
    return [name for name in report["kit"] if f"{name}.".startswith(parts)]


def test_import_line_without_the_flag_loads_two_tiny_modules(tmp_path):
    report = run(tmp_path, "import msprobe_megatron.adaptor\n", "--lr", "1")
    assert report["kit"] == ["msprobe_megatron", "msprobe_megatron.adaptor", "msprobe_megatron.run"]
    assert report["hooks"] == []


def test_runner_without_the_flag_runs_the_script_and_nothing_else(tmp_path):
    code = (
        "assert __name__ == '__main__'\nimport sys\nassert sys.argv[1:] == ['--local-rank=0', '--lr', '1'], sys.argv\n"
    )
    script = tmp_path / "train.py"
    script.write_text(code + _REPORT)
    done = subprocess.run(
        [sys.executable, "-m", "msprobe_megatron.run", "--local-rank=0", str(script), "--lr", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.rpartition("REPORT")[2])
    assert report["kit"] == ["msprobe_megatron"]  # the runner itself is __main__


def test_every_target_is_megatrons_own(tmp_path):
    report = run(tmp_path, "import msprobe_megatron.adaptor\n" + _MEGATRON)
    assert report["patched"] == []
    assert heavy(report) == []


def test_the_demo_without_the_flag_loads_no_part_that_probes(tmp_path):
    code = """
    from msprobe_megatron.demo.pretrain_gpt import run
    run("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
        " --global-batch-size 2 --train-iters 1 --lr 1e-3".split())
    """
    report = run(tmp_path, code)
    assert heavy(report) == []
    assert report["patched"] == []


def test_the_report_itself_can_tell(tmp_path):
    """With the flag the very same report shows the kit: it would see a leak."""
    (tmp_path / "probe.yaml").write_text("dump: {level: L0}\n")
    code = "import msprobe_megatron.adaptor\n" + _MEGATRON
    report = run(tmp_path, code, "--msprobe-config", str(tmp_path / "probe.yaml"))
    assert "msprobe_megatron.job.session.arming" in heavy(report)
    assert report["hooks"] == ["msprobe_megatron.job.patching.patch_set"]


@pytest.mark.parametrize("way", ["adaptor", "run"])
def test_a_bad_probe_file_ends_the_job_with_one_line_before_megatron_is_imported(tmp_path, way):
    (tmp_path / "probe.yaml").write_text("dump: {level: L9}\n")
    script = tmp_path / "train.py"
    head = "import msprobe_megatron.adaptor\n" if way == "adaptor" else ""
    script.write_text(head + "print('TRAINED')\n")
    module = ["-m", "msprobe_megatron.run"] if way == "run" else []
    done = subprocess.run(
        [sys.executable, *module, str(script), "--msprobe-config", str(tmp_path / "probe.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "TRAINED" not in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert "probe.yaml" in done.stderr
    assert "L9" in done.stderr


def test_no_script_and_a_missing_script_are_said(tmp_path):
    for argv in ([], [str(tmp_path / "nothing.py")]):
        done = subprocess.run(
            [sys.executable, "-m", "msprobe_megatron.run", *argv],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "usage:" in done.stderr
