import pytest


@pytest.fixture(scope="session")
def law_runs(tmp_path_factory):
    """Clean and faulty runs, each trained once for all laws."""
    from tests.jobs.laws.runs import LawRuns

    return LawRuns(tmp_path_factory.mktemp("laws"))
