"""ModelLink's own launch recipes, unedited, from a checkout given by MODELLINK_PATH: how each would be started.

The launcher is a stub: nothing is trained here. What runs on CPU is the model of each overlay (tests/recipes).
"""

import pytest

from msprobe_megatron.overlays import all_overlays
from tests.hosts.conftest import checkout
from tests.recipes.stub import RECIPES, Bench

OVERLAYS = {overlay.name: overlay for overlay in all_overlays(RECIPES) if overlay.name.startswith("modellink/")}


@pytest.fixture(scope="module")
def modellink():
    return checkout("MODELLINK_PATH", "modellink/__init__.py")


def recipes_of(folder, overlay):
    """The pre-training recipes of the checkout that the overlay is for."""
    found = sorted((folder / "examples").rglob("pretrain_*.sh"))
    return [path for path in found if overlay.matches(str(path.relative_to(folder)))]


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(modellink, tmp_path, name):
    recipes = recipes_of(modellink, OVERLAYS[name])
    if not recipes:
        pytest.skip(f"this checkout has no recipe that {name} is for")
    bench = Bench(tmp_path)
    (tmp_path / "checkout").symlink_to(modellink)
    logs = tmp_path / "logs"
    logs.mkdir()
    for recipe in recipes:
        before = recipe.read_bytes()
        done = bench.run("--overlay", name, "--", recipe, cwd=tmp_path)
        assert done.returncode == 0, (recipe.name, done.stdout[-800:], done.stderr[-800:])
        call = bench.called()[-1]
        at = next(index for index, word in enumerate(call.argv) if word.endswith("pretrain_gpt.py"))
        assert call.argv[at - 2 : at] == ["-m", "msprobe_megatron.run"], recipe.name
        assert "--msprobe-config" in call.argv[at:]
        assert "--use-deter-comp" in call.argv[at:]
        assert recipe.read_bytes() == before
    print(f"{name}: {len(recipes)} recipes")


def test_the_two_lines_of_the_readme_name_a_recipe_that_is_there(modellink):
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs/hosts/modellink.md").read_text()
    line = next(line for line in page.splitlines() if "msprobe_run.sh --overlay" in line)
    overlay, recipe = line.split("--overlay ")[1].split(" -- ")
    assert overlay.strip() in OVERLAYS
    assert (modellink / recipe.strip()).is_file()
    assert OVERLAYS[overlay.strip()].matches(recipe.strip())
