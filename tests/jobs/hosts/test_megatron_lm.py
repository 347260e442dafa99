"""The unedited pretrain_gpt.py under the kit: same numbers, the right steps, every way to start it."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.hosts.modellink import Host
from tests.jobs.hosts.recipes import check_rehearsal

# Overlay -> the recipe it is for.
RECIPES = {
    "megatron_lm/gpt3_175b": "examples/gpt3/train_gpt3_175b_distributed.sh",
    "megatron_lm/llama3_8b": "examples/llama/train_llama3_8b_h100_fp8.sh",
}
FIELD = "account_for_embedding_in_pipeline_split"
PROBE = "steps: [0, 2]\ndump: {level: L0, task: statistics}\n"
LAYOUTS = {
    "single": (1, ()),
    "tp2_pp2_sp": (
        4,
        ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"),
    ),
}


@pytest.fixture(scope="session")
def runs(megatron_lm, tmp_path_factory):
    """Run each layout once without and once with the kit."""
    root, done = tmp_path_factory.mktemp("megatron_lm"), {}
    probe = root / "probe.yaml"
    probe.write_text(PROBE)

    def get(layout):
        if layout not in done:
            world, flags = LAYOUTS[layout]
            out = root / layout
            kit = ("--msprobe-config", str(probe), "--msprobe-output", str(out))
            done[layout] = megatron_lm.train(world, *flags), megatron_lm.train(world, *flags, *kit), out
        return done[layout]

    return get


def steps(out):
    return sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))


def rows(out, step, rank=0):
    return pq.read_table(out / f"step_{step:06d}" / f"rank_{rank:05d}" / "records.parquet")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_are_the_same_to_the_last_digit(runs, layout):
    plain, probed, _ = runs(layout)
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert probed.iterations == plain.iterations, probed.tail()
    assert probed.code == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_asked_steps_of_every_rank_are_recorded_whole(runs, layout):
    world, _ = LAYOUTS[layout]
    _, _, out = runs(layout)
    assert steps(out) == [0, 2]
    for rank in range(world):
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
        assert (ledger["faults"], ledger["not_happened"], ledger["steps"]) == ([], [], [0, 2])
        microbatches = set(rows(out, 2, rank)["microbatch"].to_pylist()) - {None}
        assert microbatches == {0, 1, 2, 3}


def test_the_loss_that_was_recorded_is_the_loss_that_was_printed(runs):
    _, probed, out = runs("single")
    table = rows(out, 2).to_pylist()
    parts = {
        path: sum(r["sum"] for r in table if r["kind"] == "loss" and r["name"] == "lm loss" and r["path"] == path)
        for path in ("", "0", "1")
    }
    # [sum over tokens, number of tokens] in newer releases, a mean over the microbatch in older ones.
    mean = parts["0"] / parts["1"] if parts["1"] else parts[""] / 4
    # Megatron adds in float32.
    assert mean == pytest.approx(float(probed.iterations[3][0]), rel=1e-6)


def test_a_resumed_job_goes_on_with_megatrons_own_numbers(megatron_lm, tmp_path):
    probe = tmp_path / "probe.yaml"
    probe.write_text("steps: [1, 2, 3]\ndump: {level: L0, task: statistics, list: [output_layer]}\n")
    keep = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2", *megatron_lm.plain_checkpoints())
    first = megatron_lm.train(1, *keep, "--exit-interval", "2", iterations=4)
    assert first.code == 0, first.tail()
    kit = ("--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / "out"))
    # Older releases load their own checkpoint with torch's former default.
    trust = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    resumed = megatron_lm.train(1, *keep, "--load", str(tmp_path / "checkpoint"), *kit, iterations=4, environment=trust)
    assert sorted(resumed.iterations) == [3, 4], resumed.tail()
    assert steps(tmp_path / "out") == [2, 3]


def test_one_line_in_the_script_does_the_same(megatron_lm, runs, tmp_path):
    plain, _, _ = runs("single")
    script = tmp_path / "pretrain_gpt.py"
    source = (megatron_lm.checkout / "pretrain_gpt.py").read_text()
    script.write_text("import msprobe_megatron.adaptor\n" + source)
    (tmp_path / "probe.yaml").write_text(PROBE)
    kit = ("--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out"))
    probed = megatron_lm.train(1, *kit, script=script, runner=())
    assert probed.iterations == plain.iterations, probed.tail()
    assert steps(tmp_path / "out") == [0, 2]


def test_help_lists_the_flags(megatron_lm):
    shown = megatron_lm.run(1, ["-m", "msprobe_megatron.run", "pretrain_gpt.py", "--help", "--msprobe-device", "cpu"])
    if "unsupported format character" in shown.output:
        pytest.skip(f"the help texts of Megatron-LM {megatron_lm.version()} itself cannot be printed")
    assert shown.code == 0, shown.tail()
    for flag in ("--msprobe-config", "--msprobe-output", "--msprobe-steps", "--msprobe-strict", "--num-layers"):
        assert flag in shown.output


def test_evaluation_is_not_recorded(megatron_lm, runs, tmp_path):
    _, _, out = runs("single")
    (tmp_path / "probe.yaml").write_text(PROBE)
    kit = ("--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out"))
    split = ("--split", "60,30,10")
    done = megatron_lm.train(1, *kit, *split, evaluation=("--eval-iters", "1", "--eval-interval", "1"))
    assert "validation loss" in done.output, done.tail()
    assert steps(tmp_path / "out") == [0, 2]
    names = ("seq", "microbatch", "phase", "kind", "name", "io", "path")
    assert [rows(tmp_path / "out", 2)[name].to_pylist() for name in names] == [
        rows(out, 2)[name].to_pylist() for name in names
    ]


def test_a_step_that_megatron_repeats_is_recorded_once(megatron_lm, tmp_path):
    if not (megatron_lm.checkout / "megatron/core/rerun_state_machine.py").exists():
        pytest.skip(f"Megatron-LM {megatron_lm.version()} has no rerun machine")
    (tmp_path / "probe.yaml").write_text("steps: [0-5]\ndump: {level: L0, task: statistics, list: [output_layer]}\n")
    fail = ("--rerun-mode", "validate_results", "--error-injection-rate", "1", "--save", str(tmp_path / "save"))
    fail += ("--save-interval", "100")
    kit = ("--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out"))
    done = megatron_lm.train(1, *fail, *kit, *megatron_lm.plain_checkpoints(), iterations=6)
    assert "Need to rerun step" in done.output, done.tail()
    for step in steps(tmp_path / "out"):
        assert set(rows(tmp_path / "out", step)["microbatch"].to_pylist()) - {None} == {0, 1, 2, 3}
    assert len(steps(tmp_path / "out")) == len(done.iterations) + 1


def yaml_cfg(host, *words):
    return host.run(1, [str(Path(__file__).parent / "yaml_cfg.py"), *map(str, words)])


def skip_if_megatron_itself_refuses(host, file):
    """A field that its check reads at the top, its model in a section, and which is refused where it stands twice."""
    settings, both = yaml.safe_load(file.read_text()), file.with_name("both.yaml")
    both.write_text(yaml.safe_dump({**settings, "language_model": {**settings["language_model"], FIELD: False}}))
    said = yaml_cfg(host, "--refused", file, both)
    first, second, kit = re.findall(r"^(?:refused|kit): (.*)", said.output, re.MULTILINE)
    assert first.startswith(f"Missing argument {FIELD} for "), said.tail()
    assert second.endswith(f"got multiple values for keyword argument '{FIELD}'"), said.tail()
    assert kit == "False"
    pytest.skip(f"--yaml-cfg of Megatron-LM {host.version()} takes no file, without the kit too: {FIELD}")


def test_yaml_cfg(megatron_lm, tmp_path):
    """`--yaml-cfg` replaces the parsed command line, the kit's flags among it."""
    if megatron_lm.old:
        pytest.skip(f"Megatron-LM {megatron_lm.version()}: --yaml-cfg without TransformerEngine is not tried")
    settings = [flag for flag in megatron_lm.flags() if flag not in ("--msprobe-device", "cpu")]
    settings += ["--train-iters", "3", "--eval-iters", "0", "--eval-interval", "1000"]
    made = yaml_cfg(megatron_lm, tmp_path / "gpt.yaml", *settings)
    assert made.code == 0, made.tail()
    if f"args.{FIELD}" in (megatron_lm.checkout / "megatron/training/yaml_arguments.py").read_text():
        skip_if_megatron_itself_refuses(megatron_lm, tmp_path / "gpt.yaml")
    (tmp_path / "probe.yaml").write_text(PROBE)
    command = ["-m", "msprobe_megatron.run", "pretrain_gpt.py", "--yaml-cfg", str(tmp_path / "gpt.yaml")]
    command += ["--msprobe-device", "cpu"]
    plain = megatron_lm.run(1, command)
    kit = ["--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out")]
    probed = megatron_lm.run(1, [*command, *kit])
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert probed.iterations == plain.iterations, probed.tail()
    assert steps(tmp_path / "out") == [0, 2]


def test_the_legacy_model(megatron_lm, tmp_path):
    if not (megatron_lm.checkout / "megatron/legacy/model/gpt_model.py").exists():
        pytest.skip(f"Megatron-LM {megatron_lm.version()} has no legacy model")
    (tmp_path / "probe.yaml").write_text(PROBE)
    # Its LayerNorm asks for a CUDA extension, its RMSNorm does not.
    flags = ("--use-legacy-models", "--normalization", "RMSNorm", *megatron_lm.plain_checkpoints())
    world, layout = LAYOUTS["tp2_pp2_sp"]
    plain = megatron_lm.train(world, *flags, *layout)
    if not plain.iterations:
        pytest.skip(f"the legacy model of Megatron-LM {megatron_lm.version()} does not train by itself")
    kit = ("--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out"))
    probed = megatron_lm.train(world, *flags, *layout, *kit)
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert probed.iterations == plain.iterations, probed.tail()
    names = {
        row["name"]
        for rank in range(world)
        for row in rows(tmp_path / "out", 2, rank).to_pylist()
        if row["kind"] != "loss" and not row["shard"].startswith("?")
    }
    assert {f"language_model.encoder.layers.{layer}.self_attention.core_attention" for layer in (0, 1)} <= names
    tied = "language_model.embedding.word_embeddings.weight"
    holders = [rank for rank in range(world) if tied in rows(tmp_path / "out", 2, rank)["name"].to_pylist()]
    assert holders == [0, 1, 2, 3]
    unknown = [
        row["shard"]
        for rank in range(world)
        for row in rows(tmp_path / "out", 2, rank).to_pylist()
        if row["kind"] != "loss" and row["shard"].startswith("?")
    ]
    assert unknown == []


def test_a_bad_probe_file_is_one_sentence_and_no_training(megatron_lm, tmp_path):
    (tmp_path / "probe.yaml").write_text("steps: [0]\ndumps: {}\n")
    done = megatron_lm.train(1, "--msprobe-config", str(tmp_path / "probe.yaml"))
    assert done.code != 0
    assert not done.iterations
    assert [line for line in done.output.splitlines() if line.startswith("msprobe:") and "dumps" in line]


@pytest.mark.parametrize("overlay", RECIPES)
def test_its_own_recipe_is_rehearsed_untouched(megatron_lm, tmp_path, overlay):
    recipe = megatron_lm.checkout / RECIPES[overlay]
    if not recipe.is_file():
        pytest.skip(f"Megatron-LM {megatron_lm.version()} has no {RECIPES[overlay]}")
    if megatron_lm.old:
        pytest.skip(f"{overlay} asks for --deterministic-mode, which {megatron_lm.version()} does not have")
    host = Host(megatron_lm.checkout, "megatron_lm")
    before = host.state()
    check_rehearsal(tmp_path / "job/out", host.rehearse(recipe, tmp_path / "job", overlay, kit=True))
    assert host.state() == before
