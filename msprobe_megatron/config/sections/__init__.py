"""One file per section of the probe file: fields, defaults, reader, meaning, example."""
