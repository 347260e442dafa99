"""Checkpoints of Megatron as whole tensors under canonical names, whatever layout and format they were written in.

Reads files only: no Megatron and no process group. Nothing that a checkpoint holds is ever run (see `plain_pickle`,
`safe_load`).
"""
