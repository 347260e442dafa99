"""Norms."""

from . import fused_layer_norm  # noqa: F401
