"""`msprobe-megatron ctl`: changes which steps a running job records, and at which level."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msprobe_megatron.cli.commands import OK

HELP = "change what a running job records"
EXAMPLE = "msprobe-megatron ctl probe_out --steps 200-202 --level mix"
_SWITCH = {"on": True, "off": False, None: None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory of the job")
    parser.add_argument("--steps", help="record these steps too, such as 200-202 or 300-900/100")
    parser.add_argument("--next", type=int, metavar="N", help="record the next N steps")
    parser.add_argument("--level", help="L0, L1 or mix: of these steps, or of all from now on")
    parser.add_argument("--dump", choices=("on", "off"), help="off: stop recording; on: back to the probe file")
    parser.add_argument("--monitor", choices=("on", "off"), help="switch the monitor on or off")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.config.control_orders import parse_order
    from msprobe_megatron.run_directory.control_file import write_order
    from msprobe_megatron.run_directory.directory import RunDirectoryError

    requested = {
        "steps": arguments.steps,
        "next": arguments.next,
        "level": arguments.level,
        "dump": _SWITCH[arguments.dump],
        "monitor": _SWITCH[arguments.monitor],
    }
    order = parse_order({key: value for key, value in requested.items() if value is not None}, "ctl")
    path = Path(arguments.path)
    if not (path / "run.json").is_file():
        raise RunDirectoryError(f"{path}: holds no run; accepted: the output directory of a running job")
    ranks = open_run(path).ranks
    if ranks and all(facts.get("closed") for facts in ranks.values()):
        raise RunDirectoryError(f"{path}: the job has ended; nothing reads an order; accepted: a running job")
    written = write_order(path, order.as_dict())
    if arguments.json:
        print(json.dumps({"written": str(written), "order": order.as_dict()}))
    else:
        print(f"{written}: {order.describe()}; the job applies it within two steps and logs it")
    return OK
