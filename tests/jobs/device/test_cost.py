"""What the kit costs on a device, in counts that a loaded machine does not change: waits of the host, copies to it."""

import pytest

LAYOUTS = ("single", "tp2", "pp2", "dp2_distopt")
DUMPS = ("L0", "L1", "mix", "digest", "sketch", "nonfinite", "recorder")
CASES = [("single", probe) for probe in DUMPS]
CASES += [(layout, probe) for layout in LAYOUTS[1:] for probe in ("L0", "L1", "nonfinite")]
OTHERS = [("single", probe) for probe in ("md5", "monitor", "checks")]
OTHERS += [
    (layout, probe) for layout in LAYOUTS for probe in ("tensor", "everything", "perturb_forward", "perturb_backward")
]


def added(plain, probed, what):
    """How many more of something a step of the run with the kit has, for each rank and step."""
    return [
        step[what] - bare[what]
        for left, right in zip(plain, probed, strict=True)
        for bare, step in zip(left["steps"], right["steps"], strict=True)
    ]


def added_waits(plain, probed):
    """Waits of the host on the threads of training that the kit has added; their places, where the stack knows them."""
    return [
        (len(step["waits"]) - len(bare["waits"]), step["of_the_kit"])
        for left, right in zip(plain, probed, strict=True)
        for bare, step in zip(left["steps"], right["steps"], strict=True)
        if len(step["waits"]) != len(bare["waits"])
    ]


@pytest.mark.parametrize(("layout", "probe"), CASES + OTHERS)
def test_the_host_never_waits_in_a_recorded_step(device_jobs, layout, probe):
    assert added_waits(device_jobs.plain(layout), device_jobs.probed(layout, probe)[1]) == []


@pytest.mark.parametrize(("layout", "probe"), [*CASES, ("single", "monitor"), ("single", "checks")])
def test_one_copy_to_the_host_a_step(device_jobs, layout, probe):
    copies = added(device_jobs.plain(layout), device_jobs.probed(layout, probe)[1], "host_copies")
    assert copies
    # `checks` has two probes: samples of the update, and products beside the backward.
    assert max(copies) <= (2 if probe == "checks" else 1)
