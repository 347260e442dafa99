"""The first oath: a recorded run is bit for bit the run without the kit, in every layout, dropout on."""

import pytest
import torch

from tests.jobs.distributed.layouts import LAYOUTS


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recording_changes_no_bit(jobs, layout):
    plain = jobs.plain(layout)
    out, probed = jobs.probed(layout, dropout=True)
    assert list(out.glob("step_*/rank_*/records.parquet")), "nothing was recorded: the comparison would be empty"
    for rank, (left, right) in enumerate(zip(plain, probed, strict=True)):
        assert left["gradients"], "no gradient was kept: the comparison would be empty"
        for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
            assert same(left[what], right[what]), f"{layout}, rank {rank}: {what} differ"


def test_the_comparison_can_fail(jobs):
    left, right = jobs.plain("single")[0], jobs.plain("recompute")[0]
    changed = {**left["parameters"]}
    name = next(iter(changed))
    changed[name] = changed[name].clone()
    changed[name].view(-1)[0] += 1e-7 + changed[name].view(-1)[0].abs() * 1e-6
    assert not same(left["parameters"], changed)
    assert left["rng"]["torch"].shape == right["rng"]["torch"].shape
