"""Opening run directories: validated rows, monitor files, saved tensors, live runs."""
