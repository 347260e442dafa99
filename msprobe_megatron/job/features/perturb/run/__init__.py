"""Running an operator again: exactly, with noise, or as its high-precision twin."""
