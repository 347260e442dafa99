"""The table of hosts in docs/hosts/megatron_lm.md, made by running tests/hosts on checkouts of Megatron-LM.

    python scripts/host_table.py ~/Megatron-LM ~/Megatron-LM-0.12      run, and write their rows; other rows stay
    python scripts/host_table.py --check                               does every row come from this script

A row says what was run: branch, megatron-core's version, commit, Python, and how many tests passed. Packages that some
releases import can be put before the environment's by PYTHONPATH. Exit code 1 if a checkout fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/hosts/megatron_lm.md"
TESTS = ("tests/hosts/test_megatron_lm.py",)
BEGIN, END = "<!-- rows of scripts/host_table.py -->", "<!-- end of rows -->"
HEAD = ("| checkout | megatron-core | commit | Python | state | tests |", "|---|---|---|---|---|---|")


def row_of(checkout: Path, name: str | None = None) -> str:
    """Run the tests on one checkout; its line of the table."""
    text = (checkout / "megatron/core/package_info.py").read_text()
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS],
            cwd=ROOT,
            env={**_environment(), "MEGATRON_LM_PATH": str(checkout)},
            check=False,
        )
        counts = counts_of(report) if report.exists() else {}
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    failed = counts.get("failed", 0)
    state = "works" if passed and not failed else "fails"
    shown = f"{passed} passed" + (f", {skipped} skipped" if skipped else "") + (f", {failed} failed" if failed else "")
    python = ".".join(platform.python_version_tuple()[:2])
    return f"| {name or checkout.name} | {version} | {_commit(checkout)} | {python} | {state} | {shown} |"


def counts_of(report: Path) -> dict[str, int]:
    """How many tests passed, were skipped and failed, out of pytest's XML."""
    # Our own pytest has just written it.
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))  # noqa: S314
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": total - skipped - failed, "skipped": skipped, "failed": failed}


def merged(page: str, rows: list[str]) -> str:
    """The page with these rows in place of those of the same checkouts; the others stay, in order of version."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    known.pop("checkout", None)
    known.update({row.split("|")[1].strip(): row for row in rows})
    lines = sorted(known.values(), key=lambda row: [int(n) for n in re.findall(r"\d+", row.split("|")[2])])
    return f"{before}{BEGIN}\n" + "\n".join([*HEAD, *lines]) + f"\n{END}{after}"


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "not a git checkout"


def _environment() -> dict[str, str]:
    # Packages that some releases import and the kit does not need; scripts/test_matrix.sh puts them there.
    path = os.pathsep.join(filter(None, [str(ROOT / ".matrix/extras"), os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**os.environ, **settings, "PYTHONPATH": path}


def main() -> int:
    """Run on the checkouts that were named and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--names", help="what the checkouts are called, such as core_r0.16.0,main; else their folders")
    parser.add_argument("--check", action="store_true", help="only look whether the page has the table")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        print(f"{PAGE}: has no {BEGIN} … {END}", file=sys.stderr)
        return 2
    if arguments.check or not arguments.checkouts:
        return 0 if merged(page, []) == page else 1
    names = arguments.names.split(",") if arguments.names else [None] * len(arguments.checkouts)
    if len(names) != len(arguments.checkouts):
        parser.error(f"--names: {len(names)} for {len(arguments.checkouts)} checkouts")
    rows = [row_of(path.expanduser().resolve(), name) for path, name in zip(arguments.checkouts, names, strict=True)]
    PAGE.write_text(merged(PAGE.read_text(), rows))
    print("\n".join([*HEAD, *rows]))
    return int(any("| fails |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
