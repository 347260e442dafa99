"""Comparing two runs: match rows, merge shards, judge, order by cause."""
