"""What the kit costs: the demo model trained with and without it, all variants interleaved in one process."""
