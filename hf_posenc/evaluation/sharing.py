"""Work shared among processes that were launched together: who does what, and all results on every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

Item = TypeVar("Item")


def launched() -> PartialState:
    """Return this process among those that `accelerate launch` or torchrun started together; alone, it is the only one.

    Without being told that it is on a CPU, accelerate takes processes of torchrun there for so many runs of one.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


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
