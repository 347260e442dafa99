"""Norms."""

from . import fused_layer_norm as fused_layer_norm
