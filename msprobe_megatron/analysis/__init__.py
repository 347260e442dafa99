"""Questions about run directories: load, merge shards, summarise. Reads files only, never a live model."""
