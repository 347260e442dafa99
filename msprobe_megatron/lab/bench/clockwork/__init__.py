"""How a bench measures: interleaved turns, paired steps, processes, memory, the machine."""
