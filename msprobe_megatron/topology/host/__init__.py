"""The host framework: its versions, arguments and random generators, and what cannot be observed in it."""
