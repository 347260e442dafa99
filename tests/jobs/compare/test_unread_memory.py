"""Memory that an operator is given and does not read: whatever it holds, two runs agree and one run is healthy."""

import json

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from tests.support.demo_runs import demo_run

FLAGS = "--num-layers 2 --train-iters 2 --micro-batch-size 2 --global-batch-size 4"
ROW = "core_attention/torch.baddbmm.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run of a fault, at level mix; attention is given memory that holds NaN, another value, or what it held."""
    folder, runs = tmp_path_factory.mktemp("unread"), {}

    def run(fault):
        if fault not in runs:
            runs[fault] = open_run(demo_run(folder, "dump: {level: mix}", FLAGS, fault=fault, name=fault))
        return runs[fault]

    return run


@pytest.mark.parametrize("memory", ["memory_of_nan", "memory_of_others"])
def test_the_same_job_twice_agrees_whatever_the_memory_held(made, memory):
    result = compare(made("none"), made(memory))
    assert result.verdict == "agree", result.as_dict()
    assert result.counts["agree"] > 500


@pytest.mark.parametrize("memory", ["none", "memory_of_nan"])
def test_a_healthy_run_is_healthy(made, memory):
    assert diagnose(made(memory)).findings == []


def test_a_product_that_is_really_wrong_is_still_found(made):
    assert compare(made("none"), made("scores_of_layer_1")).verdict == "diverged"


def test_the_argument_is_named_as_unread(made):
    run = made("memory_of_nan")
    rows = run.rows().filter(f"name like '%{ROW}' and io = 'input' and kind = 'activation'")
    assert {row[0] for row in rows.project("path").fetchall()} == {"1", "2"}
    sites = json.loads(next(run.path.glob("step_*/rank_*/sites.json")).read_text())
    assert [site["unread"] for site in sites["apis"] if site["name"].endswith(ROW)] == [["0"], ["0"]]
