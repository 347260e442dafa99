"""Samples of updates, products of gradients: training is bit for bit what it is without; every weight is there."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.support.forked import run_forked


@pytest.mark.parametrize("layout", ["tp2", "dp2_distopt"])
def test_training_with_samples_is_bit_exact(jobs, tmp_path, layout):
    probe = tmp_path / "probe.yaml"
    probe.write_text("checks: {replicas: false, optimizer: false, rng: false, every: 1}\n")
    flags = [*flags_of(layout, dropout=True), "--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / "out")]
    sampled = run_forked(LAYOUTS[layout].world, train_and_keep, flags)
    for plain, ours in zip(jobs.plain(layout), sampled, strict=True):
        assert plain["losses"] == ours["losses"]
        assert plain["grad_norms"] == ours["grad_norms"]
        assert torch.equal(plain["rng"]["torch"], ours["rng"]["torch"])
        for kind in ("gradients", "optimizer"):
            assert all(torch.equal(a, b) for a, b in zip(plain[kind], ours[kind], strict=True))
        assert plain["parameters"].keys() == ours["parameters"].keys()
        assert all(torch.equal(value, ours["parameters"][name]) for name, value in plain["parameters"].items())
    files = sorted((tmp_path / "out" / "laws").glob("rank_*/steps_*.parquet"))
    assert len(files) == 3 * LAYOUTS[layout].world
    names = set()
    for path in files:
        for row in pq.read_table(path).to_pylist():
            names.add(row["name"])
            facts = json.loads(row["extra"])
            lengths = {len(values) for values in facts["values"].values()}
            assert lengths == {min(4, row["numel"])} or max(lengths) <= 4
            assert {"raw", "grad", "before", "after", "weight_before", "weight_after"} <= facts["values"].keys()
            assert facts["settings"]["step"] == row["step"] + 1
    assert len(names) == 43
    products = sorted((tmp_path / "out" / "products").glob("rank_*/steps_*.parquet"))
    assert len(products) == 3 * LAYOUTS[layout].world
    # Four matrices and two norms a layer, and the last norm.
    assert {len(pq.read_table(path)) for path in products} == {4 * 6 + 1}
