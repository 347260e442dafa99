"""The shell scripts: their syntax, their arguments, and what they would install and run.

No test here installs anything. A checkout with spaces in its path is given a stand-in for Python, which notes
every call of pip, torchrun and the linters and answers everything else as the real interpreter would without
its site-packages. What it "installs" are empty modules.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

# $HERE is the environment the stand-in lies in; FAIL is a pattern of calls that shall fail.
STAND_IN = """#!/usr/bin/env bash
HERE=$(cd "$(dirname "$0")/.." && pwd -P)
if [ "$1" = -m ]; then
    printf '%s\\n' "$*" >>"$CALLS"
    if [ -n "${FAIL:-}" ] && [[ "$*" =~ $FAIL ]]; then echo "planted failure"; exit 3; fi
fi
add() { mkdir -p "$HERE/stubs/$1" && printf '__version__ = "%s"\\n' "$2" >"$HERE/stubs/$1/__init__.py"; }
case "$*" in
    *"pip install"*" torch=="*) version=${*: -1} && add torch "${version##*=}" ;;
    *"pip install"*"megatron-core=="*) add megatron 0 && add megatron/core 0 ;;
    *"pip install"*"--editable"*) add msprobe_megatron 0 ;;
    "-m venv "*)
        for target in "$@"; do :; done
        mkdir -p "$target/bin" && touch "$target/pyvenv.cfg"
        cp "$0" "$target/bin/python"
        printf '#!/bin/sh\\necho "msprobe-megatron $*" >>"$CALLS"\\n' >"$target/bin/msprobe-megatron"
        chmod +x "$target"/bin/*
        ;;
    "-m "*) echo "pretending: $*" ;;
    *)
        add pip 0
        [ "$1" != -V ] || exec "$REAL_PYTHON" -V
        PYTHONPATH="$HERE/stubs" exec "$REAL_PYTHON" -S "$@"
        ;;
esac
"""


class Checkout:
    """A copy of the scripts with a stand-in for Python beside it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "a check out"
        self.calls_file = directory / "calls"
        self.calls_file.touch()
        (self.root / ".ci").mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy2(ROOT / ".ci" / "run", self.root / ".ci" / "run")
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy2(ROOT / name, self.root / name)
        for name in ("msprobe_megatron", "patches"):
            (self.root / name).mkdir()
            (self.root / name / "__init__.py").touch()
        self.python = directory / "machine" / "bin" / "python3"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {"PATH": f"{self.python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"}
        own = {"CALLS": str(self.calls_file), "REAL_PYTHON": sys.executable, "HOME": str(self.root.parent)}
        return subprocess.run(
            ["bash", *command],
            cwd=cwd or self.root.parent,
            env={**inherited, **own, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def setup(self, extras: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        script = self.root / "scripts" / "setup_env.sh"
        return self.run(
            "-euo", "pipefail", "-c", f'source "$0"; setup_env {extras}', str(script), cwd=None, **environment
        )

    def venv(self, path: Path) -> Path:
        subprocess.run([self.python, "-m", "venv", path], env={**os.environ, "CALLS": os.devnull}, check=True)
        return path

    def calls(self) -> list[str]:
        """What was asked of Python and of the command line tool since the last look."""
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.write_text("")
        return lines

    def installed(self) -> list[str]:
        """The last argument of every `pip install` since the last look."""
        return [call.split()[-1] for call in self.calls() if call.startswith("-m pip install")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_accepts_the_syntax(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_habits(script: Path) -> None:
    text = script.read_text()
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    assert text.endswith("\n") and "\t" not in text and "\r" not in text
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", code), (
        "where packages come from is pip's affair"
    )
    assert not re.search(r'(?<!")\$@', code), "unquoted arguments"
    assert "`" not in code, "backquotes do not nest; use $(...)"
    if script.name not in ("setup_env.sh", "msprobe_env.sh"):  # which are sourced and leave the options to their caller
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text
        assert os.access(script, os.X_OK)


def test_versions_are_pinned() -> None:
    text = (ROOT / "scripts" / "setup_env.sh").read_text()
    asked = re.findall(r'_setup_pip .*"((?:torch|megatron-core)[^"]*)"', text)
    assert asked == ["torch==$_SETUP_TORCH+cpu", "torch==$_SETUP_TORCH", "megatron-core==$_SETUP_MEGATRON"]
    assert "\n_SETUP_TORCH=2.13.0\n" in text
    assert re.search(r"\n_SETUP_MEGATRON=\d+\.\d+\.\d+\n", text)


def test_probe_file_is_as_the_quickstart_describes_it() -> None:
    probe = yaml.safe_load((ROOT / "scripts" / "quickstart_probe.yaml").read_text())
    assert probe["steps"] == [0, 2]
    assert probe["dump"] == {"level": "L0", "task": "statistics"}
    assert probe["ranks"] == "all"


def test_the_environment_is_made_once_torch_first(checkout: Checkout) -> None:
    first = checkout.setup()
    assert first.returncode == 0, first.stderr
    assert checkout.installed() == ["torch==2.13.0+cpu", "megatron-core==0.16.1", "."]
    assert (checkout.root / ".venv" / "msprobe_megatron_setup.constraints").read_text() == "torch==2.13.0+cpu\n"
    assert checkout.setup().returncode == 0
    assert checkout.calls() == []


def test_the_tools_for_the_tests_come_on_top(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    assert checkout.setup("dev").returncode == 0
    assert checkout.installed() == [".[dev]"]
    assert checkout.setup("dev").returncode == 0
    assert checkout.setup().returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "scripts/setup_env.sh"])
def test_changed_requirements_are_installed(checkout: Checkout, name: str) -> None:
    checkout.setup()
    checkout.calls()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.setup().returncode == 0
    assert checkout.installed() == ["."]


def test_a_moved_checkout_is_installed_anew(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.setup().returncode == 0
    assert checkout.installed() == ["."]


def test_a_package_that_went_missing_is_installed_again(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    shutil.rmtree(checkout.root / ".venv" / "stubs" / "megatron")
    assert checkout.setup().returncode == 0
    assert checkout.installed() == ["megatron-core==0.16.1", "."]


def test_a_repair_that_failed_halfway_is_not_taken_for_done(checkout: Checkout) -> None:
    checkout.setup()
    shutil.rmtree(checkout.root / ".venv" / "stubs" / "megatron")
    assert checkout.setup(FAIL="--editable").returncode != 0
    checkout.calls()
    assert checkout.setup().returncode == 0
    assert checkout.installed() == ["."]


def test_the_active_environment_is_used(checkout: Checkout, tmp_path: Path) -> None:
    active = checkout.venv(tmp_path / "my env")
    done = checkout.setup(VIRTUAL_ENV=str(active))
    assert done.returncode == 0, done.stderr
    assert checkout.installed() == ["torch==2.13.0+cpu", "megatron-core==0.16.1", "."]
    assert (active / "msprobe_megatron_setup").exists()
    assert not (checkout.root / ".venv").exists()


def test_an_active_environment_that_is_gone_is_an_error(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.setup(VIRTUAL_ENV=str(tmp_path / "gone"))
    assert done.returncode != 0
    assert str(tmp_path / "gone") in done.stderr and "VIRTUAL_ENV" in done.stderr
    assert checkout.calls() == []


@pytest.mark.parametrize(
    ("present", "missing"), [("torch", "megatron-core==0.16.1"), ("megatron/core", "torch==2.13.0+cpu")]
)
def test_what_is_there_is_kept(checkout: Checkout, tmp_path: Path, present: str, missing: str) -> None:
    active = checkout.venv(tmp_path / "v")
    package = active / "stubs" / present
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "2.7.1+mine"\n')
    assert checkout.setup(VIRTUAL_ENV=str(active)).returncode == 0
    assert checkout.installed() == [missing, "."]
    if present == "torch":
        assert (active / "msprobe_megatron_setup.constraints").read_text() == "torch==2.7.1+mine\n"


def test_a_broken_torch_is_neither_replaced_nor_ignored(checkout: Checkout, tmp_path: Path) -> None:
    active = checkout.venv(tmp_path / "v")
    (active / "stubs" / "torch").mkdir(parents=True)
    (active / "stubs" / "torch" / "__init__.py").write_text("raise OSError('libsomething.so is missing')\n")
    done = checkout.setup(VIRTUAL_ENV=str(active))
    assert done.returncode != 0
    assert "libsomething.so is missing" in done.stderr
    assert checkout.installed() == []


def test_a_default_build_is_taken_when_no_cpu_build_is_to_be_had(checkout: Checkout) -> None:
    assert checkout.setup(FAIL=r"torch==2\.13\.0\+cpu").returncode == 0
    assert checkout.installed() == ["torch==2.13.0+cpu", "torch==2.13.0", "megatron-core==0.16.1", "."]


@pytest.mark.parametrize("what", ["torch==", "megatron-core==", "--editable"])
def test_a_failing_pip_stops_with_advice_and_the_next_call_tries_again(checkout: Checkout, what: str) -> None:
    failed = checkout.setup(FAIL=what)
    assert failed.returncode != 0
    assert "pip could not install" in failed.stderr
    assert "planted failure" in failed.stderr, "pip's own words"
    assert "run the same command again" in failed.stderr
    checkout.calls()
    assert checkout.setup().returncode == 0
    assert checkout.installed()[-1] == "."


def test_python_without_ensurepip_gets_pip_from_outside(checkout: Checkout) -> None:
    done = checkout.setup(FAIL=r"venv --clear /")
    assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[1].startswith("-m venv --clear --without-pip ")
    assert calls[2].startswith(f"-m pip --python {checkout.root}/.venv/bin/python install ")


def test_no_suitable_python_is_said(checkout: Checkout) -> None:
    done = checkout.setup(REAL_PYTHON="false", PATH=f"{checkout.python.parent}:{_tools(checkout)}")
    assert done.returncode != 0
    assert "no Python 3.10 to 3.13" in done.stderr


def _tools(checkout: Checkout) -> Path:
    """A directory with the few tools the scripts use, and no Python."""
    directory = checkout.root.parent / "tools"
    directory.mkdir()
    for name in ("bash", "env", "dirname", "grep", "mkdir", "rm", "sed", "tail"):
        found = shutil.which(name)
        assert found is not None
        (directory / name).symlink_to(found)
    return directory


def test_a_venv_that_is_something_else_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / "precious").touch()
    done = checkout.setup()
    assert done.returncode != 0
    assert "not a virtual environment" in done.stderr
    assert (checkout.root / ".venv" / "precious").exists()


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_help_does_nothing_else(checkout: Checkout, name: str, flag: str) -> None:
    done = checkout.run(str(checkout.root / "scripts" / name), flag)
    assert done.returncode == 0
    assert f"bash scripts/{name}" in done.stdout
    assert "set -euo" not in done.stdout and not done.stdout.startswith("#")
    assert checkout.calls() == []
    assert not (checkout.root.parent / "quickstart_out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--fast"], "--fast"),
        (["a", "b"], "one argument"),
        ([""], "empty"),
        (["calls"], "calls is there and is not"),
    ],
)
def test_quickstart_refuses_before_it_installs(checkout: Checkout, arguments: list[str], complaint: str) -> None:
    done = checkout.run(str(checkout.root / "scripts" / "quickstart.sh"), *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert checkout.calls() == []
    assert not (checkout.root / ".venv").exists()


def test_quickstart_trains_twice_summarises_and_runs_again(checkout: Checkout) -> None:
    script, out = str(checkout.root / "scripts" / "quickstart.sh"), checkout.root.parent / "my out"
    first = checkout.run(script, "my out")
    assert first.returncode == 0, first.stderr
    calls = [call for call in checkout.calls() if not call.startswith(("-m venv", "-m pip"))]
    assert [re.sub(r".*nproc_per_node (\d).*", r"train \1", call) for call in calls] == [
        "train 4",
        "train 1",
        f"msprobe-megatron summary {out}/run_001/tp2pp2",
        f"msprobe-megatron summary {out}/run_001/single",
        f"msprobe-megatron compare {out}/run_001/single {out}/run_001/tp2pp2",
        f"msprobe-megatron report {out}/run_001/tp2pp2 --against {out}/run_001/single --out {out}/run_001/report.html",
    ]
    flags = [set(re.findall(r"--\S+ \d\S*|--\S+", call)) for call in calls[:2]]
    layout = {"--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--nproc_per_node 4"}
    assert flags[0] - flags[1] == layout
    assert flags[1] - flags[0] == {"--nproc_per_node 1"}, "the same model and data"
    assert all("--standalone" in call and "-m msprobe_megatron.demo.pretrain_gpt" in call for call in calls[:2])
    assert f"--msprobe-output {out}/run_001/tp2pp2" in calls[0]
    assert (out / "run_001").stat().st_mode & 0o777 == 0o700
    assert "pretending: -m torch.distributed.run" in (out / "run_001" / "single.log").read_text()
    assert f"{checkout.root}/.venv/bin/activate".replace(" ", "\\ ") in first.stdout
    again = checkout.run(script, str(out), cwd=Path("/"))
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in out.iterdir()) == ["run_001", "run_002"]


@pytest.mark.parametrize("which", ["nproc_per_node 4", "nproc_per_node 1"])
def test_quickstart_fails_when_a_training_run_fails(checkout: Checkout, which: str) -> None:
    done = checkout.run(str(checkout.root / "scripts" / "quickstart.sh"), FAIL=which)
    assert done.returncode == 1
    assert "failed (exit 3)" in done.stderr
    assert "planted failure" in done.stdout
    assert not any(call.startswith("msprobe-megatron") for call in checkout.calls())


def test_quickstart_fails_when_a_summary_fails(checkout: Checkout, tmp_path: Path) -> None:
    active = checkout.venv(tmp_path / "v")
    (active / "bin" / "msprobe-megatron").write_text("#!/usr/bin/env bash\nexit 2\n")
    done = checkout.run(str(checkout.root / "scripts" / "quickstart.sh"), VIRTUAL_ENV=str(active))
    assert done.returncode == 1
    assert "summary" in done.stderr


def test_ci_runs_every_check_and_passes_arguments_on(checkout: Checkout) -> None:
    done = checkout.run(str(checkout.root / ".ci" / "run"), "-k", "two words", cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    calls = [call for call in checkout.calls() if not call.startswith(("-m venv", "-m pip"))]
    assert calls[:2] == ["-m ruff check .", "-m ruff format --check ."]
    assert calls[2].startswith("-m mypy ") and calls[2].endswith("--package msprobe_megatron")
    assert calls[3:] == ["-m pytest -k two words"]


@pytest.mark.parametrize(
    ("fail", "named"),
    [("ruff check", "[ruff check]"), ("mypy|pytest", "[mypy] [pytest]"), ("format", "[ruff format]")],
)
def test_all_checks_run_and_the_failed_ones_are_named(checkout: Checkout, fail: str, named: str) -> None:
    done = checkout.run(
        str(checkout.root / "scripts" / "test.sh"), FAIL=f"^-m ({fail})" if "format" not in fail else fail
    )
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith(f"failed: {named}")
    assert sum(call.startswith(("-m ruff", "-m mypy", "-m pytest")) for call in checkout.calls()) == 4


def test_mypy_sees_the_installed_layout(checkout: Checkout) -> None:
    checkout.run(str(checkout.root / "scripts" / "types.sh"), MSPROBE_PYTHON=str(checkout.python))
    view = checkout.root / ".mypy_cache" / "as_installed" / "msprobe_megatron"
    assert (view / "patches" / "__init__.py").samefile(checkout.root / "patches" / "__init__.py")
    assert (view / "__init__.py").samefile(checkout.root / "msprobe_megatron" / "__init__.py")
