"""`optimize` collects garbage: all that torch imported need not be walked each time."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
