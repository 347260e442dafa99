"""The commands of ``msprobe-megatron``, one file each: HELP, EXAMPLE, `add_arguments` and `run`.

A command parses its arguments, calls `analysis` and passes the result to `report`; it imports them only when it runs.
"""

# As `--help` lists them: by what a user is about to do.
GROUPS: dict[str, tuple[str, ...]] = {
    "start": ("demo", "init", "validate", "launch", "overlays"),
    "while the job runs": ("watch", "ctl"),
    "what happened": ("summary", "diagnose", "compare", "report", "scaling"),
    "what differs": ("env-diff", "ckpt-diff", "logprobs", "weights"),
    "other tools": ("export", "import", "record-hf"),
    "about the kit": ("docs", "patches", "bench", "completion"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

# Commands whose name is not one for a Python file.
MODULES = {"import": "import_dump"}

OK, FOUND, CANNOT = 0, 1, 2
