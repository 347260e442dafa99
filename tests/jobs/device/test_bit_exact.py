"""On a device too a recorded run is bit for bit the run without the kit, whatever is recorded, dropout on."""

import pytest

from tests.jobs.device.jobs import PROBES
from tests.jobs.distributed.test_bit_exact import same

NUMBERS = ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng")
SPREAD = ("L0", "L1", "tensor", "nonfinite", "everything", "perturb_forward", "perturb_backward")
CASES = [("single", probe) for probe in PROBES]
CASES += [(layout, probe) for layout in ("tp2", "pp2", "dp2_distopt") for probe in SPREAD]


def differing(plain, probed):
    """What differs between the ranks of two runs, as "rank: what"."""
    return [
        f"{rank}: {what}"
        for rank, (left, right) in enumerate(zip(plain, probed, strict=True))
        for what in NUMBERS
        if not same(left[what], right[what])
    ]


@pytest.mark.parametrize(("layout", "probe"), CASES)
def test_recording_changes_no_bit(device_jobs, layout, probe):
    plain = device_jobs.plain(layout)
    out, probed = device_jobs.probed(layout, probe)
    assert all(rank["gradients"] for rank in plain), "no gradient was kept: the comparison would be empty"
    assert differing(plain, probed) == []
    assert list(out.glob("ranks/rank_*.json")), "the kit was not armed: the comparison would be empty"
    assert faults(out) == []


@pytest.mark.parametrize(("layout", "probe"), CASES)
def test_nothing_is_read_before_it_is_there(device_jobs, layout, probe):
    """Neither the kit nor the job touches what another stream, a copy or a collective has not delivered."""
    for rank in device_jobs.probed(layout, probe)[1]:
        assert [race for step in rank["steps"] for race in step["raced"]] == []


def faults(out):
    """What the kit has reported of itself, over all ranks."""
    import json

    ledgers = [json.loads(path.read_text())["ledger"] for path in sorted(out.glob("ranks/rank_*.json"))]
    return [fault for ledger in ledgers for fault in ledger["faults"]]


def test_the_comparison_can_fail(device_jobs):
    plain = device_jobs.plain("single")
    [changed] = [{**rank, "parameters": {**rank["parameters"]}} for rank in plain]
    name = next(iter(changed["parameters"]))
    changed["parameters"][name] = changed["parameters"][name] * (1 + 1e-6)
    assert differing(plain, [changed]) == ["0: parameters"]
