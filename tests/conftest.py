import pytest


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs of every layout, each trained once for all tests."""
    from tests.distributed.layouts import Jobs

    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def peer(tmp_path_factory):
    """The published msprobe in an environment of its own: its bin directory."""
    from tests.exchange.peer import PeerMissing, make_peer

    try:
        return make_peer(tmp_path_factory.mktemp("peer") / "env")
    except PeerMissing as reason:
        pytest.skip(f"PEER NOT TESTED: {reason}")
