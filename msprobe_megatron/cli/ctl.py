"""`msprobe-megatron ctl`: tells a running job to record other steps, at another level, or to stop recording."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msprobe_megatron.commands import OK

HELP = "tell a running job what to record from now on"
EXAMPLE = "msprobe-megatron ctl probe_out --steps 200-202 --level mix"
_SWITCH = {"on": True, "off": False, None: None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory of the job")
    parser.add_argument("--steps", help="record these steps too, such as 200-202 or 300-900/100")
    parser.add_argument("--next", type=int, metavar="N", help="record the next N steps")
    parser.add_argument("--level", help="L0, L1 or mix: of these steps, or of all from now on")
    parser.add_argument("--dump", choices=("on", "off"), help="off: record nothing more; on: what the probe file asks")
    parser.add_argument("--monitor", choices=("on", "off"), help="switch the monitor")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.config.orders import parse_order
    from msprobe_megatron.record.control_file import write_order
    from msprobe_megatron.record.directory import RunDirectoryError

    asked = {
        "steps": arguments.steps,
        "next": arguments.next,
        "level": arguments.level,
        "dump": _SWITCH[arguments.dump],
        "monitor": _SWITCH[arguments.monitor],
    }
    order = parse_order({key: value for key, value in asked.items() if value is not None}, "ctl")
    path = Path(arguments.path)
    if not (path / "run.json").is_file():
        raise RunDirectoryError(f"{path}: holds no run; accepted: the output directory of a running job")
    written = write_order(path, order.as_dict())
    if arguments.json:
        print(json.dumps({"written": str(written), "order": order.as_dict()}))
    else:
        print(f"{written}: {order.describe()}; the job takes it up within two steps and says so")
    return OK
