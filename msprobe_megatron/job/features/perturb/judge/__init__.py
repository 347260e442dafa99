"""What the difference between two runs of an operator means."""
