"""Training frameworks and launch recipes of others: adapters, launching, rehearsal without the accelerator."""
