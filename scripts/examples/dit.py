"""A diffusion transformer for video latents (of the kind of Latte and OpenSora) under DDP.

torchrun --nproc_per_node 2 scripts/examples/dit.py --probe probe.yaml
"""

from __future__ import annotations

import torch
from loop import run
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention over space, then over time, then an MLP; each shifted and scaled by the diffusion step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.spatial = nn.MultiheadAttention(width, heads, batch_first=True)
        self.temporal = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(3)])
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x: batch, frames, patches, width."""
        batch, frames, patches, width = x.shape
        changes = self.modulation(functional.silu(condition))[:, None, None].chunk(6, -1)
        y = (self.norms[0](x) * (1 + changes[0]) + changes[1]).reshape(batch * frames, patches, width)
        x = x + self.spatial(y, y, y, need_weights=False)[0].reshape(x.shape)
        y = (self.norms[1](x) * (1 + changes[2]) + changes[3]).transpose(1, 2).reshape(batch * patches, frames, width)
        y = self.temporal(y, y, y, need_weights=False)[0].reshape(batch, patches, frames, width)
        x = x + y.transpose(1, 2)
        return x + self.mlp(self.norms[2](x) * (1 + changes[4]) + changes[5])


class DiT(nn.Module):
    """Predicts the noise that was added to a latent video."""

    def __init__(self, channels: int = 4, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(channels * 4, width)
        self.step = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.noise = nn.Linear(width, channels * 4)

    def forward(self, latents: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """latents: batch, frames, patches, channels * 4."""
        x, condition = self.patches(latents), self.step(steps)
        for block in self.blocks:
            x = block(x, condition)
        return self.noise(x)


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Random latents and the noise that is to be found in them."""
    latents = torch.randn(2, 3, 8, 16, generator=generator, device=generator.device)
    noise = torch.randn(latents.shape, generator=generator, device=generator.device)
    steps = torch.randint(1000, (2,), generator=generator, device=generator.device)
    share = (steps / 1000)[:, None, None, None]
    return functional.mse_loss(model(latents * (1 - share) + noise * share, steps), noise)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(DiT(), loss_of)
