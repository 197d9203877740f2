"""Run tasks in worker processes, each under a limit of time and of memory, and replace a worker that is lost."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock

import torch
from models import family_of
from parity_meanings import check_meanings
from parity_names import NameCheck
from parity_records import Record, Task, message_of, source_of_featx
from parity_values import check_values, is_out_of_memory

# Fills in the record of one model.
Check = Callable[[Record], None]

# New processes, with nothing of this one's state; torch must not be forked after it has started threads.
_PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """What workers do; both functions belong to a module, so that they can be sent to another process.

    Attributes:
        family_of: from the names of a library and a model to that of a family.
        start: called once in each worker with the folder of the results, returns what fills in the records.
    """

    family_of: Callable[[str, str], str]
    start: Callable[[Path], Check]


@dataclass(frozen=True)
class Limits:
    """What one task may use.

    Attributes:
        seconds: time for one model.
        gibibytes: memory for one worker.
        models: how many models a worker does before a fresh one takes over.
    """

    seconds: float
    gibibytes: float
    models: int


def start_parity(folder: Path) -> Check:
    """Return the checks of the parity sweep."""
    checks: dict[str, Check] = {
        "names": NameCheck(folder).run, "values": check_values, "meanings": check_meanings
    }  # fmt: skip
    return lambda record: checks[record.check](record)


PARITY = Job(family_of, start_parity)


def run_all(
    tasks: Iterable[Task],
    jobs: int,
    limits: Limits,
    folder: Path,
    on_record: Callable[[Record], None],
    job: Job,
) -> None:
    """Do all tasks with `jobs` workers; `on_record` is called for each, in one thread at a time."""
    queue: SimpleQueue[Task] = SimpleQueue()
    for task in tasks:
        queue.put(task)
    lock = Lock()

    def work() -> None:
        with _Worker(limits, folder, job) as worker:
            while True:
                try:
                    task = queue.get_nowait()
                except Empty:
                    return
                record = worker.do(task)
                with lock:
                    on_record(record)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()


class _Worker:
    """One process that does one task after the other; a context manager that ends it."""

    def __init__(self, limits: Limits, folder: Path, job: Job) -> None:
        self._limits = limits
        self._folder = folder
        self._job = job
        self._done = 0
        self._start()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def do(self, task: Task) -> Record:
        """Return what the process finds, or a record that says how it was lost."""
        if self._done >= self._limits.models:
            self._restart()
        self._done += 1
        self._pipe.send(task)
        try:
            if self._pipe.poll(self._limits.seconds):
                return self._pipe.recv()
            problem = f"too slow: over {self._limits.seconds:g} s"
        except (EOFError, ConnectionError):
            self._process.join()
            problem = f"crashed: exit code {self._process.exitcode}"
        self._restart()
        family = self._job.family_of(task.library, task.model)
        return Record(task.check, task.library, task.model, family, problem=problem)

    def _start(self) -> None:
        self._pipe, other = _PROCESSES.Pipe()
        arguments = (other, self._limits.gibibytes, self._folder, self._job)
        self._process = _PROCESSES.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        if not self._is_ready():
            raise RuntimeError("a worker could not start; what it printed above says why")
        self._done = 0

    def _is_ready(self) -> bool:
        # Otherwise a featx that cannot be imported would look like a crash of every model.
        try:
            return bool(self._pipe.recv())
        except EOFError:
            return False

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _restart(self) -> None:
        self._stop()
        self._start()


def _serve(pipe: Connection, gibibytes: float, folder: Path, job: Job) -> None:
    limit = int(gibibytes * 2**30)
    # Data, not address space: the mapped libraries of torch are large and take no memory of their own.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # sums come out the same each time, and workers do not take each other's cores
    source = source_of_featx()
    check = job.start(folder)
    pipe.send(True)
    while True:
        task: Task = pipe.recv()
        family = job.family_of(task.library, task.model)
        record = Record(task.check, task.library, task.model, family, source=source)
        try:
            check(record)
        except Exception as error:  # the sweep goes on, and the report lists what was raised
            record.modes = {}
            record.problem = f"failed: {message_of(error)}"
            if is_out_of_memory(error):
                weights = record.parameters * 4 / 2**30
                record.problem = f"too large: {weights:.1f} GiB of weights, limit {gibibytes:g} GiB of memory"
        pipe.send(record)
