"""The wheel is the whole product: built, installed into an empty environment outside the checkout, each command run."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from msprobe_megatron.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
TREES = ("msprobe_megatron", "patches", "scripts", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
RECIPE = "#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --save ckpt\n"

# Command line -> exit code. The demo comes first, the others read what it wrote.
CALLS = [
    (["demo", "--out", "run", "--num-layers", "2", "--config", "probe.yaml"], 0),
    (["init", "spike", "--launch", "recipe.sh"], 0),
    (["validate", "probe.yaml"], 0),
    (["validate", "--reference"], 0),
    (["launch", "--dry-run", "--overlay", "modellink/llama2_7b", "--", "recipe.sh"], 0),
    (["launch", "--list"], 0),
    (["launch", "--env"], 0),
    (["overlays"], 0),
    (["overlays", "modellink/llama2_7b"], 0),
    (["watch", "run", "--once"], 0),
    (["ctl", "run", "--next", "1"], 2),
    (["summary", "run"], 0),
    (["diagnose", "run"], 0),
    (["compare", "run", "run"], 0),
    (["report", "run"], 0),
    (["scaling", "run"], 0),
    (["env-diff", "run", "run"], 0),
    (["ckpt-diff", "nothing", "nothing"], 2),
    (["logprobs", "run", "run"], 2),
    (["weights", "run", "--manifest", "weights.json"], 2),
    (["record-hf", "nothing", "--data", "nothing", "--out", "golden"], 2),
    (["export", "run", "--format", "msprobe"], 0),
    (["import", "msprobe_dump", "--out", "imported"], 0),
    (["docs"], 0),
    (["docs", "walkthroughs"], 0),
    (["patches"], 0),
    (["bench", "counts", "--only", "nothing"], 2),
    (["completion", "bash"], 0),
]
# One process for all, as a start of Python for each would be most of the time.
CALLER = """
import contextlib, json, sys, tempfile
from msprobe_megatron.cli import main
results = []
for words in json.load(open("calls.json")):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        out.seek(0), err.seek(0)
        results.append([words, code, out.read(), err.read()])
json.dump(results, open("results.json", "w"))
"""


class Installed:
    """The empty environment, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "work"
        self.place.mkdir()
        self.bin = folder / "env" / "bin"

    def call(self, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MSPROBE", "PYTHON"))}
        # The launcher is the tests' own, behind the environment.
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), kept["PATH"]])
        return subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.place,
            env={**kept, "PATH": path, "VIRTUAL_ENV": str(self.bin.parent), **more},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    for name in TREES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, cwd=folder, timeout=300)
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    # torch, Megatron and the dependencies are the tests' own; a path from a .pth does not bring that folder's editable
    # installs along.
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return Installed(folder)


def test_every_command_works_from_the_wheel(installed: Installed) -> None:
    (installed.place / "probe.yaml").write_text("steps: [0, 2]\ndump: {level: L0}\nmonitor: {every: 1}\n")
    (installed.place / "recipe.sh").write_text(RECIPE)
    assert {words[0] for words, _ in CALLS} == set(COMMANDS)
    (installed.place / "calls.json").write_text(json.dumps([words for words, _ in CALLS]))
    done = installed.call("python", "-c", CALLER)
    assert done.returncode == 0, done.stderr
    results = json.loads((installed.place / "results.json").read_text())
    asked = [code for _, code in CALLS]
    wrong = [result for result, code in zip(results, asked, strict=True) if result[1] != code]
    assert not wrong
    printed = {" ".join(words): out + err for words, _, out, err in results}
    assert "modellink/llama2_7b" in printed["overlays"] and "modellink/llama2_7b" in printed["launch --list"]
    # What the shim said about the recipe: it was found, could be executed, and knows the overlay.
    assert "Traceback" not in "".join(printed.values())
    assert str(installed.bin.parent) in printed["launch --env"]


def test_the_doors_of_the_wheel(installed: Installed) -> None:
    """The command, the module, the runner and the recipe's launcher, all of the environment and not of the checkout."""
    version = installed.call("msprobe-megatron", "--version")
    as_module = installed.call("python", "-m", "msprobe_megatron", "--version")
    assert (version.returncode, as_module.returncode, version.stdout) == (0, 0, as_module.stdout)
    (installed.place / "pretrain_gpt.py").write_text(
        "import sys, msprobe_megatron, msprobe_megatron.demo.pretrain_gpt\nprint(sys.argv, msprobe_megatron.__file__)\n"
    )
    done = installed.call("python", "-m", "msprobe_megatron.run", "pretrain_gpt.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "['pretrain_gpt.py', '--lr', '1']" in done.stdout and str(installed.bin.parent) in done.stdout
    (installed.place / "recipe.sh").write_text(RECIPE)
    dry = installed.call("msprobe-megatron", "launch", "--dry-run", "--overlay", "llama2_13b", "--", "recipe.sh")
    assert dry.returncode == 2 and "modellink/llama2_13b or" not in dry.stdout
    dry = installed.call("msprobe-megatron", "launch", "--dry-run", "--overlay", "gpt3_8l", "--", "recipe.sh")
    assert dry.returncode == 0, dry.stderr
    assert "overlay modellink/gpt3_8l changes: --train-iters not given -> " in dry.stderr
    assert "--save ckpt -> not given" in dry.stderr


def test_without_torch_one_sentence_is_said(installed: Installed) -> None:
    hide = installed.place / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    for words in (["demo"], ["patches"], ["bench", "counts"]):
        done = installed.call("msprobe-megatron", *words, PYTHONPATH=str(hide))
        assert done.returncode == 2, (words, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1 and "torch" in done.stderr, words
        done = installed.call("msprobe-megatron", *words, "--json", PYTHONPATH=str(hide))
        assert (done.returncode, done.stderr) == (2, "")
        assert "torch" in json.loads(done.stdout)["error"]
    # Reading needs no torch.
    assert installed.call("msprobe-megatron", "validate", "--reference", PYTHONPATH=str(hide)).returncode == 0
