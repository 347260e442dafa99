"""A file that repeats has its bytes on the disk once, and is a file of its own in every other way."""

import pytest

from msprobe_megatron.run_directory.directory import RunDirectory


@pytest.fixture
def directory(tmp_path):
    found = RunDirectory.create(tmp_path / "run")
    yield found
    found.close()


def test_second_name_shares_the_bytes_and_survives_the_first(directory):
    directory.write_json("step_000001/rank_00000/sites.json", {"a": 1})
    size = directory.repeat_file("step_000001/rank_00000/sites.json", "step_000002/rank_00000/sites.json")
    first, second = (directory.path / f"step_00000{n}/rank_00000/sites.json" for n in (1, 2))
    assert size == first.stat().st_size and first.stat().st_ino == second.stat().st_ino
    assert second.stat().st_mode & 0o777 == 0o600
    directory.write_json("step_000001/rank_00000/sites.json", {"a": 2})
    assert '"a": 1' in second.read_text()


def test_what_is_not_there_or_cannot_be_linked_is_written_anew(directory, monkeypatch):
    assert directory.repeat_file("step_000001/sites.json", "step_000002/sites.json") is None
    directory.write_json("step_000001/sites.json", {})

    def refuse(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr("os.link", refuse)
    assert directory.repeat_file("step_000001/sites.json", "step_000002/sites.json") is None
