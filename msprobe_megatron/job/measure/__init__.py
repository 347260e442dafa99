"""Tensors in, statistics out, and a cache of what was measured already in a step.

Pure: no configuration, no files, no Megatron. Called by the probes of features, which own the slots that results go to.
"""
