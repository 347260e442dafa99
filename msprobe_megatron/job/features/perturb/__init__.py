"""Probe: perturb (the free benchmark). Runs operators again, changed or at higher precision, and judges the change."""
