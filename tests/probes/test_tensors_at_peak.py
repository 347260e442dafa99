"""A recorded step holds the tensors that plain training holds: none of them lives longer for being watched."""

import pytest
import torch

from msprobe_megatron.bench.profile import _tensors_at_peak
from msprobe_megatron.bench.turns import Workload
from tests.forked import run_forked

FLAGS = (
    "--num-layers 2 --micro-batch-size 1 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
    " --attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope"
)
ACTIVATION = 128 * 128 * 4  # sequence × hidden, float32
SLOTS = 512 << 10


def peak(dump, out):
    torch.set_num_threads(1)
    variant = {"dump": dump} if dump else None
    held = _tensors_at_peak(Workload("small", FLAGS, 1, 1), variant, out)
    kit = sum(one.bytes for maker, one in held.items() if maker.startswith(("record.", "measure.", "probes.")))
    return [sum(one.bytes for one in held.values()), kit]


@pytest.mark.parametrize("dump", [{"level": "L1"}, {"level": "mix"}, {"level": "L1", "digest": True}], ids=str)
def test_the_peak_of_a_recorded_step_is_that_of_plain_training(dump, tmp_path):
    ((plain, none),) = run_forked(1, peak, None, tmp_path / "plain")
    ((seen, kit),) = run_forked(1, peak, dump, tmp_path / "seen")
    print(plain, seen, kit)
    assert none == 0 and plain > 100 * ACTIVATION
    assert kit <= SLOTS
    assert seen - kit <= plain + 2 * ACTIVATION
