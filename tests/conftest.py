import pytest


@pytest.fixture(scope="session")
def device():
    """A process with the simulated device, Megatron imported; runs functions in forked ranks."""
    from tests.support.device import DeviceProcess

    with DeviceProcess() as process:
        yield process


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs of every layout, each trained once for all tests."""
    from tests.jobs.distributed.layouts import Jobs

    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def peer(tmp_path_factory):
    """The published msprobe in an environment of its own: its bin directory."""
    from tests.unit.report.msprobe.peer import PeerMissing, make_peer

    try:
        return make_peer(tmp_path_factory.mktemp("peer") / "env")
    except PeerMissing as reason:
        pytest.skip(f"PEER NOT TESTED: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Units before jobs: what fails first is then the smallest thing that is broken."""
    items.sort(key=lambda item: "/tests/jobs/" in item.path.as_posix())
