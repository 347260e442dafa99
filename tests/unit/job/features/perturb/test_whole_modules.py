"""Modules held against a float64 reference: casts, replaced forwards and other formulas are found, and named."""

import functools
import json

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked
from tests.unit.job.features.perturb.faulty import found

LAYER = 2
WIDE = "--init-method-std 0.3 --attention-softmax-in-fp32"
GELU = "--swiglu", "--normalization RMSNorm"


# The faults. Each is planted in one layer before the kit is attached, in an ordinary bf16 job.


def _bf16_softmax(layer):
    """Exponentials, their sum and the quotient in 16 bits."""
    module = layer.self_attention.core_attention.scale_mask_softmax

    def forward(scores, mask, softmax_offset=None):
        sq = scores.shape[2]
        mask = torch.ones(sq, sq, dtype=torch.bool).triu(1) if mask is None else mask
        scores = scores.masked_fill(mask, -10000.0)
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)

    module.forward = forward


def _bf16_rms_norm(layer):
    """A replaced forward that never leaves 16 bits."""
    norm = layer.input_layernorm

    def forward(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight

    norm.forward = forward


def _two_roundings_rms_norm(layer):
    """Healthy: the statistics in 32 bits, and the weight applied after the cast, as many models do."""
    norm = layer.input_layernorm

    def forward(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).type_as(x) * norm.weight

    norm.forward = forward


def _bf16_router(layer):
    """Logits in 16 bits, cast afterwards."""
    router = layer.mlp.router
    router.gating = lambda x: F.linear(x, router.weight, router.bias).float()


def _bf16_cross_entropy(layer):
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(
        lambda logits: ((copy := logits.clone()), torch.max(copy, dim=-1)[0])
    )


def _tanh_gelu(layer):
    layer.mlp.activation_func = functools.partial(F.gelu, approximate="tanh")


def _exchanged(layer):
    """Queries and keys in each other's place: every sum and every shape is as it was."""
    core = layer.self_attention.core_attention
    forward = core.forward
    core.forward = lambda query, key, *args, **kwargs: forward(key, query, *args, **kwargs)


def _future(layer):
    """One head sees the tokens that come later, behind a mask that is right."""
    core = layer.self_attention.core_attention
    forward = core.forward

    def seeing(query, key, value, mask, *args, **kwargs):
        right = forward(query, key, value, mask, *args, **kwargs)
        seen = forward(query, key, value, torch.zeros_like(mask), *args, **kwargs)
        width = value.shape[-1]
        return torch.cat([right[..., :width], seen[..., width : 2 * width], right[..., 2 * width :]], -1)

    core.forward = seeing


def _other_group(layer):
    """Heads are given keys and values of the other group."""
    core = layer.self_attention.core_attention
    forward = core.forward
    core.forward = lambda query, key, value, *args, **kwargs: forward(
        query, key.flip(2), value.flip(2), *args, **kwargs
    )


def _train(argv, plant):
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks
    from msprobe_megatron.topology.names import unwrap

    def ready(chunks, optimizer):
        model = unwrap(chunks[0])
        model.config.moe_router_dtype = "fp32" if "fp32-router" in plant else None
        plants = {**HARMLESS, **{name: fault for name, (fault, *_) in FAULTS.items()}}
        if plant in plants:
            plants[plant](model.decoder.layers[LAYER])

    return run(argv, Callbacks(ready=ready)).losses


FAULTS = {
    "softmax": (_bf16_softmax, "single", "self_attention.core_attention.scale_mask_softmax", "softmax"),
    "norm": (_bf16_rms_norm, "single", "input_layernorm", "norm"),
    "router:fp32-router": (_bf16_router, "moe", "mlp.router", "router"),
    "loss": (_bf16_cross_entropy, "single", None, "loss"),
    "loss of two ranks": (_bf16_cross_entropy, "tp2", None, "loss"),
    "exchanged": (_exchanged, "single", "self_attention.core_attention", "attention"),
    "future": (_future, "tp2", "self_attention.core_attention", "attention"),
    "groups": (_other_group, "single", "self_attention.core_attention", "attention"),
    "gelu": (_tanh_gelu, "single", "mlp", "mlp"),
}
HARMLESS = {"rounds twice": _two_roundings_rms_norm}


def run_gpt(tmp_path, layout, plant, *more, steps=2, section="{budget: all}"):
    (tmp_path / "probe.yaml").write_text(f"strict: true\nperturb: {section}\n")
    flags = " ".join(flags_of(layout, dropout=False))
    if plant.startswith("gelu"):
        for flag in GELU:
            flags = flags.replace(flag, "")
    argv = [*flags.split(), *WIDE.split(), "--train-iters", str(steps), "--global-batch-size", "2", *more]
    argv += ["--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out")]
    run_forked(LAYOUTS[layout].world, _train, argv, plant, timeout=120)
    return tmp_path / "out"


def rows_of(out):
    files = sorted(out.glob("perturb/rank_*/*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [{**row, **json.loads(row["extra"])} for row in rows]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_inside_a_module_is_found_and_named(tmp_path, plant):
    _, layout, where, kind = FAULTS[plant]
    more = ("--group-query-attention", "--num-query-groups", "2") if plant == "groups" else ()
    out = run_gpt(tmp_path, layout, plant, "--bf16", *more)
    name = "model" if where is None else f"decoder.layers.{LAYER}.{where}"
    wrong = {(row["name"], row["class"]) for row in rows_of(out) if row["verdict"] != "ok" and row["class"] == kind}
    assert wrong == {(name, kind)}, found(out)[0]
    others = [word for word in found(out)[0] if not word[1].startswith(name)]
    assert not others, "the other layers are healthy"


@pytest.mark.parametrize("plant", ["none", "none:fp32-router"])
def test_a_healthy_router_and_softmax_are_silent(tmp_path, plant):
    out = run_gpt(tmp_path, "moe", plant, "--bf16", steps=4)
    assert found(out)[0] == []
    kinds = {row["class"] for row in rows_of(out)}
    assert {"norm", "softmax", "attention", "router", "mlp", "loss"} <= kinds


# layout, flags, dtype: GPT with layer norms and GELU, llama-style, experts.
HEALTHY = [
    (layout, plant, dtype)
    for dtype in ("--bf16", "--fp16", "")
    for layout, plant in (("single", "gelu-none"), ("single", "none"), ("moe", "none:fp32-router"), ("moe", "none"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "plant", "dtype"), HEALTHY)
def test_healthy_nets_are_silent_over_20_steps(tmp_path, layout, plant, dtype):
    out = run_gpt(tmp_path, layout, plant, *dtype.split(), steps=20)
    assert found(out)[0] == []
    rows = [row for row in rows_of(out) if "/" not in row["name"] and row["class"] != "module"]
    assert len(rows) > 20 * 14
    assert {row["step"] for row in rows} == set(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "cp2", "ep2", "recompute"])
def test_healthy_layouts_are_silent(tmp_path, layout):
    out = run_gpt(tmp_path, layout, "none", "--bf16", "--global-batch-size", "4", steps=8)
    assert found(out)[0] == []


def test_a_norm_that_rounds_twice_is_healthy(tmp_path):
    out = run_gpt(tmp_path, "single", "rounds twice", "--bf16", steps=6)
    assert found(out)[0] == []


# A net that is not Megatron's.


class OnePass:
    """The forward of a layer norm with E[x²] - E[x]²."""

    def __init__(self, norm):
        self._norm = norm

    def __call__(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
        return (x - mean) * torch.rsqrt(variance + self._norm.eps) * self._norm.weight + self._norm.bias


class Net(nn.Module):
    def __init__(self, dtype, offset=0.0):
        super().__init__()
        torch.manual_seed(5)
        self.offset = offset
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(48),
                    "fc1": nn.Linear(48, 96),
                    "act": nn.GELU(),
                    "fc2": nn.Linear(96, 48),
                }
            )
            for _ in range(3)
        )
        for layer in self.layers:
            nn.init.normal_(layer["fc1"].weight, std=0.3)
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["fc2"](layer["act"](layer["fc1"](layer["norm"](x + self.offset))))
        return x


def train_net(model, out=None, steps=2, section=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    document = {"strict": True, "perturb": section or {"budget": "all"}}
    session = attach(model, optimizer, from_document(document, "test", Overrides(output=str(out)))) if out else None
    torch.manual_seed(6)
    x = torch.randn(40, 2, 48).to(next(model.parameters()).dtype)
    losses = []
    for _ in range(steps):
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if session is not None:
        session.close()
        assert not session.faults
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replaced_forward_with_a_one_pass_variance(tmp_path, dtype):
    """A class of torch.nn whose forward is replaced is judged by its inputs and outputs."""
    model = Net(dtype, offset=300.0)
    model.layers[1]["norm"].forward = OnePass(model.layers[1]["norm"])
    train_net(model, tmp_path / "out", steps=1)
    assert found(tmp_path / "out")[0] == [("wrong", "layers.1.norm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0.0, pytest.param(300.0, marks=pytest.mark.slow)])
def test_a_healthy_net_of_another_kind(tmp_path, dtype, offset):
    train_net(Net(dtype, offset), tmp_path / "out", steps=20)
    assert found(tmp_path / "out")[0] == []
    kinds = [row["class"] for row in rows_of(tmp_path / "out")]
    assert kinds.count("activation") == kinds.count("norm") - 60 == 60  # F.layer_norm is a call of class norm too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tanh_form_in_a_module_of_the_exact_one(tmp_path, dtype):
    model = Net(dtype)
    model.layers[1]["act"].forward = functools.partial(F.gelu, approximate="tanh")
    train_net(model, tmp_path / "out")
    assert found(tmp_path / "out")[0] == [("wrong", "layers.1.act")]


def test_another_form_in_one_layer_than_in_the_others(tmp_path):
    """Without a setting that declares a form, the layers are compared with each other."""

    class Layer(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.fc, self.form = nn.Linear(8, 8), form

        def forward(self, x):
            return F.gelu(self.fc(x)) if self.form is None else F.gelu(self.fc(x), approximate=self.form)

    for form, expected in (("tanh", [("odd", "layers.2/torch.nn.functional.gelu.0")]), ("none", [])):
        model = nn.Module()
        model.layers = nn.ModuleList(Layer(form if i == 2 else None) for i in range(5))
        model.forward = lambda x, model=model: functools.reduce(lambda y, layer: layer(y), model.layers, x)
        out = tmp_path / form
        session = attach(model, None, from_document({"perturb": {}}, "test", Overrides(output=str(out))))
        for _ in range(2):
            model(torch.randn(4, 8))
            session.step()
        session.close()
        assert found(out)[0] == expected


def test_training_does_not_change(tmp_path):
    """Replaced forwards are called once per forward, and stay in place."""
    model, other = Net(torch.bfloat16), Net(torch.bfloat16)
    calls = []
    for each in (model, other):
        norm = each.layers[0]["norm"]
        norm.forward = lambda x, norm=norm: calls.append(1) or F.layer_norm(x, (48,), norm.weight, norm.bias, norm.eps)
    plain = train_net(model)
    once = len(calls)
    assert train_net(other, tmp_path / "out") == plain
    assert len(calls) == 2 * once
    assert all(same(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert "forward" in vars(other.layers[0]["norm"])


@pytest.mark.parametrize("layout", ["single", pytest.param("tp2", marks=pytest.mark.slow)])
def test_training_of_a_bf16_gpt_does_not_change(tmp_path, layout):
    (tmp_path / "probe.yaml").write_text("strict: true\nperturb: {budget: all}\n")
    argv = [*flags_of(layout, dropout=True), "--bf16", "--attention-softmax-in-fp32"]
    probed = [*argv, "--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out")]
    world = LAYOUTS[layout].world
    runs = run_forked(world, train_and_keep, argv), run_forked(world, train_and_keep, probed)
    for left, right in zip(*runs, strict=True):
        for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
            assert same(left[what], right[what]), what
    assert {"norm", "softmax", "mlp", "loss"} <= {row["class"] for row in rows_of(tmp_path / "out")}


def test_fix_gives_a_replaced_forward_back(tmp_path):
    model = Net(torch.float32)
    norm = model.layers[1]["norm"]
    own = norm.forward = OnePass(norm)
    train_net(model, tmp_path / "out", steps=1, section={"handler": "fix", "modules": ["norm"]})
    assert vars(norm)["forward"] is own
    assert "forward" not in vars(model.layers[0]["norm"])
