"""docs/walkthroughs.md, typed as it stands: every command ends as it says, and prints what it shows.

A `yaml` block whose first line is `# NAME` is that file. The lines of a `bash` block are run one by one; `# exit N` at
the end says how it ends (0 otherwise). A `text` block shows what was printed: each of its lines but `…` must be there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_megatron.job.measure.native.build import cache_directory

DOCUMENT = Path(__file__).parents[3] / "docs" / "walkthroughs.md"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)
_EXIT = re.compile(r"\s+# exit (\d+)$")
_SECTIONS = re.compile(r"^## ", re.M)


def sections():
    text = DOCUMENT.read_text(encoding="utf-8")
    shared, *parts = _SECTIONS.split(text)
    return shared, {part.partition("\n")[0].strip(): part for part in parts}


SHARED, WALKS = sections()


def flat(text):
    return " ".join(text.split())


def commands(body):
    """Lines of a block; those that end in a backslash go on."""
    return [line for line in re.sub(r"\\\n\s*", "", body).splitlines() if line.strip() and not line.startswith("#")]


def environment(folder):
    # The commands a user has: those of this environment, whether it is active or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A home of its own, but the compiled parts of this user: building them anew takes longer than the walk.
    cache = os.environ.get("MSPROBE_CACHE", str(cache_directory()))
    fixed = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(folder), "COLUMNS": "100", "MSPROBE_CACHE": cache}
    return {**os.environ, **fixed}


def play(part, folder):
    """Run the blocks of a section; returns how many lines of text were compared."""
    printed, compared = "", 0
    for language, body in _BLOCK.findall(part):
        if language == "yaml":
            name = re.match(r"# (\S+)\n", body)
            assert name, f"a yaml block has to begin with '# NAME':\n{body}"
            (folder / name[1]).write_text(body)
        elif language == "bash":
            printed = ""
            for line in commands(body):
                found = _EXIT.search(line)
                done = subprocess.run(
                    ["bash", "-c", _EXIT.sub("", line)],
                    cwd=folder,
                    env=environment(folder),
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=False,
                )
                output = done.stdout + done.stderr
                assert done.returncode == int(found[1] if found else 0), f"{line}\n{output[-3000:]}"
                printed += output
        elif language == "text":
            for line in body.splitlines():
                if line.strip() in ("", "…"):
                    continue
                pieces = [flat(piece) for piece in line.split("…") if piece.strip()]
                assert all(piece in flat(printed) for piece in pieces), f"not printed: {line}\nprinted:\n{printed}"
                compared += 1
    return compared


@pytest.mark.parametrize("title", WALKS)
def test_walk(title, tmp_path):
    play(SHARED, tmp_path)
    assert play(WALKS[title], tmp_path) > 0


def test_there_is_a_walk_for_every_symptom():
    titles = " ".join(WALKS).lower()
    for symptom in ("nan", "spike", "first loss", "drift", "repeat"):
        assert symptom in titles
