"""Which calls are examined, how much of them, and which may be run again at all."""
