"""Collectives made for an older gloo, on the gloo of today: the same numbers."""

import pytest
import torch
import torch.distributed as dist

from msprobe_megatron.job.devices.megatron_on_cpu import older_gloo
from tests.support.forked import run_forked


@pytest.mark.parametrize(
    ("version", "needed"), [("2.1.0+cu121", True), ("2.5.1", True), ("2.6.0", False), ("2.13.0+cpu", False)]
)
def test_which_releases_need_it(version, needed):
    assert older_gloo.needed(version) is needed


def _collectives():
    dist.init_process_group("gloo")
    own = torch.tensor([dist.get_rank() + 1.0, 2.0], dtype=torch.bfloat16)
    wraps = {name: wrap(getattr(dist, name)) for name, wrap in older_gloo._WRAPPERS.items()}
    summed = own.clone()
    assert wraps["all_reduce"](summed, async_op=True).wait()
    whole = torch.empty(4, dtype=torch.bfloat16)
    wraps["all_gather_into_tensor"](whole, own)
    part = torch.empty(2, dtype=torch.bfloat16)
    wraps["reduce_scatter_tensor"](part, whole)
    sent = own.clone()
    wraps["broadcast"](sent, 1)
    swapped = torch.empty(2, dtype=torch.bfloat16)
    wraps["all_to_all_single"](swapped, own)
    return [tensor.tolist() for tensor in (summed, whole, part, sent, swapped)]


def test_numbers():
    found = run_forked(2, _collectives)
    whole = [1.0, 2.0, 2.0, 2.0]
    assert found[0] == [[3.0, 4.0], whole, [2.0, 4.0], [2.0, 2.0], [1.0, 2.0]]
    assert found[1] == [[3.0, 4.0], whole, [4.0, 4.0], [2.0, 2.0], [2.0, 2.0]]
