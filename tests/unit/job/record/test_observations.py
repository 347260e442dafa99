"""Observations of a step: what is added after it is closed is nobody's."""

from msprobe_megatron.job.record.observations import Observations


def cells(slot):
    return (0, 0, "forward", None, None, "float32", slot, None, None)


def test_what_comes_after_the_end_is_not_seen():
    seen = Observations()
    seen.add(cells(7))
    seen.add(cells(8))
    seen.close()
    seen.add(cells(9))  # a thread of the host that had the page in its hand
    assert len(seen) == 2
    assert [one.slot for one in seen] == [7, 8]
    assert seen.column("slot") == [7, 8]
    assert seen[-1].slot == 8


def test_until_then_all_are():
    seen = Observations()
    seen.add(cells(7))
    assert (len(seen), seen.column("slot"), [one.slot for one in seen]) == (1, [7], [7])
