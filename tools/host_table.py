"""The table of hosts: runs the tests of each host and writes what they found, here and nowhere else.

    python tools/host_table.py megatron-lm ~/Megatron-LM ~/Megatron-LM-0.12     pretrain_gpt.py of these checkouts
    python tools/host_table.py megatron-core 0.12.3 0.16.1                      wheels (scripts/test_matrix.sh)
    python tools/host_table.py modellink ~/ModelLink                            also mindspeed-llm, mindspeed
    python tools/host_table.py others                                           all hosts that need no checkout
    python tools/host_table.py --readme                                         print the README's rows
    python tools/host_table.py --check                                          do page and README agree

Each writes its rows of docs/hosts/table.md; the others stay. The README's rows are those rows put together by host.
Packages that some releases import can be put before the environment's by PYTHONPATH. Exit code 1 if a host fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs/hosts/table.md", ROOT / "README.md"
BEGIN, END = "<!-- rows of tools/host_table.py -->", "<!-- end of rows -->"
COLUMNS = ("host", "release", "commit", "Python", "what was run", "state", "tests")
README_COLUMNS = ("host", "releases", "what was run", "state", "tests", "page")


@dataclass(frozen=True)
class Host:
    """One host: its tests, and which of them stand for which way of using the kit there."""

    title: str
    page: str
    tests: tuple[str, ...]
    ways: Mapping[str, str]  # what was run -> part of a test's name
    variable: str = ""  # names the checkout to the tests
    version: str = ""  # a file of the checkout that tells the version
    package: str = ""  # a package of the environment that tells it
    without: str = "stand-in"  # what the release is called where the package is not installed


_FRAMEWORKS, _OVERLAYS = "tests/jobs/integrations/test_frameworks.py", "tests/unit/hosts/launching/test_overlays.py"
_BOTH = (_FRAMEWORKS, "tests/jobs/hosts/test_installed_frameworks.py", "-k")
HOSTS = {
    "megatron-lm": Host(
        "Megatron-LM",
        "megatron_lm.md",
        ("tests/jobs/hosts/test_megatron_lm.py", "tests/jobs/hosts/test_source_patches.py"),
        {
            "`-m msprobe_megatron.run`": "test_loss_and_gradient_norm",
            "one-line import": "test_one_line_in_the_script",
            "git patch": "test_round_trip_on_the_checkout",
            "resume": "test_a_resumed_job",
            "evaluation": "test_evaluation",
            "`--yaml-cfg`": "test_yaml_cfg",
            "legacy model": "test_the_legacy_model",
            "rehearsed recipes": "test_its_own_recipe_is_rehearsed",
        },
        variable="MEGATRON_LM_PATH",
        version="megatron/core/package_info.py",
    ),
    "modellink": Host(
        "ModelLink",
        "modellink.md",
        ("tests/jobs/hosts/test_modellink.py", f"{_OVERLAYS}::test_overlays_fit_the_recipes_of_a_checkout"),
        {
            "recipes, stub launcher": "test_an_unedited_recipe",
            "overlays fit": "test_overlays_fit",
            "rehearsed recipes": "test_training",
            "the README's line without a device": "test_the_readmes_line",
        },
        variable="MODELLINK_PATH",
    ),
    "mindspeed-llm": Host(
        "MindSpeed-LLM",
        "mindspeed_llm.md",
        ("tests/jobs/hosts/test_mindspeed_llm.py",),
        {"recipes, stub launcher": "test_an_unedited_recipe", "rehearsed recipes": "test_training"},
        variable="MINDSPEED_LLM_PATH",
    ),
    "mindspeed": Host(
        "MindSpeed",
        "mindspeed_llm.md",
        ("tests/jobs/hosts/test_patch_managers.py::test_mindspeeds_own",),
        {"its patch manager, both orders": "test_mindspeeds_own"},
        variable="MINDSPEED_PATH",
    ),
    "torch": Host(
        "plain torch, DDP, FSDP2",
        "plain_torch.md",
        ("tests/jobs/integrations/test_plain_torch.py", "tests/jobs/integrations/test_debugger.py"),
        {"one process": "test_rows_of_a_loop", "DDP": "test_two_ranks[ddp", "FSDP2": "test_two_ranks[fsdp"},
        package="torch",
    ),
    "examples": Host(
        "ResNet, YOLO, DiT examples",
        "plain_torch.md",
        ("tests/jobs/integrations/test_examples.py",),
        {"two-rank DDP": "test_example"},
        package="torch",
    ),
    "lightning": Host(
        "Lightning",
        "lightning.md",
        (_FRAMEWORKS, "-k", "lightning"),
        {"stand-in": "test_lightning_stand_in", "its Trainer": "test_lightning_itself"},
        package="lightning",
    ),
    "megatron-bridge": Host(
        "Megatron-Bridge",
        "megatron_bridge.md",
        (*_BOTH, "bridge"),
        {"stand-in": "test_callbacks_use", "its callback manager": "test_megatron_bridge_itself"},
        package="megatron-bridge",
    ),
    "ms-swift": Host(
        "ms-swift",
        "ms_swift.md",
        (*_BOTH, "swift"),
        {"stand-in": "test_callbacks_use", "its callback class": "test_ms_swift_itself"},
        package="ms-swift",
    ),
    "slime": Host(
        "slime",
        "slime.md",
        (*_BOTH, "slime"),
        {"stand-in": "test_slime", "its source": "test_slime_itself"},
    ),
    "verl": Host(
        "verl",
        "verl.md",
        (*_BOTH, "verl"),
        {"stand-in": "test_verl", "its engine class": "test_verl_itself"},
        package="verl",
    ),
}
WHEELS = Host("megatron-core", "megatron_lm.md", (), {})
TITLES = ["Megatron-LM", WHEELS.title, *(host.title for host in HOSTS.values() if host.title != "Megatron-LM")]


@dataclass
class Found:
    """What pytest reported: names of tests by outcome."""

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Whether something passed and nothing failed."""
        return "works" if self.passed and not self.failed else "fails"

    def text(self) -> str:
        """Counts, as in `10 passed, 2 skipped`."""
        counts = {"passed": len(self.passed), "skipped": len(self.skipped), "failed": len(self.failed)}
        return ", ".join(f"{number} {name}" for name, number in counts.items() if number or name == "passed")

    def ways(self, ways: Mapping[str, str]) -> str:
        """Those ways of which tests passed and none failed."""
        return ", ".join(
            way
            for way, part in ways.items()
            if any(part in name for name in self.passed) and not any(part in name for name in self.failed)
        )


def found_in(report: Path) -> Found:
    """Outcomes out of pytest's XML."""
    found = Found()
    # Our own pytest has just written it.
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314
        kinds = {child.tag for child in case}
        where = found.failed if kinds & {"failure", "error"} else found.skipped if "skipped" in kinds else found.passed
        where.append(case.get("name", ""))
    return found


def run_tests(host: Host, checkout: Path | None) -> Found:
    """Run the tests of one host."""
    named = {host.variable: str(checkout)} if checkout else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *host.tests],
            cwd=ROOT,
            env={**_environment(), **named},
            check=False,
        )
        return found_in(report) if report.exists() else Found(failed=["pytest itself"])


def row_of(host: Host, checkout: Path | None = None, name: str | None = None) -> str:
    """Run one host; its line of the page."""
    found = run_tests(host, checkout)
    python = ".".join(platform.python_version_tuple()[:2])
    release = _release(host, checkout, name)
    commit = _commit(checkout) if checkout else ""
    return line(host.title, release, commit, python, found.ways(host.ways), found.state, found.text())


def wheel_row(version: str) -> str:
    """The same for one release of megatron-core, in the environment that scripts/test_matrix.sh makes for it."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/test_matrix.sh"), version], stdout=subprocess.PIPE, text=True, check=False
    )
    cells = next((cells_of(row) for row in done.stdout.splitlines() if row.startswith(f"| {version} |")), None)
    if cells is None:
        cells = [version, "fails", "scripts/test_matrix.sh printed no row"]
    patches = re.search(r"<!-- \S+ patches (.*?) -->", done.stdout)
    run = "all layouts of the demo" + (f"; patches: {patches[1]}" if patches else "")
    python = ".".join(platform.python_version_tuple()[:2])
    return line(WHEELS.title, cells[0], "", python, run, cells[1], cells[2])


def line(*cells: str) -> str:
    """One row of Markdown."""
    return "| " + " | ".join(cells) + " |"


def cells_of(row: str) -> list[str]:
    """The cells of a row; the reverse of `line`."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def rows_in(page: str) -> list[str]:
    """The rows between the marks, without the head."""
    between = page.partition(BEGIN)[2].partition(END)[0]
    return [row for row in between.splitlines() if row.startswith("| ")][1:]


def merged(page: str, rows: Iterable[str]) -> str:
    """The page with these rows in place of those of the same host and release; the others stay, in order."""
    known = {tuple(cells_of(row)[:2]): row for row in (*rows_in(page), *rows)}
    # A host that was tried itself needs no row of its stand-in alone.
    itself = {title for title, release in known if release != Host.without}
    known = {key: row for key, row in known.items() if key[1] != Host.without or key[0] not in itself}
    return between_marks(page, [_head(COLUMNS), *(known[key] for key in sorted(known, key=_order))])


def between_marks(page: str, lines: Iterable[str]) -> str:
    """The page with these lines between the marks."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def readme_rows(page: str) -> list[str]:
    """The page's rows put together: one for each host."""
    by_host: dict[str, list[list[str]]] = {}
    for row in rows_in(page):
        by_host.setdefault(cells_of(row)[0], []).append(cells_of(row))
    pages = {host.title: host.page for host in (*HOSTS.values(), WHEELS)}
    rows = []
    for title, group in by_host.items():
        releases = [cells[1] for cells in group]
        shown = ", ".join(releases) if len(releases) <= 5 else f"{releases[0]} … {releases[-1]} ({len(releases)})"
        ways = list(dict.fromkeys(way for cells in group for way in cells[4].partition(";")[0].split(", ") if way))
        broken = [cells[1] for cells in group if cells[5] != "works"]
        link = f"[{pages[title]}](docs/hosts/{pages[title]})"
        state = f"fails: {', '.join(broken)}" if broken else "works"
        rows.append(line(title, shown, ", ".join(ways), state, _added(cells[6] for cells in group), link))
    return [_head(README_COLUMNS), *rows]


def _added(counts: Iterable[str]) -> str:
    total: dict[str, int] = {}
    for text in counts:
        for number, name in re.findall(r"(\d+) (passed|skipped|failed)", text):
            total[name] = total.get(name, 0) + int(number)
    return ", ".join(f"{number} {name}" for name, number in total.items())


def _head(columns: tuple[str, ...]) -> str:
    return line(*columns) + "\n" + "|---" * len(columns) + "|"


def _order(key: tuple[str, ...]) -> tuple[int, list[int], str]:
    title, release = key
    numbers = [int(number) for number in re.findall(r"\d+", release)] or [999]  # `main` is the newest
    return TITLES.index(title), numbers, release


def _release(host: Host, checkout: Path | None, name: str | None) -> str:
    if checkout is None:
        if not host.package:
            return host.without
        return _installed(host.package) or host.without
    text = (checkout / host.version).read_text() if host.version else ""
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return (name or checkout.name) + (f" ({version})" if version else "")


def _installed(package: str) -> str:
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "not a git checkout"


def _environment() -> dict[str, str]:
    # Packages that some releases import and the kit does not need; scripts/test_matrix.sh puts them there.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / ".matrix/extras")]))
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**os.environ, **settings, "PYTHONPATH": path}


def agree() -> list[str]:
    """What is not as this script would write it."""
    page, readme = PAGE.read_text(), README.read_text()
    wrong = [] if merged(page, []) == page else [f"{PAGE}: its rows are not as the script writes them"]
    if between_marks(readme, readme_rows(page)) != readme:
        wrong.append(f"{README}: its rows are not those of --readme")
    return wrong


def _rows(arguments: argparse.Namespace, names: list[str | None]) -> Iterable[str]:
    if arguments.host == "others":
        yield from (row_of(host) for host in HOSTS.values() if not host.variable)
    elif arguments.host == "megatron-core":
        yield from (wheel_row(version) for version in arguments.what)
    else:
        for path, name in zip(arguments.what or [None], names or [None], strict=True):
            yield row_of(HOSTS[arguments.host], Path(path).expanduser().resolve() if path else None, name)


def main() -> int:
    """Run what was named and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", nargs="?", choices=[*HOSTS, "megatron-core", "others"])
    parser.add_argument("what", nargs="*", help="checkouts, or releases of megatron-core")
    parser.add_argument("--names", help="what the checkouts are called, such as core_r0.16.0,main; else their folders")
    parser.add_argument("--readme", action="store_true", help="print the rows of the README")
    parser.add_argument("--check", action="store_true", help="only look whether page and README agree")
    arguments = parser.parse_args()
    if arguments.readme:
        print("\n".join([BEGIN, *readme_rows(PAGE.read_text()), END]))
        return 0
    if arguments.check or not arguments.host:
        wrong = agree()
        print("\n".join(wrong) or "page and README agree")
        return int(bool(wrong))
    names: list[str | None] = [*arguments.names.split(",")] if arguments.names else [None] * len(arguments.what)
    if len(names) != len(arguments.what):
        parser.error(f"--names: {len(names)} for {len(arguments.what)} checkouts")
    takes = arguments.host == "megatron-core" or (arguments.host != "others" and HOSTS[arguments.host].variable)
    if bool(takes) != bool(arguments.what):
        parser.error(f"{arguments.host}: " + ("name checkouts or releases" if takes else "takes no checkout"))
    failed = False
    for row in _rows(arguments, names):
        # Each as soon as it is there: a run over many checkouts takes an hour.
        PAGE.write_text(merged(PAGE.read_text(), [row]))
        print(row, flush=True)
        failed |= cells_of(row)[5] != "works"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
