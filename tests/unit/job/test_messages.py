"""Lines for the user: on every stream that can take one, and harmless on those that cannot."""

import io
import os
import sys

import pytest

from msprobe_megatron.job.messages import Messages, warn
from msprobe_megatron.run_directory.directory import RunDirectory, read_events


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)


@pytest.mark.parametrize("stream", [closed, broken_pipe, lambda: None], ids=["closed", "broken pipe", "none"])
def test_a_stream_that_takes_nothing_stops_nothing(tmp_path, monkeypatch, capsys, stream):
    messages = Messages(RunDirectory.create(tmp_path / "out"), 0)
    one = stream()
    monkeypatch.setattr(sys, "stderr", one)
    warn("lost")
    messages.report("kept as an event", "control")
    monkeypatch.setattr(sys, "stdout", one)
    messages.log("lost")
    monkeypatch.undo()
    assert capsys.readouterr().out == "", "a missing standard error is not replaced by standard output"
    (event,) = read_events(tmp_path / "out")
    assert (event["event"], event["rank"], event["step"], event["text"]) == ("control", 0, -1, "kept as an event")
    assert messages.faults == []


def test_what_the_stream_cannot_encode_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    warn("layer \u2192 \u00e9", 3)
    assert raw.getvalue() == b"msprobe [rank 3]: layer \\u2192 \\xe9\n"


def test_only_rank_0_logs_and_every_rank_reports(tmp_path, capsys):
    for rank in (0, 1):
        messages = Messages(RunDirectory.create(tmp_path / str(rank)), rank)
        messages.log("start")
        messages.report("something", "control")
    out, err = capsys.readouterr()
    assert out == "msprobe: start\n"
    assert err == "msprobe [rank 0]: something\nmsprobe [rank 1]: something\n"


def test_an_event_that_cannot_be_written_is_noted(tmp_path):
    class Full:
        def append_event(self, event):
            raise OSError("no space left")

    messages = Messages(Full(), 0)
    messages.report("something", "control")
    assert messages.faults == ["events: OSError: no space left"]
