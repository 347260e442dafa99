"""Reading the probe file must cost a job nothing but the file."""

import subprocess
import sys

PROGRAM = """
import sys
import msprobe_megatron.config.flags as arguments
import msprobe_megatron.config as config
heavy = {"torch", "megatron", "numpy", "pyarrow", "duckdb", "rich"}
config.from_document({"dump": {"layers": "0-3"}}, "here")
arguments.from_command_line([], {})
print(sorted(heavy & set(sys.modules)), "yaml" in sys.modules)
"""


def test_no_heavy_imports():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False"


def test_public_names():
    import msprobe_megatron.config as config

    planned = {
        "ConfigError",
        "ProbeConfig",
        "RankSelection",
        "StepSelection",
        "DumpConfig",
        "Limits",
        "Overrides",
    }
    assert planned | {"load", "describe"} <= set(config.__all__)
    for name in config.__all__:
        assert getattr(config, name) is not None
