"""The run directory: schema, layout, atomic writes. Written by the job, read by the analysis."""
