"""MindSpeed-LLM's own recipes, from a checkout given by MINDSPEED_LLM_PATH: how each is started, and trained on CPU."""

import pytest

from tests.jobs.hosts.conftest import checkout
from tests.jobs.hosts.modellink import Host
from tests.jobs.hosts.recipes import check_rehearsal, check_same_numbers, check_start, overlays_of, recipes_of

OVERLAYS = overlays_of("mindspeed_llm")


@pytest.fixture(scope="module")
def mindspeed_llm():
    return checkout("MINDSPEED_LLM_PATH", "mindspeed_llm/__init__.py")


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(mindspeed_llm, tmp_path, name):
    check_start(mindspeed_llm, OVERLAYS[name], tmp_path, "--npu-deterministic")


@pytest.fixture(scope="module")
def host(mindspeed_llm):
    found = Host(mindspeed_llm, "mindspeed_llm")
    found.require()
    return found


def test_training_prints_the_numbers_of_a_run_without_the_kit(host, tmp_path):
    recipe = host.checkout / "examples/mcore/llama2/pretrain_llama2_7b_ptd.sh"
    check_same_numbers(host, recipe, tmp_path, "mindspeed_llm/llama2_7b", "0.12.")


# LLaMA2-7B is trained above.
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "mindspeed_llm/llama2_7b"])
def test_training_of_the_recipe_of_each_overlay(host, tmp_path, name):
    recipe = recipes_of(host.checkout, OVERLAYS[name])[0]
    check_rehearsal(tmp_path / "job/out", host.rehearse(recipe, tmp_path / "job", name, kit=True))
