"""The checks of this folder find what they are for: each with a fault planted, and clean without it."""

import pytest

from tests.jobs.device.plain import loop
from tests.jobs.device.test_cost import added, added_waits
from tests.jobs.integrations.rows import rows
from tests.support.device import DeviceFailed

MISSING_WAIT = {"skip_event_synchronize": 1000}


def unread(out):
    """How many rows of each step have no statistics: poison reads as a slot that nobody filled."""
    return [sum(row["numel"] > 0 and row["n_nan"] is None for row in rows(out, step)) for step in range(3)]


@pytest.mark.parametrize(("planted", "lost"), [({}, 0), ({"copy_microseconds": 20_000}, 0), (MISSING_WAIT, 3)])
def test_a_missing_wait_for_the_copy_of_a_step_empties_its_rows(device, tmp_path, planted, lost):
    """In a loop that never waits itself: nothing else delivers the copy. A late one is waited for."""
    device.run(loop, str(tmp_path / "out"), {"dump": {"level": "L0"}}, "plain", planted)
    assert sum(count > 20 for count in unread(tmp_path / "out")) == lost


def test_a_missing_wait_for_a_collective_poisons_what_reads_its_result(device_jobs):
    """Of the job here, with overlap; Megatron's own check of gradients finds the NaN."""
    assert not any(step["raced"] for rank in device_jobs.plain("dp2_distopt") for step in rank["steps"])
    with pytest.raises(DeviceFailed, match="check_grads"):
        device_jobs.probed("dp2_distopt", "L0", skip_work_wait=1)


def test_a_host_read_of_device_memory_ends_the_job(device_jobs):
    with pytest.raises(DeviceFailed, match="the host read or wrote device memory directly"):
        device_jobs.probed("single", "L0", host_read=1)


def test_a_wait_of_the_host_is_found_with_its_place(device_jobs):
    found = added_waits(device_jobs.plain("single"), device_jobs.probed("single", "L0", host_wait=1)[1])
    assert found
    assert any("item" in place for _, places in found for place in places)


def test_a_second_launch_is_counted(device_jobs):
    plain = device_jobs.plain("single")
    clean = added(plain, device_jobs.probed("single", "L0")[1], "launches")
    more = added(plain, device_jobs.probed("single", "L0", second_launch=1)[1], "launches")
    tensors = [y - x for x, y in zip(clean, more, strict=True)]
    assert len(tensors) == 2
    assert min(tensors) > 50, "one for each tensor measured"
