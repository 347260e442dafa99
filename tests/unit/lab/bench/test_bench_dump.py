"""`msprobe-megatron bench dump`: one line a variant, under the names that others rely on; cost grows with the rows."""

import json
import subprocess
import sys

NAMES = ["plain", "loaded", "L0", "L1", "mix", "L0+digest", "L1+digest", "mix+digest"]


def test_json_has_a_line_for_every_variant(tmp_path):
    command = [sys.executable, "-m", "msprobe_megatron.cli", "bench", "dump", "--json", "--only", "h64", "--turns", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=True, timeout=300)
    results = {line["name"]: line for line in json.loads(done.stdout)["results"]}
    assert list(results) == [f"h64:{name}" for name in NAMES]
    assert results["h64:plain"]["ratio"] == 1.0
    assert all(line["ratio"] > 0 and line["training_ratio"] > 0 for line in results.values())
    rows = {name: results[f"h64:{name}"]["rows"] for name in NAMES}
    assert rows["loaded"] == 0 < rows["L0"] == rows["L0+digest"] < rows["L1"] == rows["L1+digest"] < rows["mix"]
    assert (tmp_path / "runs/dump_h64/h64_L1_0/step_000001/rank_00000/records.parquet").is_file()
