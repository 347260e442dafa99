import pytest

from tests.unit.hosts.launching.stub import Bench


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "probe.yaml").write_text("steps: [0]\ndump: {level: L0, task: statistics}\n")
    return Bench(tmp_path)
