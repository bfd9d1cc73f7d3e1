import pytest

from tests.shared.updates import maker


@pytest.fixture
def make(tiny, tmp_path):
    """The function `make` of tests/shared/updates.py."""
    return maker(tiny, tmp_path)
