"""scripts/host_table.py: rows of other checkouts stay, new ones take the place of old ones, in order of version."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("host_table", ROOT / "scripts/host_table.py")
host_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host_table)

ROW = "| {} | {} | abc | 3.11 | works | {} passed |"


def test_rows_are_merged_by_checkout_and_ordered_by_version():
    page = f"before\n{host_table.BEGIN}\n{host_table.END}\nafter\n"
    page = host_table.merged(page, [ROW.format("new", "0.16.0", 9), ROW.format("old", "0.8.0", 7)])
    page = host_table.merged(page, [ROW.format("new", "0.16.1", 10), ROW.format("middle", "0.12.0", 8)])
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert lines == [ROW.format("old", "0.8.0", 7), ROW.format("middle", "0.12.0", 8), ROW.format("new", "0.16.1", 10)]
    assert page.startswith("before\n") and page.endswith("after\n")
    assert host_table.merged(page, []) == page


def test_counts_come_from_pytests_own_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" skipped="2" failures="1" errors="1"/></testsuites>')
    assert host_table.counts_of(report) == {"passed": 5, "skipped": 2, "failed": 2}


def test_the_page_has_the_table():
    page = host_table.PAGE.read_text()
    assert host_table.BEGIN in page and host_table.END in page
    assert host_table.merged(page, []) == page
