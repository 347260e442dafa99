"""Section `dump`: every tensor of the requested steps as a row."""
