"""ModelLink's own launch recipes, from a checkout given by MODELLINK_PATH: how each is started, and trained on CPU."""

import json
import re

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analyse.diagnose import diagnose
from msprobe_megatron.analyse.load import open_run
from msprobe_megatron.overlays import all_overlays
from tests.hosts.conftest import checkout
from tests.hosts.modellink import SMALLER, WORLD, Host
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


@pytest.fixture(scope="module")
def host(modellink):
    found = Host(modellink, "modellink")
    found.require()
    return found


def rows(out, step, rank):
    return pq.read_table(out / f"step_{step:06d}/rank_{rank:05d}/records.parquet").to_pylist()


def check(out, probed):
    """Every rank recorded its steps whole, healthy, and every tensor says which part of the whole it is."""
    assert probed.code == 0, probed.tail()
    # A step that fp16 skips is printed without a loss.
    assert re.findall(r"iteration +(\d+)/ +3 \|", probed.output) == ["1", "2", "3"], probed.tail()
    microbatches = 4 // json.loads((out / "run.json").read_text())["sizes"]["dp"]
    for rank in range(WORLD):
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
        assert (ledger["faults"], ledger["not_happened"], ledger["steps"]) == ([], [], [0, 2])
        found = rows(out, 2, rank)
        assert {row["microbatch"] for row in found if row["kind"] == "activation"} == set(range(microbatches))
        assert {"activation", "gradient", "parameter", "grad_reduced"} <= {row["kind"] for row in found}
        unknown = {(row["name"], row["shard"]) for row in found if row["shard"].startswith("?")}
        # The norm of a latent key is not one of heads.
        assert {name for name, _ in unknown if not name.endswith("k_layernorm")} <= {"lm loss"}, unknown
    # The first steps of a job in fp16 overflow until the loss scale has come down.
    overflow = ("non_finite", "skipped_step")
    findings = [finding.text for finding in diagnose(open_run(out)).findings if finding.what not in overflow]
    assert findings == []


# LLaMA2 in both of ModelLink's models: pipeline of two, distributed optimizer, fused attention.
@pytest.mark.parametrize("recipe", ["llama2", "mcore/llama2"])
def test_training_prints_the_numbers_of_a_run_without_the_kit(host, tmp_path, recipe):
    path = host.checkout / "examples" / recipe / "pretrain_llama2_7b_ptd.sh"
    plain = host.train(path, tmp_path / "plain", kit=False)
    probed = host.train(path, tmp_path / "probed", kit=True)
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert probed.iterations == plain.iterations, probed.tail()
    check(tmp_path / "probed/out", probed)
    run = json.loads((tmp_path / "probed/out/run.json").read_text())
    assert run["versions"]["megatron-core"].startswith("0.6.")
    assert run["sizes"]["pp"] == 2


# LLaMA2-7B is trained above.
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "modellink/llama2_7b"])
def test_training_of_the_recipe_of_each_overlay(host, tmp_path, name):
    recipes = recipes_of(host.checkout, OVERLAYS[name])
    if not recipes:
        pytest.skip(f"this checkout has no recipe that {name} is for")
    more = SMALLER.get(name.partition("/")[2])
    check(tmp_path / "job/out", host.train(recipes[0], tmp_path / "job", kit=True, more=more))
