"""msprobe's own configuration files and debugger arguments, translated into a probe file."""
