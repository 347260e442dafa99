"""Stands in for Apex, which Megatron-LM before 0.8 imports unconditionally: the same arithmetic in plain torch."""
