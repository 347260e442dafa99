"""Pairs of tensors brought to the same layout, element by element or by sketch."""
