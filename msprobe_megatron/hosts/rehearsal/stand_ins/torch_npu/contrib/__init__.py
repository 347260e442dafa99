"""Holds transfer_to_npu."""
