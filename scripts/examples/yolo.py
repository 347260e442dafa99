"""A detector of the YOLO kind under DDP: a backbone, heads at two scales, a tuple of outputs.

torchrun --nproc_per_node 2 scripts/examples/yolo.py --probe probe.yaml
"""

from __future__ import annotations

import torch
from loop import run
from torch import nn
from torch.nn import functional


def convolution(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Convolution, norm and SiLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU())


class Detector(nn.Module):
    """Predicts box, objectness and class of every cell at strides 4 and 8."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.backbone = nn.Sequential(convolution(3, 8, 2), convolution(8, 16, 2))
        self.deeper = convolution(16, 32, 2)
        self.lateral = nn.Conv2d(32, 16, 1)
        self.heads = nn.ModuleList([nn.Conv2d(16, 5 + classes, 1), nn.Conv2d(32, 5 + classes, 1)])

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps of the fine and of the coarse scale."""
        fine = self.backbone(images)
        coarse = self.deeper(fine)
        fine = fine + functional.interpolate(self.lateral(coarse), scale_factor=2)
        return self.heads[0](fine), self.heads[1](coarse)


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Random images; boxes by squared error, objectness and classes by cross entropy."""
    images = torch.randn(2, 3, 32, 32, generator=generator, device=generator.device)
    total = images.new_zeros(())
    for scale in model(images):
        target = torch.rand(scale.shape, generator=generator, device=generator.device)
        total = total + functional.mse_loss(scale[:, :4].sigmoid(), target[:, :4])
        total = total + functional.binary_cross_entropy_with_logits(scale[:, 4:], target[:, 4:].round())
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    run(Detector(), loss_of)
