"""Work shared among processes that were launched together: who does what, and all results on every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm

Item = TypeVar("Item")
_PROGRESS_DELAY = 2.0  # seconds


def launched() -> PartialState:
    """Return this process among those that `accelerate launch` or torchrun started together; alone, it is the only one.

    Without being told that it is on a CPU, accelerate takes processes of torchrun there for so many runs of one.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


def progress(total: int, called: str, unit: str, processes: PartialState | None) -> tqdm[Any]:
    """Return a bar for work of so many units, which appears once it takes seconds, and on the main process alone."""
    silent = processes is not None and not processes.is_main_process
    return tqdm(total=total, desc=called, unit=unit, unit_scale=True, delay=_PROGRESS_DELAY, disable=silent)


def own_share(sizes: Sequence[int], keys: Sequence[str], processes: PartialState | None) -> list[int]:
    """Return the indices of the items that this process works on, largest first; all of them where it is alone.

    Each belongs to exactly one process: the largest that is left goes to the process that has least to do.

    Args:
        sizes: what each item costs, in any unit.
        keys: what identifies each, so that sharing does not depend on the order in which items were read.
        processes: None for this process alone.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], keys[index], index))
    if processes is None:
        return order
    loads = [0] * processes.num_processes
    own = []
    for index in order:
        process = loads.index(min(loads))
        loads[process] += sizes[index]
        if process == processes.process_index:
            own.append(index)
    return own


def gathered(items: list[Item], processes: PartialState | None) -> list[Item]:
    """Return the items of all processes. Every process must come here, or it leaves the others waiting."""
    if processes is None or processes.num_processes == 1:
        return items
    found: list[Item] = gather_object(items)
    return found
