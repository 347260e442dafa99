"""Tensors in, figures out: statistics of a tensor, and the memory of what was measured already.

Pure: no configuration, no files, no Megatron. Called by ``probes``, which own the slots that figures go to.
"""
