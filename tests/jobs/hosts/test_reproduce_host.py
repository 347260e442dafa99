"""Megatron-LM's own script with `reproduce`: two layouts, started with two seeds, are one computation."""

import pytest

from msprobe_megatron.analysis.checkpoints.differ import diff
from msprobe_megatron.analysis.checkpoints.opening import open_checkpoint
from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run


@pytest.fixture(scope="module")
def pair(megatron_lm, tmp_path_factory):
    """One card and TP2, with their runs and checkpoints; the vocabulary is padded alike."""
    root = tmp_path_factory.mktemp("reproduced")
    probe = root / "probe.yaml"
    probe.write_text("steps: [0, 1]\ndump: {level: L0, digest: true}\nreproduce: {seed: 5, weights: by_name}\n")
    done = {}
    for name, world, flags in (("one", 1, ()), ("tp2", 2, ("--tensor-model-parallel-size", "2"))):
        more = ("--msprobe-config", str(probe), "--msprobe-output", str(root / name), "--seed", str(world), "--swiglu")
        more += ("--save", str(root / f"{name}_saved"), "--save-interval", "2", *megatron_lm.plain_checkpoints())
        done[name] = megatron_lm.train(world, *flags, *more, "--make-vocab-size-divisible-by", "16", iterations=2)
    return root, done


def test_losses_are_the_same_and_the_runs_agree(pair):
    root, done = pair
    assert sorted(done["one"].iterations) == [1, 2], done["one"].tail()
    assert done["one"].iterations == done["tp2"].iterations, done["tp2"].tail()
    result = compare(open_run(root / "one"), open_run(root / "tp2"))
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence


def test_their_checkpoints_hold_the_same_model(pair):
    root, _ = pair
    result = diff(open_checkpoint(root / "one_saved"), open_checkpoint(root / "tp2_saved"), tolerance=1e-3)
    assert result.problems == []
    differ = {item.name for item in result.tensors if item.state != "equal"}
    # The gradient of a key's bias is zero but for rounding, and Adam makes a full step of it.
    assert all(name.endswith("linear_qkv.bias") for name in differ), result.tensors[:3]
