"""ModelLink's own launch recipes, from a checkout given by MODELLINK_PATH: how each is started, and trained on CPU."""

import json
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.jobs.hosts.conftest import checkout
from tests.jobs.hosts.modellink import Host
from tests.jobs.hosts.recipes import check_rehearsal, check_same_numbers, check_start, overlays_of, recipes_of
from tests.unit.hosts.launching.stub import ROOT

OVERLAYS = overlays_of("modellink")
PAGES = ("docs/hosts/modellink.md", "README.md")


def lines_of(page, start):
    """The lines of a page that begin so, without the marks around them."""
    return [line.strip() for line in (ROOT / page).read_text().splitlines() if re.match(start, line.strip())]


@pytest.fixture(scope="module")
def modellink():
    return checkout("MODELLINK_PATH", "modellink/__init__.py")


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_unedited_recipe_is_started_under_the_kit(modellink, tmp_path, name):
    check_start(modellink, OVERLAYS[name], tmp_path, "--use-deter-comp")


@pytest.mark.parametrize("page", PAGES)
def test_the_two_lines_name_a_recipe_that_is_there(modellink, page):
    lines = lines_of(page, r"msprobe-megatron launch .*--overlay")
    assert len(lines) == 2, "the real job, and its rehearsal"
    for line in lines:
        overlay, recipe = line.split("--overlay ")[1].split(" -- ")
        assert overlay.strip() in OVERLAYS
        assert (modellink / recipe.strip()).is_file()
        assert OVERLAYS[overlay.strip()].matches(recipe.strip())


@pytest.fixture(scope="module")
def host(modellink):
    found = Host(modellink, "modellink")
    found.require()
    return found


def test_the_readmes_line_goes_from_nothing_to_a_dump_without_a_device(host, tmp_path):
    (line,) = lines_of("README.md", r"msprobe-megatron launch --rehearse")
    before = host.state()
    place = host.links(tmp_path)
    done = host.line(line, place)
    assert done.code == 0, done.tail()
    assert sorted(done.iterations) == [1, 2, 3, 4, 5], done.tail()
    assert host.state() == before
    # No logs/ was made, and none is needed; nothing else appears but the record.
    assert {path.name for path in place.iterdir() if not path.is_symlink()} <= {"probe_out", "kernel_meta"}
    (run,) = (place / "probe_out").iterdir()
    for rank in (0, 1):
        rows = pq.read_table(run / f"step_000004/rank_{rank:05d}/records.parquet").to_pylist()
        assert {"activation", "gradient", "parameter", "grad_reduced"} <= {row["kind"] for row in rows}
    words = [sys.executable, "-m", "msprobe_megatron.cli", "diagnose", str(run), "--json"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert json.loads(told.stdout)["findings"] == []


# LLaMA2 in both of ModelLink's models: pipeline of two, distributed optimizer, fused attention.
@pytest.mark.parametrize("recipe", ["llama2", "mcore/llama2"])
def test_training_prints_the_numbers_of_a_run_without_the_kit(host, tmp_path, recipe):
    path = host.checkout / "examples" / recipe / "pretrain_llama2_7b_ptd.sh"
    check_same_numbers(host, path, tmp_path, "modellink/llama2_7b", "0.6.")


# LLaMA2-7B is trained above.
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "modellink/llama2_7b"])
def test_training_of_the_recipe_of_each_overlay(host, tmp_path, name):
    recipe = recipes_of(host.checkout, OVERLAYS[name])[0]
    check_rehearsal(tmp_path / "job/out", host.rehearse(recipe, tmp_path / "job", name, kit=True))
