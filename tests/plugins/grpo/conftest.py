import pytest

from tests.shared.updates import maker


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("lm", scale=4.0)


@pytest.fixture
def make(tiny, tmp_path):
    """The function `make` of tests/shared/updates.py."""
    return maker(tiny, tmp_path)
