"""One file per table that `msprobe-megatron bench` prints."""
