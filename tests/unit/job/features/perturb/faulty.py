"""A small model of four blocks, some of whose operators can be replaced by faulty ones, and a job that trains it.

Operators are torch.library ones (seen as one call) or Python (seen as the calls they make). Faults are those of real
kernels: wrong in the dtype that training runs in, right in the next one, unless the fault is in the code itself.
"""

import json
import math

import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document

LAYER = 2
_calls = {"n": 0}


def _op(name, forward, backward):
    """An operator of one tensor, with its derivative."""

    @torch.library.custom_op(f"faults::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return forward(x)

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    def gradient(ctx, given):
        x, y = ctx.saved_tensors
        return backward(x, y, given)

    op.register_autograd(gradient, setup_context=save)
    return getattr(torch.ops.faults, name)


def _raw_softmax(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def _softmax_backward(x, y, g):
    return y * (g - (y * g).sum(-1, keepdim=True))


def _gelu(x):
    return F.gelu(x)


def _gelu_backward(x, y, g):
    wide = x.double()
    density = (-0.5 * wide * wide).exp() / math.sqrt(2 * math.pi)
    return g * (0.5 * (1 + torch.erf(wide / math.sqrt(2))) + wide * density).to(x.dtype)


def _in_low_precision(change):
    """The healthy gelu, with `change` made to its result in the dtype of training (32 bits and below)."""

    def forward(x):
        y = _gelu(x)
        return y if x.dtype is torch.float64 else change(y)

    return forward


def _another_each_time(y):
    _calls["n"] += 1
    return y + y * 2e-3 * (_calls["n"] % 3)


def _first_element(y):
    y.view(-1)[0] += 1.0
    return y


def _one_nan(y):
    y.view(-1)[y.numel() // 3] = torch.nan
    return y


softmax_raw = _op("softmax_raw", _raw_softmax, _softmax_backward)
gelu_unsteady = _op("gelu_unsteady", _in_low_precision(_another_each_time), _gelu_backward)
gelu_first = _op("gelu_first", _in_low_precision(_first_element), _gelu_backward)
gelu_nan = _op("gelu_nan", _in_low_precision(_one_nan), _gelu_backward)


@torch.library.custom_op("faults::linear_low", mutates_args=())
def _linear_low(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for k in range(x.shape[-1]):
        total += x[..., k : k + 1] * weight[:, k]
    return total


_linear_low.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.flatten(0, -2).t() @ ctx.saved_tensors[0].flatten(0, -2)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
linear_low = torch.ops.faults.linear_low


def wrong_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.85 * x * (1 + 0.044715 * x * x)))


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))


class DifferenceNorm(nn.Module):
    """A layer norm whose variance is E[x²] - E[x]²."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance.clamp(min=0) + 1e-5) * self.weight


class TwoPassNorm(DifferenceNorm):
    """The same, as it should be."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, size, **parts):
        super().__init__()
        self.norm = parts.get("norm", TwoPassNorm)(size)
        self.fc1 = nn.Parameter(torch.randn(4 * size, size) / size**0.5)
        self.fc2 = nn.Parameter(torch.randn(size, 4 * size) / (4 * size) ** 0.5)
        self.linear = parts.get("linear", F.linear)
        self.act = parts.get("act", F.gelu)
        self.softmax = parts.get("softmax", lambda x: torch.softmax(x, -1))
        self.logits = parts.get("logits", 1.0)
        self.offset = parts.get("offset", 0.0)

    def forward(self, x):
        y = self.norm(x + self.offset)
        y = F.linear(self.act(self.linear(y, self.fc1)), self.fc2)
        return x + y + self.softmax(y * self.logits)


class Model(nn.Module):
    def __init__(self, dtype, everywhere=None, **fault):
        super().__init__()
        torch.manual_seed(3)
        everywhere = everywhere or {}
        self.layers = nn.ModuleList(Block(32, **everywhere, **(fault if i == LAYER else {})) for i in range(4))
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(model, section=None, out=None, steps=2):
    """Losses of a few steps, and the session if a perturb section was given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = None
    if section is not None:
        config = from_document({"strict": True, "perturb": section}, "test", Overrides(output=str(out)))
        session = attach(model, optimizer, config)
    torch.manual_seed(11)
    x = torch.randn(16, 2, 32).to(next(model.parameters()).dtype)
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


def found(out):
    """(verdict, name) of everything that was not ok, and how many rows there are."""
    rows = [row for file in sorted(out.glob("perturb/rank_*/*.parquet")) for row in pq.read_table(file).to_pylist()]
    words = [(json.loads(row["extra"])["verdict"], row["name"]) for row in rows]
    return sorted({word for word in words if word[0] != "ok"}), len(rows)
