"""Functions of Megatron that are no API of torch have rows under their own names, and stay what they are."""

import pytest
import torch
from torch import nn

from msprobe_megatron.analysis.load.run import open_run
from tests.support.forked import run_forked


def train(out):
    """A module that calls them as Megatron does: by names bound at import."""
    from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import TransformerConfig

    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    globals()["bias_gelu_impl"] = bias_gelu_impl  # an alias in another module: this one

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x):
            y = globals()["bias_gelu_impl"](self.linear(x), self.bias)
            y = fused_bias_swiglu.bias_swiglu_impl(torch.cat([y, y], -1), None)
            y = get_bias_dropout_add(True, True)((y, self.bias), x, 0.0)
            angles = torch.ones(4, 1, 1, 4)
            return rope_utils.apply_rotary_pos_emb(y.view(4, 2, 2, 4), angles, config, cp_group=object())

    def run(probed):
        torch.manual_seed(5)
        model = Block()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(4, 2, 8)
        document = {"steps": [0], "dump": {"level": "L1"}}
        session = attach(model, optimizer, from_document(document, "t", Overrides(output=out))) if probed else None
        for _ in range(2):
            model(data).pow(2).sum().backward()
            optimizer.step()
        if session is not None:
            session.close()
            assert session.faults == []
        return [p.detach().clone() for p in model.parameters()]

    plain = run(probed=False)
    same = all(torch.equal(a, b) for a, b in zip(plain, run(probed=True), strict=True))
    kept = globals()["bias_gelu_impl"] is bias_gelu_impl is fused_bias_gelu.bias_gelu_impl
    return {"same": same, "kept": kept}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    out = tmp_path_factory.mktemp("named") / "out"
    return out, run_forked(1, train, str(out))[0]


def test_no_bit_and_no_function_changes(job):
    assert job[1] == {"same": True, "kept": True}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("fused_bias_gelu.bias_gelu_impl", {"0", "1"}),
        ("fused_bias_swiglu.bias_swiglu_impl", {"0"}),
        ("fused_bias_dropout.bias_dropout_add_fused_train", {"0.0", "0.1"}),
        ("rope_utils.apply_rotary_pos_emb", {"0"}),
    ],
)
def test_each_has_its_inputs_outputs_and_their_gradients(job, name, inputs):
    rows = open_run(job[0]).rows().filter(f"op like '%{name}'").project("kind, io, path").fetchall()
    gradients = {(io, path) for kind, io, path in rows if kind == "gradient"}
    assert ("activation", "output", "") in rows
    assert gradients == {("output", ""), *(("input", path) for path in inputs)}
