"""Where a number belongs: rank coordinates, canonical names, shard specs.

The only part of the kit that asks Megatron where it stands. Sites take names and specs from here, the demo cuts
its weights by them, and the analysis merges shards with the very same specs read back from the rows.
"""
