"""Networks with real weights and real data, made once; without the data their tests are skipped."""

import pytest
import torch

from support.accuracy import text, vision
from support.accuracy.packages import MissingDataError


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Two threads on cores that other tests keep busy wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case_or_skip(make):
    try:
        return make()
    except MissingDataError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def lite0():
    return case_or_skip(vision.lite0_case)


@pytest.fixture(scope="session")
def minilm():
    return case_or_skip(text.minilm_case)


@pytest.fixture(scope="session")
def fashion():
    """Images and labels to train with, and to test with."""
    return case_or_skip(lambda: (*vision.fashion("train"), *vision.fashion("t10k")))
