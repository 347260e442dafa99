"""Models whose calls are of every kind that the site of API calls has to tell apart. Each takes and gives 4 x 4."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.job.sites.functions import Double


class Marked(torch.Tensor):
    """A tensor of another class, as some libraries have them."""


class Nested(torch.autograd.Function):
    """Calls torch inside, takes what it does not need, and keeps something where an accumulator has its leaf."""

    @staticmethod
    def forward(ctx, x, scale, unused=None):
        ctx.scale, ctx.variable = scale, x
        return torch.relu(x) * scale, x.sum()

    @staticmethod
    def backward(ctx, gradient, total):
        return gradient * ctx.scale + total, None, None


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise ValueError("not today")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def in_place(net, x):
    y = x * 1
    y.add_(2)
    y.mul_(net.weight)
    y[0].mul_(2)
    y[1] = x[2]
    y.view(-1).add_(1)
    return F.relu(y, inplace=True)


def by_keyword(net, x):
    y = torch.add(input=x, other=net.weight, alpha=2)
    y = F.layer_norm(y, normalized_shape=(4,), weight=net.weight[0], bias=None)
    return torch.softmax(input=y, dim=-1) + torch.mul(x, other=torch.ones(4, 4), out=None)


def views(net, x):
    y = x.t().contiguous().view(2, 8).transpose(0, 1).reshape(4, 4)
    return y.unsqueeze(0).expand(2, 4, 4)[0].contiguous() + x[::2].repeat(2, 1)


def lists(net, x):
    y = torch.cat([x, net.weight, x], 0) + torch.cat((x, x, x))
    y = torch.stack([y, y * 2]).sum(0) + torch.cat(tensors=[x] * 3, dim=0)
    y = torch.einsum("ij,jk->ik", y, x) + torch.block_diag(x)[:1]
    return y + sum(torch.meshgrid(x[0], x[1], indexing="ij")).sum()


def tuples(net, x):
    a, b = torch.split(x, 2)
    top = torch.topk(x, 2, dim=1)
    most = torch.max(x, dim=0)
    parts = torch.cat([x] * 5).unbind(0)
    mean, var = torch.var_mean(x, dim=1, keepdim=True)
    return (a @ b.t()).sum() + top.values.sum() + most[0].sum() + parts[17].sum() + (mean * var).sum() + x.argmax()


def used_twice(net, x):
    y = torch.mul(x, x) + torch.add(net.weight, net.weight)
    y = torch.addmm(y, y, y) + torch.cat([y, y])[:4]
    return torch.baddbmm(y[None], y[None], y[None])[0]


def unread(net, x):
    y = torch.baddbmm(torch.full((1, 4, 4), float("nan")), x[None], x[None], beta=0)[0] + torch.empty(4, 4).copy_(x)
    with torch.no_grad():
        torch.topk(x, 2, dim=1, out=(torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)))
        torch.add(x, 1, out=torch.empty(4, 4))
    return torch.addmm(input=y, mat1=x, mat2=x, beta=0.0) + torch.addmm(y, x, x, beta=0.5)


def with_dropout(net, x):
    batch = x[None]
    return F.dropout(x, 0.5) + F.scaled_dot_product_attention(batch, batch, batch, dropout_p=0.3)


def functions(net, x):
    y, total = Nested.apply(Double.apply(x * 2), 3.0, None)
    with contextlib.suppress(ValueError):
        Refusing.apply(y)
    return net.linear(y) * total


def refused(net, x):
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.matmul(x, torch.ones(3, 3))
        with contextlib.suppress(TypeError):
            x.add("one")
    return x @ x


def of_another_class(net, x):
    y = torch.add(x.as_subclass(Marked), 1).relu()
    return torch.cat([y, x]).as_subclass(torch.Tensor) + nn.Parameter(torch.ones(4))


def without_gradients(net, x):
    with torch.no_grad():
        y = net.linear(x) * 2
    with torch.inference_mode():
        z = net.linear(torch.ones(4, 4)) + 1
    return x.detach().exp() + y + torch.tensor(z.tolist()) + x * 3


def repeated(net, x):
    def part(x):
        return net.inner(F.silu(net.linear(x)))

    y = checkpoint(part, x, use_reentrant=False)
    return checkpoint(net.inner, checkpoint(net.linear, y * 1, use_reentrant=True), use_reentrant=False)


def hooked(net, x):
    """Hooks of others stand before, between and behind those of calls that give back what they were given."""
    y = x * 2
    y.grad_fn.register_hook(lambda inner, outer: (inner[0] * 3, None))
    y = y.contiguous().contiguous()
    y.grad_fn.register_hook(lambda inner, outer: (inner[0] + 1, None))
    z = y.contiguous() + 1
    z.register_hook(lambda gradient: gradient * 2)
    z = z.contiguous()
    z.grad_fn.register_hook(lambda inner, outer: tuple(one * 2 if one is not None else None for one in inner))
    return z.contiguous().mul(2).contiguous()


def kinds(net, x):
    """Integers, booleans, 0-d, empty, complex; more arguments than have a number of their own; results written to."""
    y = torch.where(x > 0, x, torch.zeros(()))
    many = torch.cartesian_prod(*[torch.tensor([float(n)]) for n in range(18)])
    z = torch.zeros(4, 4)
    torch.mul(torch.ones(4, 4), 2, out=z)
    empty = torch.zeros(0, 4) + 1
    turned = torch.fft.fft(x.to(torch.complex64)).abs().to(torch.float32)
    return y.to(torch.bfloat16).float() + many.sum() + z + empty.sum() + turned + (x.long() == 0).sum()


def nested_modules(net, x):
    return net.inner(net.linear(net.inner(x)) + net.linear(x)) + torch._C._nn.gelu(x)


SCENARIOS = [
    *(in_place, by_keyword, views, lists, tuples, used_twice, with_dropout, functions, refused, of_another_class),
    *(without_gradients, repeated, hooked, kinds, nested_modules, unread),
]


class Net(nn.Module):
    def __init__(self, scenario):
        super().__init__()
        self.scenario, self.linear, self.inner = scenario, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.weight = nn.Parameter(torch.linspace(-1, 2, 16).reshape(4, 4))

    def forward(self, x):
        return self.scenario(self, x)
