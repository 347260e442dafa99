"""A recorded step holds the tensors that plain training holds: none of them lives longer for being watched."""

import gc

import pytest
import torch

from msprobe_megatron.lab.bench.clockwork.turns import Workload
from msprobe_megatron.lab.bench.profiles.profile import _tensors_at_peak
from tests.support.forked import run_forked

FLAGS = (
    "--num-layers 2 --micro-batch-size 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope"
)


def at_peak(dump, out):
    torch.set_num_threads(1)
    gc.collect()  # when the collector runs next would otherwise depend on the tests before this one
    held = _tensors_at_peak(Workload("small", FLAGS, 1, 1), {"dump": dump} if dump else None, out)
    return {maker: list(held_by) for maker, held_by in held.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    (found,) = run_forked(1, at_peak, None, tmp_path_factory.mktemp("plain"))
    assert sum(size for _, size in found.values()) > 2 << 20
    return found


@pytest.mark.parametrize("dump", [{"level": "L1"}, {"level": "mix"}, {"level": "L1", "digest": True}], ids=str)
def test_at_its_peak_a_recorded_step_has_the_table_of_figures_more_and_nothing_else(dump, plain, tmp_path):
    (seen,) = run_forked(1, at_peak, dump, tmp_path / "run")
    table = {maker: seen.pop(maker) for maker in list(seen) if maker.startswith("job.record.slots.")}
    assert seen == plain
    assert 0 < sum(size for _, size in table.values()) <= 1 << 20
