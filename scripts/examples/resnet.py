"""A small ResNet under DDP.

torchrun --nproc_per_node 2 scripts/examples/resnet.py --probe probe.yaml
"""

from __future__ import annotations

import torch
from loop import run
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the convolutions find to the input."""
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.stages = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2))
        self.head = nn.Linear(32, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Score the classes of a batch of images."""
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Random images, random classes."""
    images = torch.randn(4, 3, 16, 16, generator=generator, device=generator.device)
    classes = torch.randint(10, (4,), generator=generator, device=generator.device)
    return functional.cross_entropy(model(images), classes)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(ResNet(), loss_of)
