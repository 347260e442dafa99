"""API calls: the torch function mode, their names and arguments; calls that can be run again."""
