"""Hooks on modules: inputs, outputs and their gradients."""
