"""Foreign file formats written without their libraries: PNG, TensorBoard events."""
