"""Apex's fused optimizers by the names of torch's."""

from typing import Any

import torch


class FusedAdam(torch.optim.AdamW):
    """AdamW; what only the fused one knows is passed over."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD(torch.optim.SGD):
    """torch's own."""
