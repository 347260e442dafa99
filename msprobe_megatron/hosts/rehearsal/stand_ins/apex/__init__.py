"""Stands in for Apex, which Megatron-LM before 0.8 imports unconditionally: the same arithmetic in plain torch."""

from . import multi_tensor_apply as multi_tensor_apply
from . import normalization as normalization
from . import optimizers as optimizers
