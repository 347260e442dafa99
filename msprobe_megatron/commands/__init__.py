"""One file a command of ``msprobe-megatron``: HELP, EXAMPLE, `add_arguments` and `run`.

They read arguments, call `analyse` and hand its findings to `report`. What they need is imported when they run.
"""

COMMANDS = ("demo", "validate", "patches", "summary", "compare")

OK, FOUND, CANNOT = 0, 1, 2
