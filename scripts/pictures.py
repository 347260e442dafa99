"""Draws the pictures of the README from real runs: the terminal's own output as SVG.

python scripts/pictures.py quickstart_out/run_001/tp2pp2 docs/images
"""

import re
import sys
from pathlib import Path

from rich.console import Console

from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.report.terminal.tables import print_summary


def main(run: str, folder: str) -> None:
    """Write summary.svg into `folder`."""
    console = Console(record=True, width=100, file=Path("/dev/null").open("w"), force_terminal=True)  # noqa: SIM115
    print_summary(summarise(open_run(run)), console)
    svg = console.export_svg(title="msprobe-megatron summary quickstart_out/run_001/tp2pp2")
    # No picture may ask the network for a font.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S).replace("Fira Code", "monospace")
    Path(folder, "summary.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
