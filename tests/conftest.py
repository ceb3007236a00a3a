"""One seed and one thread for every test; Hypothesis draws the same examples each time."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("hypersphere", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("hypersphere")


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)
