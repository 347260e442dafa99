"""The run directory: whole files or none, private, no links followed, one run each."""

import errno
import json
import multiprocessing
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from msprobe_megatron.run_directory.directory import RunDirectory, RunDirectoryError, read_events
from msprobe_megatron.run_directory.safe_files import json_text


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=["umask000", "umask022", "umask777"])
def any_umask(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    before = os.umask(request.param)
    yield
    os.umask(before)


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_everything_is_private_whatever_the_umask(tmp_path: Path, any_umask: None) -> None:
    root = tmp_path / "deep" / "er" / "run"
    directory = RunDirectory.create(root)
    directory.claim_rank(0)
    directory.write_json("run.json", {})
    directory.write_json("step_000001/rank_00000/sites.json", {})
    directory.append_event({"event": "x"})
    made = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in made}
    assert len(modes) == 3 + 3 + 4  # deep, er, run; ranks, step, rank; four files
    for name, mode in modes.items():
        assert mode == (0o700 if (tmp_path / name).is_dir() else 0o600), name


def test_parents_that_exist_keep_their_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    os.chmod(tmp_path / "shared", 0o755)
    RunDirectory.create(tmp_path / "shared" / "run")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755


def test_write_replaces_and_returns_the_size(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_json("run.json", {"a": 1})
    size = directory.write_json("run.json", {"a": 2, "b": [1, 2]})
    assert json.loads((tmp_path / "run/run.json").read_text()) == {"a": 2, "b": [1, 2]}
    assert (tmp_path / "run/run.json").stat().st_size == size
    assert tree(tmp_path / "run") == {"run.json"}


@pytest.mark.parametrize("moment", ["fill", "fsync", "rename"])
@pytest.mark.parametrize("existing", [False, True])
def test_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existing: bool) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_json("step_000001/other.json", {})
    if existing:
        directory.write_json("step_000001/facts.json", {"old": True})
    before = tree(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(file: IO[bytes]) -> None:
        file.write(b"half of it")
        if moment == "fill":
            fail()

    if moment != "fill":
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="No space left"):
        directory.write_file("step_000001/facts.json", fill)
    monkeypatch.undo()
    assert tree(tmp_path) == before
    if existing:
        assert json.loads((tmp_path / "run/step_000001/facts.json").read_text()) == {"old": True}


def test_nothing_is_visible_under_its_name_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    order = []
    for name in ("fsync", "rename"):
        original = getattr(os, name)

        def spy(*args: object, _name: str = name, _original=original, **kwargs: object) -> None:  # type: ignore[no-untyped-def]
            order.append((_name, sorted(tree(tmp_path / "run"))))
            _original(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    directory.write_json("run.json", {})
    assert [name for name, _ in order] == ["fsync", "rename", "fsync"]
    assert all("run.json" not in files for _, files in order[:2]) and order[2][1] == ["run.json"]


@pytest.mark.parametrize("place", ["root", "folder", "deep_folder", "dangling", "events", "claim"])
def test_links_are_refused(tmp_path: Path, place: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "file").write_text("precious")
    if place == "root":
        root.symlink_to(outside)
        with pytest.raises(RunDirectoryError, match=r"run: is a symbolic link.*name its target"):
            RunDirectory.create(root)
        with pytest.raises(RunDirectoryError, match="symbolic link"):
            RunDirectory.open(root)
        return
    directory = RunDirectory.create(root)
    if place == "folder":
        (root / "step_000001").symlink_to(outside)
        with pytest.raises(RunDirectoryError, match="step_000001: is a symbolic link"):
            directory.write_json("step_000001/facts.json", {})
    elif place == "deep_folder":
        (root / "step_000001").mkdir()
        (root / "step_000001" / "rank_00000").symlink_to(outside)
        with pytest.raises(RunDirectoryError, match="step_000001/rank_00000: is a symbolic link"):
            directory.write_json("step_000001/rank_00000/facts.json", {})
    elif place == "dangling":
        (root / "ranks").symlink_to(tmp_path / "nowhere")
        with pytest.raises(RunDirectoryError, match="ranks: is a symbolic link"):
            directory.claim_rank(0)
        assert not (tmp_path / "nowhere").exists()
    elif place == "events":
        (root / "events.jsonl").symlink_to(outside / "file")
        with pytest.raises(OSError):
            directory.append_event({"event": "x"})
    else:
        (root / "ranks").mkdir()
        (root / "ranks" / "rank_00000.json").symlink_to(outside / "file")
        with pytest.raises(RunDirectoryError, match="already holds a run"):
            directory.claim_rank(0)
    assert tree(outside) == {"file"} and (outside / "file").read_text() == "precious"


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    directory = RunDirectory.create(tmp_path / "run")
    (tmp_path / "run" / "run.json").symlink_to(target)
    directory.write_json("run.json", {"a": 1})
    assert target.read_text() == "precious"
    assert not (tmp_path / "run" / "run.json").is_symlink()


def test_root_swapped_for_a_link_later_is_not_followed(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "other")
    directory.write_json("run.json", {})
    assert tree(tmp_path / "other") == set() and tree(tmp_path / "moved") == {"run.json"}


@pytest.mark.parametrize("name", ["../x", "a/../x", "/etc/x", "", "a//b", ".hidden", "a/.", "a b", "x\0y", "n" * 300])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="accepted: letters"):
        directory.write_json(name, {})
    assert tree(tmp_path) == set()


def test_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirectoryError, match="run: is not a directory"):
        RunDirectory.create(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="run: is not a directory"):
        RunDirectory.create(tmp_path / "run" / "deep")
    with pytest.raises(RunDirectoryError, match="is not a directory; accepted"):
        RunDirectory.open(tmp_path / "missing")


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run")
    first.claim_rank(3)
    first.claim_rank(4)
    assert json.loads((tmp_path / "run/ranks/rank_00003.json").read_text())["rank"] == 3
    second = RunDirectory.create(tmp_path / "run")
    message = f"{tmp_path}/run already holds a run; choose another --msprobe-output or remove it"
    with pytest.raises(RunDirectoryError) as caught:
        second.claim_rank(3)
    assert str(caught.value) == message
    first.write_json("ranks/rank_00003.json", {"closed": True})  # the owner may rewrite it
    with pytest.raises(RunDirectoryError):
        second.claim_rank(3)
    assert json.loads((tmp_path / "run/ranks/rank_00003.json").read_text()) == {"closed": True}


def _claim(root: Path, queue) -> None:  # type: ignore[no-untyped-def]
    try:
        RunDirectory.create(root).claim_rank(0)
        queue.put("claimed")
    except RunDirectoryError:
        queue.put("refused")


def test_only_one_of_many_processes_gets_a_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_claim, args=(tmp_path / "a" / "run", queue)) for _ in range(6)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(answers) == ["claimed"] + ["refused"] * 5


def test_close_twice(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.close()
    directory.close()
    with pytest.raises(OSError):
        directory.write_json("run.json", {})


def _append(root: Path, rank: int, count: int) -> None:
    directory = RunDirectory.open(root)
    for k in range(count):
        directory.append_event({"event": "note", "rank": rank, "k": k, "text": "x" * (37 * (k % 50))})


def test_events_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(tmp_path / "run", rank, 200)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    events = read_events(tmp_path / "run")
    assert len(events) == 800
    for rank in range(4):
        mine = [event for event in events if event["rank"] == rank]
        assert [event["k"] for event in mine] == list(range(200))
        assert all(event["text"] == "x" * (37 * (event["k"] % 50)) for event in mine)


def test_torn_and_broken_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    directory = RunDirectory.create(tmp_path / "run")
    directory.append_event({"event": "one", "text": "new\nline ünï"})
    file = tmp_path / "run" / "events.jsonl"
    whole = file.read_bytes()
    for cut in range(1, len(whole) - 1):
        file.write_bytes(whole + whole[:cut])
        assert read_events(tmp_path / "run") == [{"event": "one", "text": "new\nline ünï"}]
    file.write_bytes(whole + whole[:-1])
    assert len(read_events(tmp_path / "run")) == 2, "complete but for the end of line"
    file.write_bytes(whole + b'{"half": \xff\n' + b"[1]\n" + whole)
    events = read_events(tmp_path / "run")
    assert [event["event"] for event in events] == ["one", "unreadable", "unreadable", "one"]
    assert events[1]["line"] == 2 and "line 2" in events[1]["text"]


def test_short_write_of_an_event_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="5 of"):
        directory.append_event({"event": "one"})


def test_facts_that_json_has_no_word_for() -> None:
    import enum

    import numpy as np
    import torch

    class Mode(str, enum.Enum):
        fast = "f"

    class Level(enum.IntEnum):
        high = 3

    deep: dict[str, object] = {}
    deep["self"] = deep
    value = {
        "inf": float("inf"),
        "nan": np.float64("nan"),
        "small": 1e-300,
        1: True,
        None: None,
        "dtype": torch.bfloat16,
        "path": Path("a/b"),
        "set": {3, 1, 2},
        "numpy": np.int64(7),
        "mode": Mode.fast,
        "tuple": (1, [2.5, "x"]),
        "surrogate": "\udc80",
    }
    found = json.loads(json_text(value))
    assert found == {
        "inf": "inf",
        "nan": "nan",
        "small": 1e-300,
        "1": True,
        "None": None,
        "dtype": "torch.bfloat16",
        "path": "a/b",
        "set": [1, 2, 3],
        "numpy": 7,
        "mode": str(Mode.fast),
        "tuple": [1, [2.5, "x"]],
        "surrogate": "\udc80",
    }
    assert json_text(Level.high) == json.dumps(str(Level.high))
    assert json_text(deep).endswith('"..."' + "}" * 64)


def test_a_parent_that_everybody_may_write_is_refused_unless_sticky(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(RunDirectoryError, match="sticky"):
        RunDirectory.create(shared / "out")
    assert not (shared / "out").exists()
    shared.chmod(0o1777)
    RunDirectory.create(shared / "out").close()
    assert (shared / "out").is_dir()
