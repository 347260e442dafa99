"""MindSpeed-LLM's own recipes, from a checkout given by MINDSPEED_LLM_PATH: how each is started, and trained on CPU."""

import pytest

from tests.hosts.conftest import checkout
from tests.hosts.modellink import Host
from tests.hosts.recipes import check_same_numbers, check_start, overlays_of

OVERLAYS = overlays_of("mindspeed_llm")


@pytest.fixture(scope="module")
def mindspeed_llm():
    return checkout("MINDSPEED_LLM_PATH", "mindspeed_llm/__init__.py")


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(mindspeed_llm, tmp_path, name):
    check_start(mindspeed_llm, OVERLAYS[name], tmp_path, "--npu-deterministic")


def test_training_prints_the_numbers_of_a_run_without_the_kit(mindspeed_llm, tmp_path):
    # MindSpeed compiles the rotary operator against CANN when it is first called.
    host = Host(mindspeed_llm, "mindspeed_llm", without=("use-mc2", "use-fused-rotary-pos-emb"))
    host.require()
    recipe = mindspeed_llm / "examples/mcore/llama2/pretrain_llama2_7b_ptd.sh"
    check_same_numbers(host, recipe, tmp_path, "0.12.")
