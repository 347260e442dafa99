"""What differs in how two runs were started, ordered by its effect on numbers."""

import json

from msprobe_megatron.analysis.load.run import Run, open_run
from msprobe_megatron.analysis.settings.env_diff import ORDER, effect_of, env_diff
from msprobe_megatron.cli import main


def run_of(path, **arguments):
    return Run(path, {"arguments": arguments, "versions": {"torch": arguments.pop("torch", "2.13")}})


def test_order_is_that_of_the_effect_on_numbers(tmp_path):
    left = run_of(tmp_path, lr=1e-3, num_layers=4, tensor_model_parallel_size=1, log_interval=1, bf16=True, seed=1)
    right = run_of(
        tmp_path, lr=2e-3, num_layers=8, tensor_model_parallel_size=2, log_interval=9, bf16=False, seed=2, torch="2.1"
    )
    result = env_diff(left, right)
    names = ["num_layers", "seed", "lr", "bf16", "torch", "tensor_model_parallel_size", "log_interval"]
    assert [setting.name for setting in result.settings] == names
    assert [setting.name for setting in result.matters] == names[:-1]
    assert (result.settings[0].left, result.settings[0].right) == (4, 8)


def test_equal_runs_have_no_difference(tmp_path):
    assert env_diff(run_of(tmp_path, lr=1.0), run_of(tmp_path, lr=1.0)).settings == []


def test_a_setting_that_only_one_run_has(tmp_path):
    (setting,) = env_diff(run_of(tmp_path), run_of(tmp_path, brand_new_flag=3)).settings
    assert (setting.left, setting.right, setting.effect) == (None, 3, "unknown")


def test_every_argument_of_a_real_run_has_a_known_effect(runs):
    arguments = json.loads((runs.clean("single") / "run.json").read_text())["arguments"]
    unknown = [name for name in arguments if effect_of(name) == "unknown"]
    # A flag whose effect nobody has thought about is shown as such; of Megatron's common ones there is none.
    assert unknown == []
    assert {effect_of(name) for name in arguments} <= set(ORDER)


def test_the_command(runs, capsys):
    single, tp2 = str(runs.clean("single")), str(runs.clean("tp2"))
    assert main(["env-diff", single, tp2]) == 1
    text = capsys.readouterr().out
    assert "tensor_model_parallel_size" in text
    assert "different summation order" in text
    assert "num_layers" not in text
    assert main(["env-diff", single, single]) == 0
    assert "no setting differs" in capsys.readouterr().out
    assert main(["env-diff", single, tp2, "--json"]) == 1
    names = {setting["name"] for setting in json.loads(capsys.readouterr().out)["settings"]}
    assert "tensor_model_parallel_size" in names


def test_environment_and_sources_are_in_the_run_and_compared(runs, tmp_path):
    facts = json.loads((runs.clean("single") / "run.json").read_text())
    assert "OMP_NUM_THREADS" in facts["environment"] or facts["environment"] == {}
    assert all(set(state) == {"commit", "files", "digest"} for state in facts["sources"].values())
    left = Run(
        tmp_path, {"environment": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}, "sources": {"/a/M": {"digest": "1"}}}
    )
    right = Run(tmp_path, {"environment": {"NCCL_ALGO": "Tree"}, "sources": {"/b/M": {"digest": "2"}}})
    found = {setting.name: setting.effect for setting in env_diff(left, right).settings}
    assert found == {"$NCCL_ALGO": "kernels", "$NCCL_DEBUG": "none", "sources of M": "versions"}


def test_weights_and_data_that_differ_are_told(runs):
    """By digests in one pair, by statistics in the other; layouts alone make no difference."""
    same = env_diff(open_run(runs.sketched("single")), open_run(runs.sketched("tp2")))
    assert not [setting for setting in same.settings if setting.effect in ("weights", "data")]
    same = env_diff(open_run(runs.clean("single")), open_run(runs.clean("mbs1_dp2")))
    assert not [setting for setting in same.settings if setting.effect in ("weights", "data")]
    changed = env_diff(open_run(runs.sketched("single")), open_run(runs.sketched("tp2", "flipped_last_bit")))
    (weights,) = [setting for setting in changed.settings if setting.effect == "weights"]
    assert "1 of" in weights.right
    assert "decoder.layers.2.self_attention.linear_proj.weight" in weights.right
    other = env_diff(open_run(runs.clean("single")), open_run(runs.faulty("single", "other_data")))
    assert {setting.name for setting in other.settings if setting.effect == "data" and "step" in setting.name} == {
        *("data at step 0: input_ids", "data at step 0: labels"),
    }


def test_two_launch_scripts_and_a_script_against_a_run(runs, tmp_path, capsys):
    a, b = tmp_path / "a.sh", tmp_path / "b.sh"
    a.write_text("export NCCL_ALGO=Ring\npython x.py --num-layers 4 --lr 1e-2 --tensor-model-parallel-size 1\n")
    b.write_text("python x.py --num-layers 4 --lr 0.01 --tensor-model-parallel-size 2 --swiglu\n")
    assert main(["env-diff", str(a), str(b), "--json"]) == 1
    settings = {item["name"]: (item["left"], item["right"]) for item in json.loads(capsys.readouterr().out)["settings"]}
    assert settings == {
        "tensor_model_parallel_size": ("1", "2"),
        "swiglu": (None, True),
        "$NCCL_ALGO": ("Ring", None),
    }
    # A script says only what it sets.
    assert main(["env-diff", str(a), str(runs.clean("single")), "--json"]) == 0
    assert main(["env-diff", str(b), str(runs.clean("single")), "--json"]) == 1
