"""A small, honest GPT pretraining job on megatron.core alone, for the demo, the tests and the benchmarks.

It stands where a user's own training script stands: outside the data path, knowing the kit only through its
flags and `attach`. Weights and data do not depend on the layout, so two runs of one command over different
layouts are the same computation.
"""
