"""ModelLink's own launch recipes, from a checkout given by MODELLINK_PATH: how each is started, and trained on CPU."""

from pathlib import Path

import pytest

from tests.hosts.conftest import checkout
from tests.hosts.modellink import SMALLER, Host
from tests.hosts.recipes import check_run, check_same_numbers, check_start, overlays_of, recipes_of

OVERLAYS = overlays_of("modellink")


@pytest.fixture(scope="module")
def modellink():
    return checkout("MODELLINK_PATH", "modellink/__init__.py")


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(modellink, tmp_path, name):
    check_start(modellink, OVERLAYS[name], tmp_path, "--use-deter-comp")


@pytest.mark.parametrize("page", ["docs/hosts/modellink.md", "README.md"])
def test_the_two_lines_name_a_recipe_that_is_there(modellink, page):
    text = (Path(__file__).resolve().parents[2] / page).read_text()
    line = next(line for line in text.splitlines() if "msprobe_run.sh --overlay" in line)
    overlay, recipe = line.split("--overlay ")[1].split(" -- ")
    assert overlay.strip() in OVERLAYS
    assert (modellink / recipe.strip()).is_file()
    assert OVERLAYS[overlay.strip()].matches(recipe.strip())


@pytest.fixture(scope="module")
def host(modellink):
    found = Host(modellink, "modellink")
    found.require()
    return found


# LLaMA2 in both of ModelLink's models: pipeline of two, distributed optimizer, fused attention.
@pytest.mark.parametrize("recipe", ["llama2", "mcore/llama2"])
def test_training_prints_the_numbers_of_a_run_without_the_kit(host, tmp_path, recipe):
    path = host.checkout / "examples" / recipe / "pretrain_llama2_7b_ptd.sh"
    check_same_numbers(host, path, tmp_path, "0.6.")


# LLaMA2-7B is trained above.
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "modellink/llama2_7b"])
def test_training_of_the_recipe_of_each_overlay(host, tmp_path, name):
    recipe = recipes_of(host.checkout, OVERLAYS[name])[0]
    more = SMALLER.get(name.partition("/")[2])
    check_run(tmp_path / "job/out", host.train(recipe, tmp_path / "job", kit=True, more=more))
