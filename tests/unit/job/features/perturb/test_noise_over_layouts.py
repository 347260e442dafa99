"""Noise of API calls comes from the index in the whole tensor: ranks get the parts of what one card gets."""

import pytest
import torch

from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked

_LAYER = "decoder.layers.0"
_ATTENTION = f"{_LAYER}.self_attention"
_CORE = f"{_ATTENTION}.core_attention"
# Four heads in two groups, turned by their position.
_MORE = "--position-embedding-type rope --group-query-attention --num-query-groups 2 --train-iters 1"
_SAMPLES = 2


def _train_and_keep_noise(argv):
    """By call: of the tensor that noise was added to, by how many units in the last place each element moved."""
    from msprobe_megatron.job.features.perturb.examiner import CheckRunner
    from msprobe_megatron.job.features.perturb.run import changed_inputs
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    kept, add_ulps, examine = {}, changed_inputs.add_ulps, CheckRunner.examine
    names = [""]

    def naming(self, case, name, *more, **others):
        names.append(name)
        return examine(self, case, name, *more, **others)

    def keeping(x, *more):
        y = add_ulps(x, *more)
        if x.dtype is torch.float32:
            kept.setdefault(names[-1], y.view(torch.int32) - x.contiguous().view(torch.int32))
        return y

    changed_inputs.add_ulps, CheckRunner.examine = keeping, naming
    try:
        run(argv)
    finally:
        changed_inputs.add_ulps, CheckRunner.examine = add_ulps, examine
    return kept


def _noise(tmp_path, layout, stage):
    probe = tmp_path / "probe.yaml"
    probe.write_text(f"strict: true\nsteps: [0]\nperturb: {{mode: add_noise, budget: all, stage: {stage}}}\n")
    flags = [*flags_of(layout, dropout=False), "--global-batch-size", str(_SAMPLES), *_MORE.split()]
    argv = [*flags, "--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / f"{layout}_{stage}")]
    return run_forked(LAYOUTS[layout].world, _train_and_keep_noise, argv)


def _columns(left, right):
    return torch.cat([left, right], -1)


def _gate_and_value(left, right):
    (gate, value), (more_gate, more_value) = left.chunk(2, -1), right.chunk(2, -1)
    return torch.cat([gate, more_gate, value, more_value], -1)


def _rows(left, right):
    return torch.cat([left, right])


def _gate_and_value_rows(left, right):
    return _gate_and_value(left.t(), right.t()).t()


def _heads(left, right):
    return torch.cat([left, right], 2)


def _heads_in_batches(left, right):
    parts = [part.view(_SAMPLES, -1, *part.shape[1:]) for part in (left, right)]
    return torch.cat(parts, 1).flatten(0, 1)


# How two ranks' tensors make the one of a single card; every other call has the same tensor on both, or, where
# sequences are cut, half of the positions.
CUT = {
    f"{_ATTENTION}.linear_qkv/torch.Tensor.add.0": _columns,
    f"{_CORE}/torch.baddbmm.0": _heads_in_batches,
    f"{_CORE}/torch.bmm.0": _heads_in_batches,
    f"{_CORE}.scale_mask_softmax/torch.nn.functional.softmax.0": lambda left, right: torch.cat([left, right], 1),
    f"{_ATTENTION}.linear_proj/torch.matmul.0": _columns,
    f"{_LAYER}.mlp/torch.Tensor.add.0": _gate_and_value,
    f"{_LAYER}.mlp/torch.nn.functional.silu.0": _columns,
    f"{_LAYER}.mlp/torch.Tensor.add.1": _columns,
    f"{_LAYER}.mlp/torch.Tensor.mul.0": _columns,
    f"{_LAYER}.mlp.linear_fc2/torch.matmul.0": _columns,
    "model/torch.max.0": _columns,
    "model/torch.Tensor.sum.0": _columns,
}
# What Megatron's own functions multiply in their backward.
CUT_IN_BACKWARD = {
    f"{_ATTENTION}.linear_qkv/backward/torch.Tensor.matmul.0": _columns,
    f"{_ATTENTION}.linear_qkv/backward/torch.Tensor.matmul.1": _rows,
    f"{_ATTENTION}.linear_qkv/backward/torch.Tensor.sum.0": _columns,
    f"{_LAYER}.mlp.linear_fc1/backward/torch.Tensor.matmul.0": _gate_and_value,
    f"{_LAYER}.mlp.linear_fc1/backward/torch.Tensor.matmul.1": _gate_and_value_rows,
    "output_layer/backward/torch.Tensor.matmul.0": _columns,
    "output_layer/backward/torch.Tensor.matmul.1": _rows,
}
WHOLE_IN_BACKWARD = (
    f"{_LAYER}.mlp.linear_fc2/backward/torch.Tensor.matmul.0",
    f"{_ATTENTION}.linear_proj/backward/torch.Tensor.matmul.0",
)
WHOLE = (
    f"{_LAYER}.input_layernorm/torch.nn.functional.rms_norm.0",
    f"{_ATTENTION}.linear_qkv/torch.matmul.0",
    f"{_LAYER}/torch.Tensor.add.0",
    f"{_LAYER}.pre_mlp_layernorm/torch.nn.functional.rms_norm.0",
    f"{_LAYER}.mlp.linear_fc1/torch.matmul.0",
    "output_layer/torch.matmul.0",
)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        pytest.param("tp2", "forward", marks=pytest.mark.slow),
        ("tp2_sp", "forward"),
        ("tp2", "backward"),
        pytest.param("tp2_sp", "backward", marks=pytest.mark.slow),
    ],
)
def test_the_calls_of_a_layer_get_the_noise_of_one_card(tmp_path, layout, stage):
    (one,), two = _noise(tmp_path, "single", stage), _noise(tmp_path, layout, stage)
    seen, turned, cut = set(), 0, {**CUT, **CUT_IN_BACKWARD}
    for name, whole in one.items():
        parts = [rank[name] for rank in two]
        assert set(whole.unique().tolist()) <= {-1, 0, 1}
        if name in cut:
            assert parts[0].shape != whole.shape
            assert torch.equal(whole, cut[name](*parts)), name
            seen.add(name)
        elif name.startswith(f"{_ATTENTION}/") and whole.shape[2] > 1:  # queries and keys, turned by their position
            assert torch.equal(whole, _heads(*parts)), name
            turned += 1
        elif name in (*WHOLE, *WHOLE_IN_BACKWARD):
            together = torch.cat(parts) if parts[0].shape != whole.shape else parts[0]
            assert torch.equal(whole, together), name
            assert torch.equal(whole[-len(parts[1]) :], parts[1]), name
            seen.add(name)
    if stage == "forward":
        assert seen == {*CUT, *WHOLE}
    else:
        assert seen >= {*CUT_IN_BACKWARD, *WHOLE_IN_BACKWARD}
    assert len(seen) >= 18 and turned >= 6
