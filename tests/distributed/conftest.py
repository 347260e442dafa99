import pytest

from tests.distributed.layouts import Jobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))
