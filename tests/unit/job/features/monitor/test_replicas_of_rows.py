"""Readers know which of the monitor's rows are replicas: gradients before their reduction are not."""

import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.table import open_view
from msprobe_megatron.analysis.page.trends import disagreements


@pytest.mark.parametrize("job", ["dp4", "ep2"])
def test_a_healthy_job_has_no_replicas_that_disagree(watched, job):
    run = open_run(watched.job(job)[0])
    ((count,),) = run.rows().filter("kind = 'grad_unreduced'").aggregate("count(*)").fetchall()
    assert count > 0
    found = disagreements(open_view(run))
    assert [(entry["kind"], entry["name"]) for entry in found["first"]] == []
