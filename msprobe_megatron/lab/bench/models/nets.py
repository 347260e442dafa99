"""A ResNet and a DiT in plain torch for the benches, and the loop that trains them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from msprobe_megatron.lab.bench.clockwork.turns import Progress, Result, Turns, Variants, Workload


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the convolutions find to the input."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four residual blocks and a classifier; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.Sequential(*(_Residual(a, b, s) for a, b, s in ((32, 32, 1), (32, 64, 2), (64, 128, 2))))
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Loss of a batch."""
        return functional.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), classes)


class _Diffusing(nn.Module):
    """Attention and an MLP, shifted and scaled by the diffusion step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """One block; x is (batch, patches, width)."""
        shift, scale, shift2, scale2 = self.modulation(functional.silu(condition))[:, None].chunk(4, -1)
        q, k, v = self.qkv(self.norms[0](x) * (1 + scale) + shift).chunk(3, -1)
        weights = functional.softmax(torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5, -1)
        x = x + self.out(torch.matmul(weights, v))
        change: torch.Tensor = self.mlp(self.norms[1](x) * (1 + scale2) + shift2)
        return x + change


class DiT(nn.Module):
    """A small diffusion transformer; returns the loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches, self.noise = nn.Linear(16, width), nn.Linear(width, 16)
        self.step = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList([_Diffusing(width) for _ in range(3)])

    def forward(self, latents: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Loss of predicting the latents."""
        x, condition = self.patches(latents), self.step(steps)
        for block in self.blocks:
            x = block(x, condition)
        return functional.mse_loss(self.noise(x), latents)


def _resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return ResNet(), (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def _dit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return DiT(), (torch.randn(4, 64, 16), torch.randint(1000, (4,)))


NETS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {"resnet": _resnet, "dit": _dit}


def measure_net(workload: Workload, variants: Variants, out: Path, progress: Progress) -> list[Result]:
    """Train the net that the workload is named after and return a line for each variant."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, batch = NETS[workload.name]()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    turns = Turns(workload, variants, out, progress)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            turns.ready([model], optimizer)
            for _ in range(turns.iterations):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                turns.after_step()
    finally:
        torch.set_num_threads(threads)
    return turns.results()
