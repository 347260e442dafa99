"""msprobe_run.sh and msprobe_env.sh around untouched recipes: routing, exit codes, signals, odd places."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.unit.hosts.launching.stub import ENV, RUNNER, SHIMS

TORCHRUN = """#!/bin/bash
DISTRIBUTED_ARGS="
    --nproc_per_node 8 \\
    --nnodes 1
"
GPT_ARGS="
    --num-layers 32 \\
    --train-iters 5000
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    $GPT_ARGS \\
    --save "$1" \\
    | tee log.txt
"""
LAUNCH = TORCHRUN.replace("torchrun $", "python -m torch.distributed.launch $").replace("GPT_ARGS", "ARGS")
ARRAYS = """#!/bin/bash
D=(--nproc_per_node 8 --nnodes 1)
A=(--num-layers 32 --train-iters 5000)
torchrun ${D[@]} pretrain_gpt.py ${A[@]} --save "$1"
"""
PLAIN_SH = """#!/bin/sh
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 32 --train-iters 5000 --save "$1"
"""
WORDS = ["--nproc_per_node", "8", "--nnodes", "1", "-m", "msprobe_megatron.run", "pretrain_gpt.py"]
WORDS += ["--num-layers", "32", "--train-iters", "5000", "--save", "to a place"]


@pytest.mark.parametrize("text", [TORCHRUN, LAUNCH, ARRAYS, PLAIN_SH], ids=["torchrun", "launch", "arrays", "sh"])
def test_a_recipe_is_routed_through_the_kit(bench, text):
    recipe = bench.recipe(text, "examples with space/recipe.sh")
    done = bench.run("--config", "probe.yaml", "--output", "out", "--", recipe, "to a place")
    assert done.returncode == 0, done.stderr
    (call,) = bench.called()
    config, out = str(bench.folder / "probe.yaml"), str(bench.folder / "out")
    assert call.argv == [*WORDS, "--msprobe-config", config, "--msprobe-output", out]
    # What the job starts in its turn finds no shim.
    assert str(SHIMS) not in call.environment["PATH"]


def test_the_runner_started_with_sh(bench):
    words = ["sh", str(RUNNER), "--config", "probe.yaml", "--", str(bench.recipe(PLAIN_SH)), "to a place"]
    done = bench.call(words)
    assert done.returncode == 0, done.stderr
    (call,) = bench.called()
    assert call.argv == [*WORDS, "--msprobe-config", str(bench.folder / "probe.yaml")]


def test_from_another_directory(bench):
    recipe = bench.recipe(TORCHRUN)
    elsewhere = bench.folder / "else where"
    elsewhere.mkdir()
    done = bench.run("--config", "../probe.yaml", "--", f"../{recipe.name}", "to a place", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    (call,) = bench.called()
    assert call.argv == [*WORDS, "--msprobe-config", str(bench.folder / "probe.yaml")]
    assert call.cwd == str(elsewhere)


def test_the_launchers_exit_code_is_not_hidden_by_tee(bench):
    recipe = bench.recipe(TORCHRUN)
    plain = bench.call(["bash", str(recipe)], STUB_CODE="3")
    assert plain.returncode == 0
    done = bench.run("--config", "probe.yaml", "--", recipe, STUB_CODE="3")
    assert done.returncode == 3
    assert "exit code 3" in done.stdout


def test_the_recipes_own_exit_code_counts_too(bench):
    recipe = bench.recipe(PLAIN_SH + "exit 5\n")
    assert bench.run("--config", "probe.yaml", "--", recipe, "x").returncode == 5


def test_a_recipe_without_a_launcher_is_told(bench):
    done = bench.run("--config", "probe.yaml", "--", bench.recipe("echo nothing to train\n"))
    assert done.returncode == 2
    assert "nothing was recorded" in done.stderr


@pytest.mark.parametrize("name", ["recipe.sh", "examples with space/recipe.sh"])
def test_a_recipe_that_ends_before_the_launch_is_told(bench, name):
    recipe = bench.recipe("#!/bin/bash\nset -e\ntest -d /no/such/data\ntorchrun pretrain_gpt.py\n", name)
    done = bench.run("--config", "probe.yaml", "--", recipe)
    assert (done.returncode, bench.called()) == (1, [])
    (sentence,) = done.stderr.splitlines()
    assert "recipe.sh ended with exit code 1 and called neither torchrun nor python -m" in sentence
    assert sentence.endswith("nothing was launched")


@pytest.mark.parametrize("made", [False, True])
def test_a_log_that_cannot_be_written_is_told_before_and_after(bench, made):
    recipe = bench.recipe(TORCHRUN.replace("tee log.txt", "tee logs/train.log") + "exit ${PIPESTATUS[1]}\n")
    if made:
        (bench.folder / "logs").mkdir()
    done = bench.run("--config", "probe.yaml", "--", recipe, "x")
    assert len(bench.called()) == 1
    assert ("recipe.sh writes its log to logs/, which is not there; accepted: mkdir -p logs" in done.stderr) is not made
    assert ("the launcher ended well; " in done.stdout) is not made
    assert done.returncode == (0 if made else 1)


@pytest.mark.parametrize("line", ["mkdir -p ./logs", "# torchrun x | tee logs/x.log"])
def test_a_log_that_the_recipe_makes_or_does_not_write_is_not_told(bench, line):
    text = TORCHRUN.replace("tee log.txt", "tee logs/train.log") if line.startswith("mkdir") else TORCHRUN
    done = bench.run(
        "--config", "probe.yaml", "--", bench.recipe(text.replace("torchrun $", f"{line}\ntorchrun $")), "x"
    )
    assert done.returncode == 0
    assert "which is not there" not in done.stderr


def test_a_signal_reaches_the_launcher(bench):
    recipe = bench.recipe(TORCHRUN)
    job = subprocess.Popen(
        bench.command("--config", "probe.yaml", "--", recipe, "x"),
        cwd=bench.folder,
        env=bench.environment(STUB_CODE="wait"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ready, patience = bench.out.with_name(bench.out.name + ".ready"), 600
        while not ready.exists() and patience and job.poll() is None:
            time.sleep(0.1)
            patience -= 1
        assert ready.exists(), job.communicate()[0]
        os.kill(job.pid, signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 100 + signal.SIGTERM, output


def test_sourcing_the_environment(bench):
    recipe = bench.recipe(TORCHRUN)
    script = bench.recipe(
        f'source "{ENV}" probe.yaml results\nbash "{recipe}" "to a place"\nmsprobe_off\nbash "{recipe}" "to a place"\n',
        "by_hand.sh",
    )
    done = bench.call(["bash", str(script)])
    assert done.returncode == 0, done.stderr
    routed, plain = bench.called()
    config, out = str(bench.folder / "probe.yaml"), str(bench.folder / "results")
    assert routed.argv == [*WORDS, "--msprobe-config", config, "--msprobe-output", out]
    assert plain.argv == [word for word in WORDS if word not in ("-m", "msprobe_megatron.run")]
    assert not [name for name in plain.environment if name.startswith("MSPROBE_") and name != "MSPROBE_PYTHON"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("words", "more", "complaint"),
    [
        ("nope.yaml", {}, "nope.yaml: no such probe file, nothing is set; accepted: source msprobe_env.sh FILE"),
        (".", {}, ".: no such probe file"),
        ("", {}, "no probe file is named, nothing is set"),
        ("", {"MSPROBE_CONFIG": "gone.yaml"}, "MSPROBE_CONFIG: gone.yaml: no such probe file"),
    ],
)
def test_a_probe_file_that_is_not_there_starts_nothing(bench, shell, words, more, complaint):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    recipe = bench.recipe(TORCHRUN)
    # Whatever a shell sets by itself as it goes is not the script's.
    line = f'set >before; source "{ENV}" {words} && bash "{recipe}"; code=$?; set >after; exit $code'
    done = bench.call([shell, "-c", line], **more)
    assert (done.returncode, bench.called()) == (2, [])
    (sentence,) = done.stderr.splitlines()
    assert complaint in sentence
    before, after = ((bench.folder / name).read_text().splitlines() for name in ("before", "after"))
    own = ("MSPROBE", "_msprobe", "msprobe", "PATH=", "path=")
    assert [line for line in after if line.startswith(own)] == [line for line in before if line.startswith(own)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "sh"])
def test_the_environment_that_is_run_and_not_sourced_is_told(bench, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = bench.call([shell, str(ENV), "probe.yaml"])
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "was run, which changes nothing for what is started after it; accepted: source" in sentence


def test_the_environment_is_sourced_whatever_the_shell_is_called(bench):
    done = bench.call(["bash", "-c", 'source "$0" probe.yaml && echo "$MSPROBE_CONFIG"', str(ENV)])
    assert (done.returncode, done.stdout.strip()) == (0, str(bench.folder / "probe.yaml"))


def test_a_module_and_an_own_flag_keep_their_meaning(bench):
    recipe = bench.recipe("torchrun --nnodes 1 -m my.train --msprobe-config own.yaml\n")
    assert bench.run("--config", "probe.yaml", "--", recipe).returncode == 0
    (call,) = bench.called()
    assert call.argv == [
        *("--nnodes", "1", "-m", "msprobe_megatron.run", "-m", "my.train"),
        *("--msprobe-config", "own.yaml"),
    ]


def test_a_command_line_the_launcher_itself_could_not_read_is_left_alone(bench):
    recipe = bench.recipe("torchrun --nnodes 1 --no-such-option 3 pretrain_gpt.py --lr 1\n")
    done = bench.run("--config", "probe.yaml", "--", recipe)
    (call,) = bench.called()
    assert call.argv == ["--nnodes", "1", "--no-such-option", "3", "pretrain_gpt.py", "--lr", "1"]
    assert "is left as it is" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--config", "nowhere.yaml", "--", "recipe.sh"], "nowhere.yaml: no such file"),
        (["--", "recipe.sh"], "no probe file is named"),
        (["--config", "probe.yaml", "--", "nowhere.sh"], "nowhere.sh: no such recipe"),
        (["--overlay", "nobody/nothing", "--", "recipe.sh"], "'nobody/nothing' is not an overlay; accepted:"),
    ],
)
def test_mistakes_are_one_sentence(bench, words, complaint):
    bench.recipe(TORCHRUN)
    done = bench.run(*words)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert bench.called() == []


def test_a_python_without_the_kit_is_named(bench):
    done = bench.run("--config", "probe.yaml", "--", bench.recipe(TORCHRUN), MSPROBE_PYTHON="/bin/false")
    assert done.returncode == 2
    assert "the kit is not installed in /bin/false" in done.stderr
    assert bench.called() == []


def test_emit_writes_a_copy_that_runs_alone(bench):
    recipe = bench.recipe(TORCHRUN)
    done = bench.run("--overlay", "modellink/llama2_7b", "--emit", "probed.sh", "--config", "probe.yaml", "--", recipe)
    assert (done.returncode, bench.called()) == (0, []), done.stderr
    assert bench.call(["bash", "probed.sh", "to a place"]).returncode == 0
    (call,) = bench.called()
    config = str(bench.folder / "probe.yaml")
    shorter = ["--train-iters", "5", "--lr-decay-iters", "5000"]
    # What takes --save out as it runs stands before the overlay's own words.
    assert call.argv == [*WORDS, "--msprobe-no-save", "--use-deter-comp", *shorter, "--msprobe-config", config]
    assert call.environment["HCCL_DETERMINISTIC"] == "true"
    assert recipe.read_text() == TORCHRUN


def test_a_real_job_with_the_real_launcher(tmp_path):
    (tmp_path / "probe.yaml").write_text("steps: [1]\ndump: {level: L0, task: statistics}\n")
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 2"
    )
    recipe = tmp_path / "recipe.sh"
    recipe.write_text(
        f'GPT_ARGS="{flags} --train-iters 2 --tensor-model-parallel-size 2"\n'
        "torchrun --standalone --nproc_per_node 2 -m msprobe_megatron.demo.pretrain_gpt $GPT_ARGS | tee log.txt\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MSPROBE")}
    environment |= {"MSPROBE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{environment['PATH']}"
    words = ["bash", str(RUNNER), "--config", "probe.yaml", "--output", "out", "--", recipe.name]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "out/step_000001").iterdir()) == ["rank_00000", "rank_00001"]


@pytest.mark.parametrize("small", [False, True])
def test_notes_about_small_are_said_with_small(bench, small):
    overlay = bench.folder / "own.yaml"
    overlay.write_text(
        "title: own\nmatch: {script: [pretrain_gpt.py]}\nprobe: {steps: [0], dump: {}}\n"
        'notes: [always so, "leave --small away"]\n'
    )
    words = ("--small",) if small else ()
    done = bench.run("--overlay", overlay, *words, "--", bench.recipe(PLAIN_SH), "to a place")
    assert done.returncode == 0, done.stderr
    assert "always so" in done.stdout
    assert ("leave --small away" in done.stdout) is small
