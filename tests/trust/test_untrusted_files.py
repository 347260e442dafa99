"""Run directories and dumps may come from strangers: readers answer with their own errors, and write nothing."""

import os
import random
import shutil

import pytest

from msprobe_megatron.cli import main
from tests.forked import run_forked
from tests.trust.jobs import flags, probe_file, train

pytestmark = pytest.mark.trust

CASES = int(os.environ.get("MSPROBE_FUZZ_CASES", "60"))


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    config = probe_file(folder, "steps: [0, 1]\ndump: {level: L0}\n")
    run_forked(1, train, flags(2, config, folder / "out"))
    return folder / "out"


def damage(path, source):
    """Change, cut, empty or lengthen a file, or replace it by nonsense."""
    data = bytearray(path.read_bytes())
    how = source.choice(["flip", "cut", "empty", "append", "text", "huge_number", "swap"])
    if how == "flip" and data:
        for _ in range(source.randint(1, 30)):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    elif how == "cut":
        data = data[: source.randrange(len(data) + 1)]
    elif how == "empty":
        data = bytearray()
    elif how == "append":
        data += source.randbytes(200)
    elif how == "text":
        data = bytearray(
            source.choice([b"{}", b"[]", b"null", b'{"a": ', b"\x00\x01\x02", b'{"sizes": 3}', b'{"ranks": 7}'])
        )
    elif how == "huge_number":
        data = bytearray(data.replace(b"1", b"1" * 40))
    else:
        source.shuffle(data)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("command", ["summary", "diagnose", "report"])
def test_names_of_columns_that_are_no_text(good_run, tmp_path, capsys, command):
    """The readers of Parquet answer with bare errors of their own: still one line, and no traceback."""
    shutil.copytree(good_run, tmp_path / "run")
    for path in (tmp_path / "run").rglob("records.parquet"):
        data = path.read_bytes()
        assert b"microbatch" in data
        path.write_bytes(data.replace(b"microbatch", b"micro\xffatch"))
    assert main([command, str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("command", ["summary", "diagnose", "patches"])
def test_damaged_run_directories(good_run, tmp_path, capsys, command):
    """No traceback: exit codes 0, 1 or 2, and one line when it cannot be done."""
    source = random.Random(f"{command} {os.environ.get('MSPROBE_FUZZ_SEED', '0')}")
    for case in range(CASES // 3):
        copy = tmp_path / str(case)
        shutil.copytree(good_run, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        for path in source.sample(files, source.randint(1, 2)):
            damage(path, source)
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        code = main([command, str(copy)])
        printed = capsys.readouterr()
        assert code in (0, 1, 2), (case, printed.err)
        if code == 2:
            assert printed.err.startswith("msprobe-megatron: ")
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        shutil.rmtree(copy)
    print(f"inputs tried: {CASES // 3}")


def test_names_with_terminal_escapes_do_not_reach_the_terminal(good_run, tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    evil = "\x1b[2J\x1b]0;owned\x07../../etc/passwd</script>\r\n"
    copy = tmp_path / "copy"
    shutil.copytree(good_run, copy)
    for path in copy.rglob("records.parquet"):
        table = pq.read_table(path)
        names = pa.array([evil + str(i % 3) for i in range(table.num_rows)], pa.string()).dictionary_encode()
        table = table.set_column(table.schema.get_field_index("name"), "name", names)
        pq.write_table(table, path)
    for command in ("summary", "diagnose"):
        assert main([command, str(copy)]) in (0, 1)
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\x07" not in out
        assert "\r" not in out
