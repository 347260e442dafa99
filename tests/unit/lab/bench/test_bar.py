"""The progress bar: nothing where there is no terminal, a new bar for a new part, no thread of its own."""

import io
import threading

from rich.console import Console

from msprobe_megatron.report.terminal.bar import Bar


def test_silent_without_a_terminal(capsys):
    with Bar() as bar:
        bar("h64: turn 1 of 2", 0.0)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_terminal_sees_the_part_and_its_share(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        "msprobe_megatron.report.terminal.bar.Console",
        lambda file: Console(file=screen, force_terminal=True, width=100),
    )
    threads = threading.active_count()
    with Bar() as bar:
        bar("h64: turn 1 of 2", 0.0)
        bar("h64: turn 2 of 2", 0.5)
        # What draws by itself would be in the CPU time of what is measured.
        assert threading.active_count() == threads
        bar("profile: h64:L0")
    text = screen.getvalue()
    assert "h64: turn 1 of 2" in text and "h64: turn 2 of 2" in text and "profile: h64:L0" in text
