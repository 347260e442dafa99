"""No job that the kit makes shorter touches the checkpoints of the recipe: a planted one is the same to the byte."""

import re
import shutil

import pytest

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.config.save_flags import FLAG, Taken, without_save
from msprobe_megatron.hosts.launching.overlays import all_overlays, read
from tests.unit.hosts.launching.stub import ENV, RECIPES, TRAINER

OVERLAYS = {overlay.name: overlay for overlay in all_overlays(RECIPES)}
ONE_OF_EACH = ("modellink/llama2_7b", "mindspeed_llm/qwen3_8b", "megatron_lm/gpt3_175b")
PACKAGES = {"modellink": "modellink", "mindspeed_llm": "mindspeed_llm", "megatron_lm": "megatron"}
FLAGS = "--finetune --load ckpt --save ckpt --save-interval 1000"
# Ways to save, as a recipe may give them; each leaves a mark in `ckpt` if it is let to.
WAYS = {
    "to where it loads from": FLAGS,
    "with an equals sign": "--save=ckpt --save-interval=1000",
    "twice": "--save elsewhere --save-interval 1000 --save ckpt",
    "at intervals": "--save ckpt --save-interval 2",
    "the iteration it loads": "--load ckpt --save ckpt --save-interval 1500",
    "at an exit by iterations": "--save ckpt --save-interval 1000 --exit-interval 3",
    "at a signal": "--save ckpt --save-interval 1000 --exit-signal-handler",
    "after minutes": "--save ckpt --save-interval 1000 --exit-duration-in-mins 600",
    "its progress": "--save ckpt --save-interval 1000 --log-progress",
    "beside its curves": "--save ckpt --save-interval 1000 --wandb-project mine --wandb-exp-name first",
}


class Job:
    """A checkout with a recipe, a script that saves as Megatron does, and the checkpoint of a real job."""

    def __init__(self, bench):
        self.bench = bench
        self.folder = bench.folder / "ckpt"
        part = self.folder / "iter_0004000/mp_rank_00"
        part.mkdir(parents=True)
        (part / "model_optim_rng.pt").write_bytes(bytes(range(256)))
        (self.folder / "latest_checkpointed_iteration.txt").write_text("4000")
        (bench.folder / "pretrain_gpt.py").write_text(TRAINER)
        self.before = self.state()

    def state(self):
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in self.folder.rglob("*")
        }

    def recipe(self, flags=FLAGS):
        text = f'CKPT_ARGS="\n    {flags}\n"\n'
        text += "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --train-iters 9000 $CKPT_ARGS | tee log\n"
        return self.bench.recipe(text)

    def run(self, *words, **more):
        return self.bench.run(*words, "--", self.recipe(), STUB_TRAINS="1", **more)

    def trained(self):
        path = self.bench.folder / "trained.txt"
        return path.read_text() if path.exists() else None


@pytest.fixture
def job(bench):
    return Job(bench)


def make_host(folder, overlay):
    """What a rehearsal asks of a checkout of the overlay's host."""
    for name in (PACKAGES[overlay.partition("/")[0]], "megatron/training", "mindspeed"):
        (folder / name).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_the_planted_job_saves_when_it_is_let_to(job, flags):
    done = job.bench.call(["bash", str(job.recipe(f"{flags} --train-iters 5"))], STUB_TRAINS="1")
    assert done.returncode == 0
    assert job.state() != job.before


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_overlay_touches_the_checkpoints(job, name):
    done = job.run("--overlay", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.trained() == "5 of 5, saved to None"
    assert job.state() == job.before


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_rehearsal_touches_the_checkpoints(job, name):
    make_host(job.bench.folder, name)
    done = job.run("--rehearse", "--overlay", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.trained() == "5 of 5, saved to None"
    assert job.state() == job.before


@pytest.mark.parametrize("words", [("--overlay", "modellink/llama2_7b"), ("--rehearse", "--config", "probe.yaml")])
@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_no_way_of_saving_gets_through(job, flags, words):
    if "--rehearse" in words:
        make_host(job.bench.folder, "modellink/llama2_7b")
    done = job.bench.run(*words, "--", job.recipe(flags), STUB_TRAINS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    trained = job.trained()
    assert trained is not None
    resumed = flags.startswith("--load") and "--rehearse" not in words
    assert trained.endswith(f"of {4005 if resumed else 5}, saved to None")
    assert job.state() == job.before


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("small", [(), ("--small",)], ids=["whole", "small"])
def test_a_copy_of_the_recipe_does_not_save_either(job, name, small):
    done = job.bench.run("--overlay", name, *small, "--emit", "copy.sh", "--", job.recipe())
    assert done.returncode == 0, done.stderr
    assert f"overlay {name} changes: --save ckpt -> not given" in done.stderr
    assert job.trained() is None
    assert job.bench.call(["bash", "copy.sh"], STUB_TRAINS="1").returncode == 0
    assert job.trained() == "5 of 5, saved to None"
    assert job.state() == job.before


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_recipe_started_by_hand_does_not_save_either(job, name, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = f'source "{ENV}" probe.yaml && bash "{job.recipe()}"'
    more = {"STUB_TRAINS": "1", "MSPROBE_OVERLAY": name}
    done = job.bench.call([shell, "-c", line], **more)
    assert done.returncode == 0, done.stderr
    assert job.trained() == "5 of 5, saved to None"
    assert job.state() == job.before
    assert job.bench.call([shell, "-c", line], **more, MSPROBE_KEEP_SAVE="0").returncode == 0
    assert job.state() == job.before
    line = line.replace("source", "export MSPROBE_KEEP_SAVE=1; source")
    assert job.bench.call([shell, "-c", line], **more).returncode == 0
    assert job.trained() == "5 of 5, saved to ckpt"


@pytest.mark.parametrize("emitted", [False, True])
def test_saving_is_kept_by_name_only(job, emitted):
    words = ("--overlay", "modellink/llama2_7b", "--keep-save")
    if emitted:
        job.run(*words, "--emit", "copy.sh")
        done = job.bench.call(["bash", "copy.sh"], STUB_TRAINS="1")
    else:
        done = job.run(*words)
        assert "leaves: --save ckpt, as was asked for: what this job saves becomes the newest" in done.stderr
        assert "-> not given" not in done.stderr
    assert done.returncode == 0
    assert job.trained() == "5 of 5, saved to ckpt"
    assert (job.folder / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_what_an_overlay_changes_is_said_before_the_launch(job):
    done = job.run("--overlay", "modellink/llama2_7b", "--small")
    said = [line for line in done.stderr.splitlines() if " changes: " in line]
    assert said == [
        f"msprobe: overlay modellink/llama2_7b changes: {change}"
        for change in (
            "--use-deter-comp not given -> given",
            "--train-iters 9000 -> 5",
            "--lr-decay-iters not given -> 9000",
            "--num-layers 8 -> 4",
            "--save ckpt -> not given (this job saves no checkpoint; to leave it: --keep-save or MSPROBE_KEEP_SAVE=1)",
            "HCCL_DETERMINISTIC not set -> true (environment)",
        )
    ]


def test_a_dry_run_says_it_and_launches_nothing(job):
    (job.bench.folder / "log").write_text("of the real job")
    recipe = job.recipe()
    recipe.write_text(recipe.read_text() + "touch went_on\n")
    words = ("--overlay", "modellink/llama2_7b", "--", recipe)
    done = job.bench.run("--dry-run", *words, STUB_TRAINS="1")
    assert (done.returncode, job.bench.called(), job.trained()) == (0, [], None)
    assert not (job.bench.folder / "went_on").exists()
    assert (job.bench.folder / "log").read_text() == "of the real job"
    lines = done.stderr.splitlines()
    changed = [line for line in lines if " changes: " in line]
    assert changed
    real = job.bench.run(*words, STUB_TRAINS="1")
    assert [line for line in real.stderr.splitlines() if " changes: " in line] == changed
    assert job.bench.called() != []


def test_a_dry_run_keeps_a_log_that_is_redirected_to(job):
    (job.bench.folder / "log").write_text("of the real job")
    recipe = job.recipe()
    recipe.write_text(recipe.read_text().replace("| tee log", "> log 2>&1"))
    done = job.bench.run("--dry-run", "--overlay", "modellink/llama2_7b", "--", recipe)
    assert (done.returncode, job.bench.called()) == (2, [])
    assert "before it launched anything" in done.stderr
    (job.bench.folder / "log").unlink()
    done = job.bench.run("--dry-run", "--overlay", "modellink/llama2_7b", "--", recipe)
    assert (done.returncode, job.bench.called()) == (0, [])
    assert "changes: --train-iters 9000 -> 5" in done.stderr


def test_a_dry_run_of_a_rehearsal_and_of_a_copy(job):
    make_host(job.bench.folder, "modellink/llama2_7b")
    done = job.run("--dry-run", "--rehearse", "--overlay", "modellink/llama2_7b")
    assert (done.returncode, job.bench.called()) == (0, [])
    assert "nothing is loaded or saved" in done.stderr
    done = job.run("--dry-run", "--emit", "copy.sh", "--overlay", "modellink/llama2_7b")
    assert done.returncode == 0
    assert "changes: --train-iters 9000 -> 5" in done.stderr
    assert not (job.bench.folder / "copy.sh").exists()


RESUMES = {
    "from its checkpoint": ("--load ckpt", ["--train-iters 9000 -> 4005", "--use-checkpoint-opt_param-scheduler"]),
    "without the optimizer": ("--load ckpt --no-load-optim", ["--train-iters 9000 -> 4005"]),
    "from an older one": ("--load ckpt --ckpt-step 3000", ["--train-iters 9000 -> 3005"]),
    "by samples": (
        "--load ckpt --train-samples 80000 --global-batch-size 8",
        ["--train-samples 80000 -> 32040", "--lr-decay-samples not given -> 80000"],
    ),
}
ANEW = {
    "by --finetune": "--load ckpt --finetune",
    "from nowhere": "--load nothing_there",
    "by a rise of the batch": "--load ckpt --train-samples 80000 --global-batch-size 8 --rampup-batch-size 4 4 800",
}


@pytest.mark.parametrize("name", RESUMES)
def test_a_job_that_resumes_is_cut_from_where_it_starts(job, name):
    flags, changes = RESUMES[name]
    recipe = job.recipe(f"{flags} --save ckpt --save-interval 1000")
    done = job.bench.run("--dry-run", "--overlay", "modellink/llama2_7b", "--", recipe)
    assert done.returncode == 0, done.stderr
    for change in changes:
        assert f"changes: {change}" in done.stderr
    assert ("opt_param" in done.stderr) == (name != "without the optimizer")
    assert f"is at iteration {3000 if 'older' in name else 4000}: the job goes on from there" in done.stderr


@pytest.mark.parametrize("name", ANEW)
def test_a_job_that_begins_anew_is_cut_from_its_beginning(job, name):
    recipe = job.recipe(f"{ANEW[name]} --save ckpt --save-interval 1000")
    done = job.bench.run("--dry-run", "--overlay", "modellink/llama2_7b", "--", recipe)
    assert done.returncode == 0, done.stderr
    samples = "samples" in ANEW[name]
    assert ("--train-samples 80000 -> 40" if samples else "--train-iters 9000 -> 5") in done.stderr
    assert ("the job may train nothing" in done.stderr) == samples


@pytest.mark.parametrize(
    ("flags", "words", "complaint"),
    [
        ("--yaml-cfg job.yaml", ("--overlay", "modellink/llama2_7b"), "--yaml-cfg: Megatron reads every argument"),
        ("--yaml-cfg=job.yaml", ("--rehearse", "--config", "probe.yaml"), "--yaml-cfg: Megatron reads every argument"),
        ("--yaml-cfg job.yaml", ("--overlay", "modellink/llama2_7b", "--emit", "c.sh"), "--yaml-cfg: Megatron reads"),
        ("--save ckpt --moe-use-upcycling", ("--overlay", "modellink/llama2_7b"), "--moe-use-upcycling: the job would"),
    ],
)
def test_what_cannot_be_kept_from_saving_is_refused(job, flags, words, complaint):
    make_host(job.bench.folder, "modellink/llama2_7b")
    done = job.bench.run(*words, "--", job.recipe(flags), STUB_TRAINS="1")
    assert (done.returncode, job.bench.called(), job.trained()) == (2, [], None)
    (sentence,) = [line for line in (done.stdout + done.stderr).splitlines() if complaint in line]
    assert "; accepted: " in sentence
    assert job.state() == job.before


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("append: [--use-deter-comp]", "ckpt"),
        ("environment: {HCCL_DETERMINISTIC: 'true'}", "ckpt"),
        ("override: {lr: 1}", None),
        ("append: [--exit-interval=3]", None),
        ("override: {train-iters: 5, save: own, save-interval: 10}", "own"),
    ],
)
def test_a_job_that_is_not_cut_saves_as_ever_and_one_that_is_where_its_overlay_says(job, text, saved):
    (job.bench.folder / "own.yaml").write_text(f"title: own\n{text}\nprobe: {{steps: [0], dump: {{}}}}\n")
    for words in ((), ("--emit", "copy.sh")):
        done = job.run("--overlay", job.bench.folder / "own.yaml", *words)
        if words:
            done = job.bench.call(["bash", "copy.sh"], STUB_TRAINS="1")
        assert done.returncode == 0, done.stderr
        trained = job.trained()
        assert trained is not None
        assert trained.endswith(f"saved to {saved}"), words
        assert (job.state() == job.before) is (saved != "ckpt")
        (job.bench.folder / "trained.txt").unlink()


def test_an_overlay_that_is_not_applied_leaves_the_environment_too(bench):
    recipe = bench.recipe("torchrun --nnodes 1 evaluation.py --save x\n")
    bench.run("--overlay", "modellink/llama2_7b", "--", recipe)
    (call,) = bench.called()
    assert "HCCL_DETERMINISTIC" not in call.environment
    assert call.argv[-4:-2] == ["--save", "x"]


def test_words_that_stay_are_the_same_words(tmp_path):
    words = ["--lr=1e-4", "--data-path", "1", "a b", "--save", "your", "model", "path", "--bf16", "--split=", "-x"]
    kept, taken = without_save(words, tmp_path)
    assert kept == ["--lr=1e-4", "--data-path", "1", "a b", "--bf16", "--split=", "-x"]
    assert taken == [Taken("save", "your model path", "this job saves no checkpoint")]
    kept, _ = without_save(["--save", "a", FLAG, "--save", "b"], tmp_path)
    assert kept == ["--save", "b"]
    with pytest.raises(ConfigError, match=re.escape("--yaml-cfg")):
        without_save(["--yaml-cfg=x"], tmp_path)
    kept, taken = without_save(["--wandb-project", "p", "--wandb-save-dir", "w"], tmp_path)
    assert (len(kept), taken) == (4, [])


def test_mindspeed_llm_does_not_ask_for_a_save_of_its_own(tmp_path):
    # With weights of Hugging Face in --load it turns both conversions on, and one of them asks for --save.
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").touch()
    words = ["--load", str(weights), "--save", "ckpt"]
    assert without_save(words, tmp_path)[0] == words[:2]
    source = tmp_path / "mindspeed_llm/features_manager/convert_checkpoint/convert_checkpoint.py"
    source.parent.mkdir(parents=True)
    source.write_text("'--enable-mg2hf-convert'")
    assert without_save(words, tmp_path)[0] == [*words[:2], "--enable-hf2mg-convert"]
    (weights / "model.safetensors").unlink()
    assert without_save(words, tmp_path)[0] == words[:2]


def test_notes_that_hang_on_a_flag(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("title: x\nnotes: [always, {unless: use-mcore-models, text: it is legacy}]\n")
    overlay = read(path)
    assert overlay.notes == ("always",)
    assert overlay.notes_on(["--bf16"]) == ["it is legacy"]
    assert overlay.notes_on(["--use-mcore-models"]) == []
    path.write_text("title: x\nnotes: [{if: a, text: b}]\n")
    with pytest.raises(ConfigError, match="accepted: a line, or {unless: FLAG, text: LINE}"):
        read(path)


@pytest.mark.parametrize("model", ["", "--use-mcore-models"])
def test_a_recipe_of_the_core_model_is_not_called_legacy(bench, model):
    recipe = bench.recipe(f"torchrun --nnodes 1 pretrain_gpt.py --num-layers 40 {model}\n")
    done = bench.run("--overlay", "modellink/llama2_13b", "--", recipe)
    assert done.returncode == 0, done.stderr
    assert ("legacy" in done.stdout) is (model == "")
