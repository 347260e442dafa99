"""Stands in for TransformerEngine, which Megatron-LM before 0.8 imports even where it is not used: its norms work."""

from . import common as common
from . import pytorch as pytorch
