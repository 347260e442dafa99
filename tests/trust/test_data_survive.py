"""Whatever ends the job: every file is whole or absent, and readers open what is there."""

import json
import os

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analyse.load import RunError, open_run
from msprobe_megatron.analyse.summary import summarise
from tests.trust.jobs import flags, killed_at_random, probe_file

pytestmark = pytest.mark.trust

KILLS = int(os.environ.get("MSPROBE_KILLS", "20"))


def readable(out):
    """Every file that has its final name is whole; returns how many steps were found."""
    for path in out.rglob("*"):
        if path.suffix == ".json" and path.stat().st_size:
            json.loads(path.read_text())
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            assert table.num_rows > 0
            assert (path.parent / "sites.json").is_file(), "rows without the stacks that they point to"
    try:
        run = open_run(out)
    except RunError as reason:
        assert "run.json" in str(reason) or "not a directory" in str(reason)
        return 0
    summary = summarise(run)
    assert summary.warnings, "a killed job is told"
    return len(summary.steps)


def test_kill_at_random_moments_leaves_whole_files(tmp_path):
    found = []
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed_at_random(flags(400, probe_file(folder), folder / "out"), seed=number, longest=2.5)
        found.append(readable(folder / "out"))
    # The moments fall before, into and between the writing of steps.
    assert max(found) > 2, found
