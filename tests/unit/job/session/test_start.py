"""Steps of a job that does not begin at step 0, as one that resumes or that loads a converted checkpoint."""

import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.config import from_document
from tests.jobs.integrations.test_plain_torch import net


def run_from(start, steps, out, iterations=6):
    """Steps that were recorded, and what `summary` warns about."""
    config = from_document({"output": str(out), "steps": steps, "dump": {"level": "L0"}}, "test")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, step=start) as session:
        for _ in range(iterations):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return session.steps_recorded, summarise(open_run(out)).warnings


def test_steps_before_the_first_are_missing(tmp_path):
    recorded, warnings = run_from(1, [0, 2, 4], tmp_path / "out")
    assert recorded == [2, 4]
    assert warnings == ["rank 0: step 0 requested and not there: the job began at step 1"]


def test_a_job_that_begins_at_the_first_of_them_misses_nothing(tmp_path):
    assert run_from(0, [0, 2, 4], tmp_path / "out") == ([0, 2, 4], [])
    assert run_from(3, "all", tmp_path / "all", 2) == ([3, 4], [])


@pytest.mark.parametrize("start", [0, 1, 4000])
def test_after_start_is_recorded_wherever_the_job_begins(tmp_path, start):
    assert run_from(start, {"after_start": [0, 4]}, tmp_path / "out") == ([start, start + 4], [])


def test_after_start_that_is_never_reached_is_told_in_the_jobs_own_numbers(tmp_path):
    recorded, warnings = run_from(10, {"after_start": [0, 9]}, tmp_path / "out")
    assert recorded == [10]
    assert warnings == ["rank 0: step 19 was requested and never reached; last step was 15"]


def test_none_at_all_names_both_ends(tmp_path):
    recorded, warnings = run_from(10, [0, 4], tmp_path / "out")
    assert recorded == []
    assert any("no step was recorded; requested: 0, 4, steps were 10 to 15" in text for text in warnings)
