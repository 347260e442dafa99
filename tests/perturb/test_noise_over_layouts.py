"""Noise of API calls comes from the index in the whole tensor: ranks of TP2 get the halves of what one card gets."""

import torch

from tests.distributed.layouts import LAYOUTS, flags_of
from tests.forked import run_forked


def _train_and_keep_noise(argv):
    """Of each input that noise was added to in a step: by how many units in the last place each element moved."""
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.probes.perturb import noise

    kept, add_ulps = [], noise.add_ulps

    def keeping(x, *more):
        y = add_ulps(x, *more)
        kept.append(y.view(torch.int32) - x.contiguous().view(torch.int32))
        return y

    noise.add_ulps = keeping
    try:
        run(argv)
    finally:
        noise.add_ulps = add_ulps
    return kept


def _noise(tmp_path, layout, section):
    probe = tmp_path / "probe.yaml"
    probe.write_text(f"strict: true\nsteps: [0]\nperturb: {section}\n")
    flags = [*flags_of(layout, dropout=False), "--train-iters", "1", "--global-batch-size", "2"]
    argv = [*flags, "--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / layout)]
    return run_forked(LAYOUTS[layout].world, _train_and_keep_noise, argv)


def test_two_ranks_get_the_halves_of_the_noise_of_one(tmp_path):
    section = "{mode: add_noise, list: [softmax]}"
    (one,), two = _noise(tmp_path, "single", section), _noise(tmp_path, "tp2", section)
    assert len(one) == len(two[0]) == len(two[1]) == 4
    for whole, *parts in zip(one, *two, strict=True):
        # Samples, heads, positions, keys: heads are cut.
        assert set(whole.unique().tolist()) == {-1, 1}
        assert torch.equal(whole, torch.cat(parts, dim=1))
        assert not torch.equal(parts[0], parts[1])
