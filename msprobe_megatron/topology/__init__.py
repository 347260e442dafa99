"""Where a tensor belongs: rank coordinates, canonical names, shard specs.

The only room that reads Megatron's parallel state. Sites take names and specs from here, the demo shards its weights
with them, and the analysis merges shards with the same specs, read back from the rows.
"""
