"""Reads back what a session wrote."""

import json

import pyarrow.parquet as pq


def steps(out):
    return sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))


def rows(out, step, rank=0):
    return pq.read_table(out / f"step_{step:06d}" / f"rank_{rank:05d}" / "records.parquet").to_pylist()


def faults(out, rank=0):
    ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
    return ledger["faults"], ledger["not_happened"]


def probe(folder, steps="[0, 2]", name="out"):
    path = folder / "probe.yaml"
    path.write_text(f"output: {folder / name}\nsteps: {steps}\ndump: {{level: L0, task: statistics}}\n")
    return path
