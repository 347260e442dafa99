import pytest


@pytest.fixture(scope="session")
def runs(jobs, tmp_path_factory):
    """Clean and faulty runs, each trained once."""
    from tests.compare.layouts import Runs

    return Runs(jobs, tmp_path_factory.mktemp("compare"))
