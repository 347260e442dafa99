import pytest


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    """Two data parallel ranks over sixteen steps, with curves for TensorBoard and one bad batch at step 14."""
    from tests.unit.job.features.checks.jobs import job

    probe = "monitor: {data: true, format: [parquet, tensorboard], alerts: [{rule: spike, kinds: [loss]}]}\n"
    root = tmp_path_factory.mktemp("watched")
    return job(root, "dp2", "bad_batch", at=14, probe=probe, more="--lr 3e-3", steps=16)
