import pytest


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs of every layout, each trained once for all tests."""
    from tests.distributed.layouts import Jobs

    return Jobs(tmp_path_factory.mktemp("jobs"))
