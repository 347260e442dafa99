import pytest

from tests.jobs.device.jobs import DeviceJobs


@pytest.fixture(scope="session")
def device_jobs(device, tmp_path_factory):
    return DeviceJobs(device, tmp_path_factory.mktemp("device_jobs"))
