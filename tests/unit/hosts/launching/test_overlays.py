"""Every overlay: its file is sound, its command line is as written, and its architecture trains under the kit."""

import os
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.config import ConfigError, load
from msprobe_megatron.hosts.launching.overlays import all_overlays, find, read
from tests.support.forked import run_forked
from tests.unit.hosts.launching.stub import RECIPES

OVERLAYS = {overlay.name: overlay for overlay in all_overlays(RECIPES)}
# The models that have to be there, by the name a user would look for.
MODELS = (
    *("llama2_7b", "llama2_13b", "aquila2_7b", "baichuan2_7b", "bloom_7b", "internlm_7b", "qwen_7b", "gemma_7b"),
    *("gpt3_1l", "gpt3_8l", "deepseek2_lite"),
)


def recipe_of(overlay):
    """A recipe with exactly the flags that the overlay expects."""
    flags = [
        f"--{flag}" if value is True else f"--{flag} {value}"
        for flag, value in overlay.expects.items()
        if value is not False
    ]
    return "torchrun --nproc_per_node 8 pretrain_gpt.py \\\n    " + " \\\n    ".join(flags) + " --train-iters 9000\n"


def test_every_model_has_its_overlay():
    assert {f"modellink/{model}" for model in MODELS} <= set(OVERLAYS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_final_command_line(bench, name):
    overlay = OVERLAYS[name]
    done = bench.run("--overlay", name, "--", bench.recipe(recipe_of(overlay)))
    assert done.returncode == 0, done.stderr
    assert "expects" not in done.stdout
    (call,) = bench.called()
    at = call.argv.index("pretrain_gpt.py")
    assert call.argv[:at] == ["--nproc_per_node", "8", "-m", "msprobe_megatron.run"]
    host = name.partition("/")[0]
    flag = {
        "modellink": "--use-deter-comp",
        "mindspeed_llm": "--npu-deterministic",
        "megatron_lm": "--deterministic-mode",
    }[host]
    assert flag in call.argv
    # The last of two equal flags counts.
    assert call.argv[len(call.argv) - call.argv[::-1].index("--train-iters")] == "5"
    assert call.argv[-2] == "--msprobe-config"
    assert {key: call.environment.get(key) for key in overlay.environment if key.startswith(("HCCL", "NCCL"))} == {
        key: value for key, value in overlay.environment.items() if key.startswith(("HCCL", "NCCL"))
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_probe_section_is_a_probe_file(name, tmp_path):
    import json

    path = tmp_path / "probe.yaml"
    path.write_text(json.dumps(dict(OVERLAYS[name].probe)))
    config = load(path)
    assert 0 in config.steps
    assert 4 in config.steps
    assert config.dump is not None


def test_small_and_drift(bench):
    overlay = OVERLAYS["modellink/llama2_7b"]
    text = recipe_of(overlay).replace("--hidden-size 4096", "--hidden-size 5120").replace("--bf16", "--fp16")
    done = bench.run("--overlay", overlay.name, "--small", "--", bench.recipe(text))
    assert "--hidden-size is 5120; the overlay expects that it is 4096" in done.stdout
    assert "--bf16 is not given; the overlay expects that it is given" in done.stdout
    (call,) = bench.called()
    layers = [call.argv[i + 1] for i, word in enumerate(call.argv) if word == "--num-layers"]
    assert layers == ["32", "4"]


@pytest.mark.parametrize(
    ("recipe", "added"),
    [
        ("--train-iters 2000 --lr-warmup-iters 500", "--train-iters 5 --lr-decay-iters 2000"),
        ("--train-iters 2000 --lr-decay-iters 900", "--train-iters 5"),
        ("--train-samples 8000 --global-batch-size 16", "--train-samples 80 --lr-decay-samples 8000"),
        ("--train-samples 8000 --lr-decay-samples 7000 --global-batch-size 16", "--train-samples 80"),
        ("--lr 1", "--train-iters 5"),
    ],
)
def test_a_shorter_job_keeps_the_learning_rates_of_the_long_one(tmp_path, recipe, added):
    (tmp_path / "mine.yaml").write_text("title: x\noverride: {train-iters: 5}\n")
    assert read(tmp_path / "mine.yaml").arguments(recipe.split()) == added.split()


def test_a_recipe_of_another_script_is_not_changed(bench):
    text = "torchrun --nnodes 1 evaluation.py --lr 1\n"
    done = bench.run("--overlay", "modellink/llama2_7b", "--config", "probe.yaml", "--", bench.recipe(text))
    assert "not for evaluation.py" in done.stdout
    (call,) = bench.called()
    assert "--use-deter-comp" not in call.argv


def test_an_overlay_is_suggested(bench):
    recipe = bench.recipe("torchrun pretrain_gpt.py\n", "examples/bloom/pretrain_bloom_ptd_7B.sh")
    done = bench.run("--config", "probe.yaml", "--", recipe)
    assert "--overlay modellink/bloom_7b" in done.stdout


@pytest.mark.parametrize(
    ("made", "hinted"),
    [
        ([], "mindspeed_llm/llama2_7b or modellink/llama2_7b"),
        (["modellink"], "modellink/llama2_7b"),
        (["modellink", "megatron"], "modellink/llama2_7b"),
        (["mindspeed_llm/features_manager/arguments/deprecated_args.py"], "mindspeed_llm/llama2_7b"),
        # Before 2.2 it takes ModelLink's flags.
        (["mindspeed_llm"], "modellink/llama2_7b"),
        (["megatron"], None),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_only_overlays_of_the_host_are_suggested(bench, made, hinted, elsewhere):
    for name in made:
        (bench.folder / name).mkdir(parents=True)
        if name.endswith(".py"):
            (bench.folder / name).rmdir()
            (bench.folder / name).touch()
    recipe = bench.recipe("torchrun pretrain_gpt.py\n", "examples/mcore/llama2/pretrain_llama2_7b_ptd.sh")
    (bench.folder / "work").mkdir()
    done = bench.run(
        "--config", bench.folder / "probe.yaml", "--", recipe, cwd=bench.folder / ("work" if elsewhere else "")
    )
    hints = [line.partition("--overlay ")[2] for line in done.stdout.splitlines() if "an overlay fits" in line]
    assert hints == ([hinted] if hinted else [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title: x\nmodel: y\n", "model: unknown key; accepted: title"),
        ("match: {recipe: [a]}\n", "title: missing"),
        ("title: x\nmatch: {path: a}\n", "match.path: unknown key; accepted: recipe, script"),
        ("title: x\nappend: --flag\n", "append: '--flag' is not a list"),
        ("title: x\nexpects: [a]\n", "expects: ['a'] is not a table"),
        ("- a\n", "is not an overlay"),
    ],
)
def test_a_mistake_in_an_overlay_is_named(tmp_path, text, complaint):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read(path)


def test_ambiguous_names_are_refused():
    with pytest.raises(ConfigError, match="may be mindspeed_llm/llama2_7b or modellink/llama2_7b"):
        find("llama2_7b", RECIPES)
    assert find("bloom_7b", RECIPES).name == "modellink/bloom_7b"


def demo(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    return run(argv).losses


PROBE = """steps: [0, 1]
dump: {level: L0, task: statistics}
monitor: {alerts: [nonfinite, spike]}
perturb: {budget: all}
"""


def has_perturbed(path):
    return "perturb" in pq.read_table(path, columns=["kind"])["kind"].to_pylist()


# Overlays that shrink to the same flags train once.
ARCHITECTURES = {overlay.demo: name for name, overlay in reversed(OVERLAYS.items())}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.values()))
def test_the_architecture_trains_under_the_kit(name, tmp_path):
    (tmp_path / "probe.yaml").write_text(PROBE)
    kit = ["--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out")]
    (plain,) = run_forked(1, demo, list(OVERLAYS[name].demo))
    (probed,) = run_forked(1, demo, [*OVERLAYS[name].demo, *kit])
    assert len(plain) == 2
    assert probed == plain
    table = pq.read_table(tmp_path / "out/step_000001/rank_00000/records.parquet")
    kinds = set(table["kind"].to_pylist())
    assert {"activation", "gradient", "parameter", "grad_reduced", "loss"} <= kinds
    (watched,) = (tmp_path / "out/monitor/rank_00000").glob("*.parquet")
    assert {"activation", "grad_reduced", "optimizer_state", "throughput"} <= set(
        pq.read_table(watched)["kind"].to_pylist()
    )
    examined = [path for path in (tmp_path / "out").rglob("*.parquet") if has_perturbed(path)]
    assert examined
    # A healthy model in bf16: no suspect, no alert, no replica, nothing that did not happen.
    assert [finding.text for finding in diagnose(open_run(tmp_path / "out")).findings] == []


@pytest.mark.skipif(not os.environ.get("MODELLINK_PATH"), reason="$MODELLINK_PATH names no checkout")
def test_overlays_fit_the_recipes_of_a_checkout(bench):
    root, seen = Path(os.environ["MODELLINK_PATH"]), []
    for path in sorted(root.glob("examples/**/pretrain_*.sh")):
        fitting = [o for o in OVERLAYS.values() if o.name.startswith("modellink/") and o.matches(str(path))]
        if not fitting:
            continue
        bench.out.unlink(missing_ok=True)
        subprocess.run(["bash", str(path)], cwd=bench.folder, env=bench.environment(), capture_output=True, check=False)
        (call,) = bench.called()
        assert fitting[0].drift(call.argv) == [], path
        seen.append(fitting[0].name)
    assert len(set(seen)) >= len(MODELS) - 1
