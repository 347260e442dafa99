"""BENCHMARKS.md out of tables: every target with its figure, met or missed, and the command that made it."""

import json

from msprobe_megatron.bench.document import document

MACHINE = {"processor": "p", "cores": 2, "memory_bytes": 1 << 30, "device": "cpu", "load": 0.5, "system": "s"}


def report(bench, *results, **more):
    return {"bench": bench, "machine": MACHINE, "about": "why", "results": list(results), **more}


def test_targets_are_met_or_missed(tmp_path):
    dump = report(
        "dump",
        {"name": "h64:L0", "ratio": 1.7, "target": 1.5},
        {"name": "h64:L1", "ratio": 3.9, "target": 4.0},
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
    for content in (dump, compare):
        (tmp_path / f"{content['bench']}.json").write_text(json.dumps(content))
    text = document(tmp_path)
    for line in (
        "| dump h64:L0 | 1.7 | ≤ 1.5 | MISSED |",
        "| dump h64:L1 | 3.9 | ≤ 4 | met |",
        "| compare rows | 61 | ≤ 60 | MISSED |",
        "| compare tensors | 1.9 | ≥ 2 | MISSED |",
        "| compare others | 2.1 | ≥ 2 | met |",
        "`msprobe-megatron bench dump --only h64`",
        "Why missed, by profile: h64:L0: hooks",
    ):
        assert line in text, line
    assert "h64:plain |" not in text.partition("## Dump")[0]
