"""A tokenizer whose tokens are letters and words of letters."""

import pytest


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.make_tokenizer()
