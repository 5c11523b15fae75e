"""A browser for the tests that look at pages (`make pages` runs them)."""

import pytest

from tests.pictures.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
