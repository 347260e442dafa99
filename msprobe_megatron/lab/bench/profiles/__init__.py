"""Where time and memory go, and which targets are met."""
