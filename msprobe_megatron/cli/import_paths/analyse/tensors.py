"""``msprobe_megatron.analyse.tensors``: re-export."""

from msprobe_megatron.analysis.load.saved_tensors import SavedTensor, read_tensor

__all__ = ["SavedTensor", "read_tensor"]
