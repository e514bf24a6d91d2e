"""Predicting all published runs: one task a run, spread over processes, in a fixed order.

A task is named by plain text, so that it can be sent to another process, which
reads the rows itself; what a scenario breaks comes back as a row without an answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Literal

from ..scenarios.published import published_runs
from ..sim.predict import predict
from ..topology.errors import InputError
from .validation_rows import Unanswered, ValidationRow, rows_of_run

Answer = ValidationRow | Unanswered
Progress = Callable[[int, int], None]
CHUNK = 8  # runs that one process takes at a time: few enough to share the work, enough to share what is read


@dataclass(frozen=True)
class Task:
    """One run to predict: a published run by its id, or a run of the older files with its stages or messages."""

    kind: Literal["public", "run", "message"]
    series: str
    id: str


def answer_tasks(tasks: Sequence[Task], jobs: int | None = None, progress: Progress | None = None) -> list[Answer]:
    """What the tasks give, in their order.

    Args:
        tasks: The runs.
        jobs: Processes; as many as the host has where left out, and none but this one for 1.
        progress: Told the runs done and the runs in all.
    """
    count = jobs if jobs is not None else os.cpu_count() or 1
    chunks = [tasks[begin : begin + CHUNK] for begin in range(0, len(tasks), CHUNK)]
    if count <= 1 or len(chunks) <= 1:
        return _gathered(map(_answer_chunk, chunks), len(tasks), progress)
    others = set(active_children())
    pool = ProcessPoolExecutor(max_workers=min(count, len(chunks)))
    try:
        with _interrupts_held_back():
            asked = [pool.submit(_answer_chunk, chunk) for chunk in chunks]  # starts all workers
        answers = _gathered((future.result() for future in asked), len(tasks), progress)
    except BaseException:
        _leave(pool, [child for child in active_children() if child not in others])
        raise
    pool.shutdown()
    return answers


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Interrupts reach the caller afterwards, and no process that it starts meanwhile.

    A Ctrl-C goes to every process of a terminal; here one of them tells the user and ends the others.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(pool: ProcessPoolExecutor, workers: Sequence[BaseProcess]) -> None:
    """Give up what is being worked on: Python joins a pool's processes before it ends, however long they take.

    They only read files, so there is nothing that they would have to put away. The pool finds itself broken and fails
    what was asked of it; it must not be cancelled first, for Python 3.11 cannot fail what is cancelled.
    """
    for worker in workers:
        worker.kill()
    pool.shutdown(wait=False)


def _gathered(chunks: Iterable[tuple[int, list[Answer]]], total: int, progress: Progress | None) -> list[Answer]:
    answers: list[Answer] = []
    done = 0
    for count, found in chunks:
        answers += found
        done += count
        if progress is not None:
            progress(done, total)
    return answers


def _answer_chunk(tasks: Sequence[Task]) -> tuple[int, list[Answer]]:
    return len(tasks), [answer for task in tasks for answer in answer_task(task)]


def answer_task(task: Task) -> list[Answer]:
    """The rows of one run, or why there are none."""
    try:
        if task.kind == "public":
            run = next(run for run in published_runs(task.series) if run.id == task.id)
            scenario = run.ask()
            return list(rows_of_run(run, scenario, predict(scenario)))
        from .measured_rows import message_row, rows_of_measured_run

        return [message_row(task.id)] if task.kind == "message" else list(rows_of_measured_run(task.id))
    except InputError as error:
        return [Unanswered(task.id, task.series, "; ".join(str(problem) for problem in error.problems))]
    except Exception as error:  # a fault in one prediction must not hide the others; it is counted and fails the whole
        return [Unanswered(task.id, task.series, f"internal: {type(error).__name__}: {error}", fault=True)]
