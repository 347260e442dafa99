"""BENCHMARKS.md out of tables: every target with its figure, met or missed, and the command that made it."""

import json

from msprobe_megatron.lab.bench.profiles.targets import verdicts
from msprobe_megatron.report.terminal.bench import markdown_table
from tools.bench.document import document

MACHINE = {"processor": "p", "cores": 2, "memory_bytes": 1 << 30, "device": "cpu", "load": 0.5, "system": "s"}


def report(bench, *results, **more):
    return {"bench": bench, "machine": MACHINE, "about": "why", "results": list(results), **more}


def test_targets_are_met_or_missed(tmp_path):
    dump = report(
        "dump",
        {"name": "h64:L0", "ratio": 1.7, "target": 1.5, "uncertainty": 0.0123},
        {"name": "h64:L1", "ratio": 3.9, "target": 4.0, "extra_bytes": 65 << 20, "asked": {"extra_bytes": 64 << 20}},
        {"name": "h64:plain", "ratio": 1.0, "target": None},
        command="msprobe-megatron bench dump --only h64",
        profiles=["h64:L0: hooks"],
    )
    compare = report(
        "compare",
        {"name": "rows", "seconds": 61.0, "target": 60},
        {"name": "tensors", "GB_a_second": 1.9, "target": 2.0},
        {"name": "others", "GB_a_second": 2.1, "target": 2.0},
    )
    large = report(
        "dump",
        {"name": "h1024:L1", "ratio": 1.1, "target": 1.12},
        command="msprobe-megatron bench dump --only h1024",
        peer="26.2.0",
    )
    for name, content in {"dump_h64": dump, "dump_h1024": large, "compare": compare}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "h64_task.json").write_text("[]")
    text = document(tmp_path)
    for line in (
        "| dump h64:L0 | 1.7 ± 0.012 | ≤ 1.5 | MISSED |",
        "| dump h64:L1 | 3.9 | ≤ 4 | met |",
        "| compare rows seconds | 61 | ≤ 60 | MISSED |",
        "| compare tensors GB/s | 1.9 | ≥ 2 | MISSED |",
        "| compare others GB/s | 2.1 | ≥ 2 | met |",
        "| dump h64:L1 added memory | 65.0 MiB | ≤ 64.0 MiB | MISSED |",
        "| dump h1024:L1 | 1.1 | ≤ 1.12 | met |",
        "3 of 7 are met.",
        "`msprobe-megatron bench dump --only h1024`; PYTHON has mindstudio-probe 26.2.0",
        "`msprobe-megatron bench dump --only h64`",
        "Why missed, by profile: h64:L0: hooks",
    ):
        assert line in text, line
    assert "h64:plain |" not in text.partition("## Dump")[0]


def test_parts_of_a_bench_stand_together_and_models_have_a_section_of_their_own(tmp_path):
    for name in ("perturb_h64", "perturb_all", "perturb_h512", "scaling"):
        line = {"name": f"of {name}", "ratio": 1.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(report(name.partition("_")[0], line)))
    text = document(tmp_path)
    places = [text.index(f"of {name}") for name in ("perturb_h64", "perturb_h512", "perturb_all", "scaling")]
    assert places == sorted(places)
    assert text.count("## Perturb") == 2


def test_what_is_asked_of_each_kind_of_figure():
    lines = [
        {"name": "a", "share": 0.9, "target": 0.8},
        {"name": "b", "error": -0.03, "target": 0.02},
        {
            "name": "c",
            "ratio": 1.0,
            "microseconds": 12.0,
            "target": 1.1,
            "asked": {"microseconds": 10, "extra_bytes": 5},
        },
        {"name": "d", "host_synchronisations": 0, "asked": {"host_synchronisations": 1}},
        {"name": "e", "ratio": 1.2, "seconds": 0.5, "share": 2.0, "target": 1.1},
    ]
    found = [(verdict.label, verdict.met) for verdict in verdicts(lines)]
    assert found == [
        ("a of the plain speed", True),
        ("b error", False),
        ("c", True),
        ("c µs a row", False),
        ("d host synchronisations", True),
        ("e", False),  # a line that has a ratio is asked about its ratio
    ]


def test_bytes_of_any_number_of_ranks_are_sizes():
    table = markdown_table([{"name": "model:L1", "bytes": 1 << 20, "bytes_of_16_ranks": 3 << 30}])
    assert "| model:L1 | 1.0 MiB | 3.0 GiB |" in table and "bytes of 16 ranks" in table
