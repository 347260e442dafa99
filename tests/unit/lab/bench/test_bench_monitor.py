"""`msprobe-megatron bench monitor`: one line a variant, under the names that others rely on."""

import json
import subprocess
import sys

from msprobe_megatron.config import from_document
from msprobe_megatron.lab.bench.tables.monitor import TARGETS, VARIANTS, off_step_seconds

NAMES = ["plain", "boundaries", "all", "gradients", "every_100"]


def test_json_has_a_line_for_every_variant(tmp_path):
    command = [sys.executable, "-m", "msprobe_megatron.cli", "bench", "monitor", "--json", "--only", "h64"]
    command += ["--turns", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    results = {line["name"]: line for line in json.loads(done.stdout)["results"]}
    assert list(results) == [f"h64:{name}" for name in NAMES]
    assert results["h64:plain"]["ratio"] == 1.0
    assert all(line["ratio"] > 0 and line["target"] == TARGETS.get(name) for name, line in results.items())
    rows = {name: results[f"h64:{name}"]["rows"] for name in NAMES}
    assert 0 < rows["boundaries"] < rows["gradients"] < rows["all"] == rows["every_100"]
    assert list((tmp_path / "runs/monitor_h64/h64_all_0/monitor/rank_00000").glob("steps_*.parquet"))


def test_the_variants_ask_for_what_their_names_say():
    boundaries, everything, gradients, rarely = (from_document(VARIANTS[name], name).monitor for name in NAMES[1:])
    assert boundaries.activations and not boundaries.gradients and not boundaries.optimizer
    assert [target.name for target in boundaries.targets] == [f"decoder.layers.{n}" for n in range(4)]
    assert everything.activations and everything.gradients and everything.optimizer and everything.every == 1
    assert gradients.gradients and gradients.optimizer and not gradients.activations
    assert rarely.every == 100 and (rarely.activations, rarely.gradients, rarely.optimizer) == (True, True, True)


def test_steps_that_are_not_watched_are_timed_without_a_model():
    assert off_step_seconds() > 0
