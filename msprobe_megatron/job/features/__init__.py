"""One folder per section of the probe file: what is observed, when, and what is done with it."""
