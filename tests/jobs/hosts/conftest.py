"""Real hosts: checkouts given by environment variables, packages if installed; the end says which were not there."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.jobs.hosts.megatron_lm import Host

# Variable -> what is not tested without it.
VARIABLES = {
    "MEGATRON_LM_PATH": "the unedited pretrain_gpt.py of Megatron-LM",
    "MINDSPEED_PATH": "MindSpeed's own patch manager",
    "MODELLINK_PATH": "ModelLink's own recipes, started and trained",
    "MINDSPEED_LLM_PATH": "MindSpeed-LLM's own recipes, started and trained",
}
# Package -> what is not tested without it.
FRAMEWORKS = {
    "megatron.bridge": "Megatron-Bridge's own callback manager",
    "swift": "ms-swift's own callbacks",
    "verl": "verl's own Megatron engine",
    "slime": "slime's own source",
    "lightning": "Lightning's own Trainer",
}


def folder_of(package: str) -> Path | None:
    """Where a package is installed; nothing of it is imported."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


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
    for package, what in FRAMEWORKS.items():
        if folder_of(package) is None:
            terminalreporter.write_line(f"NOT TESTED: {what} ({package} is not installed)", yellow=True)
