"""Apex's fused LayerNorm as torch's own."""

from torch.nn import functional


class FusedLayerNormAffineFunction:
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        """Megatron looks at the names of these parameters."""

    @staticmethod
    def apply(x, weight, bias, shape, eps, *_):
        return functional.layer_norm(x, tuple(shape), weight, bias, eps)
