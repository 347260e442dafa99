"""Stands in for Apex, which Megatron-LM before 0.8 imports unconditionally: the same arithmetic in plain torch."""

from . import multi_tensor_apply, normalization, optimizers  # noqa: F401
