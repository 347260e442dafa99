"""One file a command of ``msprobe-megatron``: HELP, EXAMPLE, `add_arguments` and `run`.

They read arguments, call `analyse` and hand its findings to `report`. What they need is imported when they run.
"""

COMMANDS = (
    "demo",
    "validate",
    "ctl",
    "patches",
    "summary",
    "compare",
    "report",
    "export",
    "diagnose",
    "watch",
    "scaling",
    "env-diff",
    "ckpt-diff",
    "import",
    "bench",
)

# Commands whose name is not one for a Python file.
MODULES = {"import": "import_dump"}

OK, FOUND, CANNOT = 0, 1, 2
