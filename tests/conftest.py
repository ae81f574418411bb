"""What every test shares: no network, no display, one seed, and threads that do not fight over two cores."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Before torch is imported, so that the processes that tests start inherit it; tiny models gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# An example that took long on a busy machine is no fault.
hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the file that takes longest first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: "test_quickstart" not in item.nodeid)
