"""Run directories and dumps may come from strangers: readers answer with their own errors, and write nothing."""

import os
import random
import shutil

import pytest

from msprobe_megatron.cli import main
from tests.jobs.trust.damage import CASES, damage, tried
from tests.jobs.trust.jobs import EVERYTHING, flags, probe_file, train
from tests.support.forked import run_forked

pytestmark = pytest.mark.trust

# Every command that reads a run; OUT is a place of the case's own.
COMMANDS = (
    ["summary"],
    ["diagnose"],
    ["patches"],
    ["compare", "GOOD", "RUN", "--out", "OUT"],
    ["compare", "RUN", "GOOD"],
    ["report", "RUN", "--against", "GOOD", "--out", "OUT.html"],
    ["watch", "RUN", "--once"],
    ["scaling", "RUN", "GOOD", "--out", "OUT"],
    ["env-diff", "GOOD", "RUN"],
    ["ctl", "RUN", "--next", "3"],
    *(
        ["export", "RUN", "--format", form, "--out", "OUT"]
        for form in ("csv", "tensorboard", "msprobe", "trend-db", "vis-db", "monitor-csv", "free_benchmark")
    ),
)


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    config = probe_file(folder, "steps: [0, 1]\n" + EVERYTHING.replace("level: mix,", "level: L0, task: tensor,"))
    run_forked(1, train, flags(2, config, folder / "out"))
    return folder / "out"


@pytest.mark.parametrize("command", ["summary", "diagnose", "report"])
def test_names_of_columns_that_are_no_text(good_run, tmp_path, capsys, monkeypatch, command):
    """The readers of Parquet answer with bare errors of their own: still one line, and no traceback."""
    monkeypatch.chdir(tmp_path)  # where a page would go
    shutil.copytree(good_run, tmp_path / "run")
    for path in (tmp_path / "run").rglob("records.parquet"):
        data = path.read_bytes()
        assert b"microbatch" in data
        path.write_bytes(data.replace(b"microbatch", b"micro\xffatch"))
    assert main([command, str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: f"{words[0]}-{words[-3] if 'export' in words else ''}")
def test_damaged_run_directories(good_run, tmp_path, capsys, command):
    """No traceback: exit codes 0, 1 or 2, one line when it cannot be done, and nothing written but what was asked."""
    source = random.Random(f"{command} {os.environ.get('MSPROBE_FUZZ_SEED', '0')}")
    cases = max(1, CASES // len(COMMANDS))
    for case in range(cases):
        copy, out = tmp_path / str(case), tmp_path / f"out_{case}"
        shutil.copytree(good_run, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        for path in source.sample(files, source.randint(1, 2)):
            damage(path, source)
        before = contents(copy)
        words = command if len(command) > 1 else [*command, "RUN"]
        places = {"GOOD": str(good_run), "RUN": str(copy), "OUT": str(out), "OUT.html": f"{out}.html"}
        code = main([places.get(word, word) for word in words])
        printed = capsys.readouterr()
        assert code in (0, 1, 2), (case, printed.err)
        if code == 2:
            assert printed.err.startswith("msprobe-megatron: ")
        written = {name for name, content in contents(copy).items() if before.get(name) != content}
        assert written <= ({"control.json"} if "ctl" in command else set())
        assert {path.name for path in tmp_path.iterdir()} <= {copy.name, out.name, f"{out.name}.html"}
        shutil.rmtree(copy)
        shutil.rmtree(out, ignore_errors=True)
        for left in tmp_path.iterdir():
            left.unlink()
    tried(cases)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


EVIL = ("../../../up", "/etc/passwd", "a\0b", "x" * 4096, "</script><script>alert(1)", "=cmd()", "\x1b]0;owned\x07")


@pytest.fixture(scope="module")
def evil_run(good_run, tmp_path_factory):
    """A run in which every name, path and class is one that wants to be something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    copy = tmp_path_factory.mktemp("evil") / "run"
    shutil.copytree(good_run, copy)
    for path in copy.rglob("*.parquet"):
        table = pq.read_table(path)
        for column in ("name", "path", "op"):
            names = pa.array([EVIL[i % len(EVIL)] + str(i // len(EVIL)) for i in range(table.num_rows)], pa.string())
            place = table.schema.get_field_index(column)
            table = table.set_column(place, column, names.cast(table.schema.field(place).type))
        pq.write_table(table, path)
    return copy


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: f"{words[0]}-{words[-3] if 'export' in words else ''}")
def test_names_that_want_to_be_paths_scripts_or_formulas(evil_run, tmp_path, capsys, monkeypatch, command):
    """Whatever a row is called, files are written below what was asked for, and no reader of them is steered."""
    out = tmp_path / "deep/er/out"
    out.parent.mkdir(parents=True)
    monkeypatch.chdir(out.parent)
    before = contents(evil_run)
    words = command if len(command) > 1 else [*command, "RUN"]
    places = {"GOOD": str(evil_run), "RUN": str(evil_run), "OUT": str(out), "OUT.html": f"{out}.html"}
    code = main([places.get(word, word) for word in words])
    printed = capsys.readouterr()
    refused = ("too few steps", "the job has ended; nothing reads an order")
    assert code in (0, 1) or any(text in printed.err for text in refused)
    assert not any(steering in printed.out + printed.err for steering in ("\x1b]0;", "\x07", "\0"))
    assert set(contents(evil_run)) - set(before) <= {"control.json"}
    assert {path.name for path in tmp_path.rglob("*")} & {"up", "up0", "passwd", "passwd0"} == set()
    assert {path.name for path in out.parent.iterdir()} <= {out.name, f"{out.name}.html"}
    (evil_run / "control.json").unlink(missing_ok=True)
    for path in tmp_path.rglob("*"):
        if path.suffix == ".html":
            assert "</script><script>alert" not in path.read_text()
        if path.suffix == ".csv":
            cells = path.read_text().replace("\n", ",").split(",")
            assert not any(cell.strip('"').startswith("=cmd") for cell in cells)


def test_archives_are_not_unpacked(tmp_path, capsys):
    """A run or a dump in an archive is not looked into, whatever its members are called."""
    import tarfile
    import zipfile

    (tmp_path / "note").write_text("x")
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "note", "../../outside")
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("../../outside", "x")
    before = contents(tmp_path)
    for name in ("run.tar.gz", "run.zip"):
        for words in (["summary"], ["diagnose"], ["import", "--out", str(tmp_path / "out")], ["report"]):
            assert main([words[0], str(tmp_path / name), *words[1:]]) == 2
            assert capsys.readouterr().err.startswith("msprobe-megatron: ")
    assert contents(tmp_path) == before and not (tmp_path.parent.parent / "outside").exists()
