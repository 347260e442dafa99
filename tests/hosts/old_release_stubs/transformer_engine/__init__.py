"""Stands in for TransformerEngine, which Megatron-LM before 0.8 imports even where it is not used: its norms work."""

from transformer_engine import common as common
from transformer_engine import pytorch as pytorch
