"""Both cores, bounded memory: a thread pool whose tasks are rows of tensors.

torch releases the interpreter lock in its kernels, so plain threads scale; each runs torch with
one thread of its own (two pools of threads on two cores cost 30%).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from mismatch_audit.weights.checkpoint import Checkpoint

T = TypeVar("T")
R = TypeVar("R")

TASK_ELEMENTS = 1 << 23
_RELEASE_BYTES = 192 << 20


def default_threads() -> int:
    """The cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """torch's own threads off while a pool of ours runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pages:
    """Gives mapped pages back after every 192 MiB, so that resident memory stays flat."""

    def __init__(self, *checkpoints: Checkpoint) -> None:
        self._checkpoints, self._seen, self._lock = checkpoints, 0, threading.Lock()

    def used(self, nbytes: int) -> None:
        with self._lock:
            self._seen += nbytes
            if self._seen < _RELEASE_BYTES:
                return
            self._seen = 0
        for checkpoint in self._checkpoints:
            checkpoint.release()


def run_all(work: Callable[[T], R], tasks: Iterable[T], threads: int) -> list[R]:
    """Results in the order of the tasks. The first exception of a task is raised."""
    with single_threaded_torch():
        if threads == 1:
            return [work(task) for task in tasks]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, tasks))


def row_ranges(rows: int, columns: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Cuts a matrix into tasks of about TASK_ELEMENTS, at multiples of ``multiple`` rows."""
    step = max(1, TASK_ELEMENTS // max(1, columns))
    step = max(multiple, step // multiple * multiple)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
