"""What differs in how two runs were started, ordered by its effect on numbers."""

import json

from msprobe_megatron.analyse.env_diff import ORDER, effect_of, env_diff
from msprobe_megatron.analyse.load import Run
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
    assert "differences of rounding" in text
    assert "num_layers" not in text
    assert main(["env-diff", single, single]) == 0
    assert "no setting differs" in capsys.readouterr().out
    assert main(["env-diff", single, tp2, "--json"]) == 1
    names = {setting["name"] for setting in json.loads(capsys.readouterr().out)["settings"]}
    assert "tensor_model_parallel_size" in names
