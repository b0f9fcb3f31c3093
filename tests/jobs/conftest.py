import time
from collections.abc import Callable

import pytest

from videoattn.jobs import Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "out") as opened:
        yield opened


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(name="wait_for")
def _wait_for():
    return wait_for
