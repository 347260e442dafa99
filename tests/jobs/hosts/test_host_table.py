"""tools/host_table.py: rows of other hosts stay, new ones take the place of old ones; the README's come from them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("host_table", ROOT / "tools/host_table.py")
host_table = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = host_table
spec.loader.exec_module(host_table)

PAGE = f"before\n{host_table.BEGIN}\n{host_table.END}\nafter\n"


def row(host, release, count, run="one-line import", state="works"):
    return host_table.line(host, release, "abc", "3.11", run, state, f"{count} passed")


def test_rows_are_merged_by_host_and_release_and_ordered_by_version():
    page = host_table.merged(PAGE, [row("slime", "stand-in", 1), row("Megatron-LM", "main (0.20.0)", 9)])
    page = host_table.merged(page, [row("Megatron-LM", "core_r0.8.0 (0.8.0)", 7)])
    page = host_table.merged(page, [row("Megatron-LM", "core_r0.12.0 (0.12.4)", 8), row("slime", "stand-in", 2)])
    assert host_table.rows_in(page) == [
        row("Megatron-LM", "core_r0.8.0 (0.8.0)", 7),
        row("Megatron-LM", "core_r0.12.0 (0.12.4)", 8),
        row("Megatron-LM", "main (0.20.0)", 9),
        row("slime", "stand-in", 2),
    ]
    assert page.startswith("before\n") and page.endswith("after\n")
    assert host_table.merged(page, []) == page


def test_the_readme_has_a_row_for_each_host_with_the_sum_of_its_tests():
    rows = [row("Megatron-LM", "core_r0.8.0", 7), row("Megatron-LM", "main", 9, "git patch", "fails")]
    page = host_table.merged(PAGE, [*rows, row("slime", "stand-in", 1)])
    _, first, second = host_table.readme_rows(page)
    link = "[megatron_lm.md](docs/hosts/megatron_lm.md)"
    wanted = ["Megatron-LM", "core_r0.8.0, main", "one-line import, git patch", "fails: main", "16 passed", link]
    assert host_table.cells_of(first) == wanted
    assert host_table.cells_of(second)[:2] == ["slime", "stand-in"]


def test_a_row_of_the_host_itself_takes_the_place_of_its_stand_ins():
    page = host_table.merged(PAGE, [row("verl", "stand-in", 1), row("slime", "stand-in", 1)])
    page = host_table.merged(page, [row("verl", "0.9.1", 2)])
    wanted = [row("slime", "stand-in", 1), row("verl", "0.9.1", 2)]
    assert host_table.rows_in(page) == wanted
    assert host_table.rows_in(host_table.merged(page, [row("verl", "stand-in", 1)])) == wanted


def test_outcomes_come_from_pytests_own_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_a[1]"/><testcase name="test_a[2]"/>'
        '<testcase name="test_b"><skipped/></testcase><testcase name="test_c"><failure/></testcase>'
        '<testcase name="test_d"><error/></testcase></testsuite></testsuites>'
    )
    found = host_table.found_in(report)
    assert (found.state, found.text()) == ("fails", "2 passed, 1 skipped, 2 failed")
    ways = {"first": "test_a", "skipped": "test_b", "failed": "test_c", "nowhere": "test_e"}
    assert found.ways(ways) == "first"
    assert host_table.Found().state == "fails"


def test_every_host_has_tests_and_a_page():
    for host in host_table.HOSTS.values():
        assert (ROOT / "docs/hosts" / host.page).is_file()
        files = [ROOT / name.partition("::")[0] for name in host.tests if name.startswith("tests/")]
        text = "".join(path.read_text() for path in files)
        for part in host.ways.values():
            assert f"def {part.partition('[')[0]}" in text, part


def test_the_page_is_as_the_script_writes_it():
    page = host_table.PAGE.read_text()
    assert host_table.rows_in(page)
    assert host_table.merged(page, []) == page


def test_the_readme_is_as_the_script_writes_it():
    readme = host_table.README.read_text()
    if host_table.BEGIN not in readme:
        pytest.skip("the README has no table of hosts between the marks")
    assert host_table.agree() == []
