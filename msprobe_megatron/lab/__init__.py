"""A small Megatron job of our own, and the benchmarks that run on it."""
