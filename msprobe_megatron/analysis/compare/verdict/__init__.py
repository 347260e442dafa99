"""From differences to a verdict: tolerances, causal order, causes, hints."""
