"""Tables on a terminal: within its width and at most 100 columns, no figure cut off, in the letters of the locale."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from msprobe_megatron.analysis.compare.compare import Comparison
from msprobe_megatron.analysis.compare.verdict.differences import Difference
from msprobe_megatron.analysis.diagnose.diagnose import Diagnosis, Finding
from msprobe_megatron.analysis.diagnose.summary import Line, Summary
from msprobe_megatron.report.terminal import tables
from msprobe_megatron.report.terminal.compare import print_comparison
from msprobe_megatron.report.terminal.diagnose import print_diagnosis
from msprobe_megatron.report.terminal.page import print_verdict
from msprobe_megatron.report.terminal.tables import console, print_summary

NAME = "decoder.layers.1.self_attention.core_attention." + "scale_mask_softmax" * 8


def difference(name):
    site = {"class": "Softmax", "stack": [f"/x/site-packages/megatron/{'deep/' * 30}file.py:1 forward"]}
    return Difference(
        *(name, name, "input", "", "activation", 0, 0, (0, 2), "forward", 1, list(range(0, 64, 2)), site, 0.18, 1.3e-6),
        *("diverged", "norm 1 vs 2"),
    )


COMPARISON = Comparison(
    "golden", "run", "diverged", "", [0], difference(NAME), [difference(NAME), difference("名前" * 40)], {"agree": 1},
    hints=["look " * 40],
)  # fmt: skip
SUMMARY = Summary(
    *("run", 4, {"tp": 4}, {"torch": "2"}, [0], [0], 10, 1000),
    [Line("layer 0 of a very long place", "grad_unreduced", 12, 120, 1.251e-30, 2.346e12, 0.5, 123456, False)],
    *({}, ["…" + "w" * 200]),
)
DIAGNOSIS = Diagnosis("run", [], 0, [Finding("alert", f"{NAME} … is odd", "certain", f"look at {NAME}")])
VERDICT = {
    "headline": f"Diverged in {NAME}",
    "tone": "bad",
    "findings": [
        {"title": "T", "tone": "note", "text": "w " * 90, "facts": [("who", NAME)], "command": "c " * 90, "then": "t"}
    ],
}
PRINTERS = {
    "compare": lambda out: print_comparison(COMPARISON, out),
    "summary": lambda out: print_summary(SUMMARY, out),
    "diagnose": lambda out: print_diagnosis(DIAGNOSIS, out),
    "report": lambda out: print_verdict(VERDICT, out),
}


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def printed(name, monkeypatch, columns):
    stream = Screen()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    PRINTERS[name](console(stream))
    return stream.getvalue()


@pytest.mark.parametrize("name", PRINTERS)
@pytest.mark.parametrize("columns", [60, 100, 240])
def test_lines_fit_and_are_coloured(monkeypatch, name, columns):
    text = printed(name, monkeypatch, columns)
    assert "\x1b[" in text
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    # Commands are there to be copied, and are not wrapped.
    assert all(len(line) <= min(columns, 100) for line in lines if "next: c" not in line)


@pytest.mark.parametrize("columns", [60, 100])
def test_no_figure_is_cut_off(monkeypatch, columns):
    text = printed("summary", monkeypatch, columns)
    assert all(figure in text for figure in ("1.251e-30", "2.346e+12", "123456"))
    text = printed("compare", monkeypatch, columns)
    assert text.count("1.8e-01") == 3 and text.count("1.3e-06") == 3


@pytest.mark.parametrize("name", PRINTERS)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
def test_any_locale_gets_its_own_letters_and_a_pipe_no_colours(monkeypatch, name, encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    PRINTERS[name](console(stream))
    text = raw.getvalue().decode(encoding)
    assert "\x1b" not in text
    # In a pipe a sentence is one line, to be searched and copied; only tables keep to 100 columns.
    whole, cells = io.StringIO(), re.compile(r"\S {2,}\S")
    monkeypatch.setattr(tables, "_WIDTH", 10_000)
    PRINTERS[name](console(whole))
    plain = whole.getvalue().translate(tables._PLAIN).encode(encoding, "replace").decode(encoding)
    sentences = [line.strip() for line in plain.splitlines() if len(line) > 100 and not cells.search(line.strip())]
    assert sentences and all(sentence in text.translate(tables._PLAIN) for sentence in sentences)
    assert all(len(line) <= 100 for line in text.splitlines() if cells.search(line.strip()))


def test_the_command_itself_on_a_terminal_and_in_a_pipe():
    command = [sys.executable, "-m", "msprobe_megatron.cli", "summary", "nowhere…"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
    assert done.returncode == 2 and b"not a directory" in done.stderr and b"Traceback" not in done.stderr
    master, slave = pty.openpty()
    done = subprocess.run(command, stdout=slave, stderr=slave, env=environment, timeout=120, check=False)
    os.close(slave)
    assert done.returncode == 2 and b"not a directory" in os.read(master, 4096)
    os.close(master)
