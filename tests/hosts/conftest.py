"""Checkouts of real hosts, given by environment variables; the end of the test run says which were not there."""

import os
from pathlib import Path

import pytest

from tests.hosts.megatron_lm import Host

# Variable -> what is not tested without it.
VARIABLES = {
    "MEGATRON_LM_PATH": "the unedited pretrain_gpt.py of Megatron-LM",
    "MINDSPEED_PATH": "MindSpeed's own patch manager",
    "MODELLINK_PATH": "ModelLink's own recipes, started and trained",
    "MINDSPEED_LLM_PATH": "MindSpeed-LLM's own recipes, started and trained",
}


def checkout(variable: str, must_hold: str) -> Path:
    """The checkout that `variable` names; without one the test is skipped, with a wrong one it fails."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"${variable} names no checkout: {VARIABLES[variable]} is not tested")
    path = Path(value).expanduser().resolve()
    if not (path / must_hold).exists():
        pytest.fail(f"${variable}={value}: there is no {must_hold} in it")
    return path


@pytest.fixture(scope="session")
def megatron_lm() -> Host:
    return Host(checkout("MEGATRON_LM_PATH", "pretrain_gpt.py"))


@pytest.fixture(scope="session")
def mindspeed() -> Path:
    return checkout("MINDSPEED_PATH", "mindspeed/patch_utils.py")


def pytest_terminal_summary(terminalreporter):
    for variable, what in VARIABLES.items():
        if not os.environ.get(variable):
            terminalreporter.write_line(f"NOT TESTED: {what} (set {variable} to a checkout)", yellow=True)
