"""Sharing rows out over plain threads, for kernels that release the interpreter lock.

No OpenMP of its own, so it is safe next to torch's and inside an engine's worker.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """torch works in the calling thread alone meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def share_out(rows: int, work: Callable[[int, int], None]) -> None:
    """``work(start, stop)`` over equal shares of the rows, one for each of torch's threads."""
    workers = min(torch.get_num_threads(), rows)
    if workers <= 1:
        work(0, rows)
        return
    edges = [rows * i // workers for i in range(workers + 1)]
    tasks = [_pool(os.getpid()).submit(work, lo, hi) for lo, hi in itertools.pairwise(edges[:-1])]
    work(edges[-2], rows)
    for task in tasks:
        task.result()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """One pool a process (a forked child has none of its parent's threads)."""
    return ThreadPoolExecutor(os.cpu_count(), "compare", initializer=_spread)


def _spread() -> None:
    """Let this thread run wherever any thread of the process may.

    An engine's worker binds each of its threads to a core; a thread started there would stay on
    its parent's.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            try:
                allowed |= os.sched_getaffinity(int(task))
            except ProcessLookupError:  # the thread has ended meanwhile
                continue
        os.sched_setaffinity(0, allowed)
