import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Runs of the models, each trained once."""
    from tests.jobs.models.runs import ModelRuns

    return ModelRuns(tmp_path_factory.mktemp("models"))
