"""MindSpeed-LLM's own recipes, from a checkout given by MINDSPEED_LLM_PATH: how each is started, and trained on CPU."""

import pytest

from msprobe_megatron.overlays import all_overlays
from tests.hosts.conftest import checkout
from tests.hosts.modellink import Host
from tests.hosts.test_modellink import check, recipes_of
from tests.recipes.stub import RECIPES, Bench

OVERLAYS = {overlay.name: overlay for overlay in all_overlays(RECIPES) if overlay.name.startswith("mindspeed_llm/")}


@pytest.fixture(scope="module")
def mindspeed_llm():
    return checkout("MINDSPEED_LLM_PATH", "mindspeed_llm/__init__.py")


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(mindspeed_llm, tmp_path, name):
    recipes = [path for path in recipes_of(mindspeed_llm, OVERLAYS[name]) if "mindspore" not in path.parts]
    if not recipes:
        pytest.skip(f"this checkout has no recipe that {name} is for")
    bench = Bench(tmp_path)
    (tmp_path / "logs").mkdir()
    for recipe in recipes:
        done = bench.run("--overlay", name, "--", recipe, cwd=tmp_path)
        assert done.returncode == 0, (recipe.name, done.stdout[-800:], done.stderr[-800:])
        call = bench.called()[-1]
        at = next(index for index, word in enumerate(call.argv) if word.endswith("pretrain_gpt.py"))
        assert call.argv[at - 2 : at] == ["-m", "msprobe_megatron.run"], recipe.name
        assert "--npu-deterministic" in call.argv[at:]


def test_training_prints_the_numbers_of_a_run_without_the_kit(mindspeed_llm, tmp_path):
    # MindSpeed compiles that operator against CANN when it is first called.
    host = Host(mindspeed_llm, "mindspeed_llm", without=("use-mc2", "use-fused-rotary-pos-emb"))
    recipe = mindspeed_llm / "examples/mcore/llama2/pretrain_llama2_7b_ptd.sh"
    if not recipe.is_file():
        pytest.skip("this checkout has no examples/mcore/llama2/pretrain_llama2_7b_ptd.sh")
    host.require()
    plain = host.train(recipe, tmp_path / "plain", kit=False)
    probed = host.train(recipe, tmp_path / "probed", kit=True)
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert probed.iterations == plain.iterations, probed.tail()
    check(tmp_path / "probed/out", probed)
