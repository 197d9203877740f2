"""Who does the shards of a job: this process, one process for each device, or actors of Ray."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Protocol, cast

import torch

from featx.bulk.extras import require
from featx.bulk.jobs.progress import Progress
from featx.bulk.jobs.shards import PendingSamples, PendingShard, Work, process_shards
from featx.bulk.samples.loading import reason_of
from featx.errors import ExtractionError, FeatxError

# How often a shard is handed out again after what did it was lost, and how many actors may fail to start.
_ATTEMPTS = 3
# By this a process of a device asks for a shard. It has so much time to end with the job.
_NEXT, _SECONDS_TO_END = "next", 5.0
# For how many seconds no actor of Ray may start, and how often that is said.
_PATIENCE, _SAY_EVERY = 600.0, 30.0


class Engine(Protocol):
    """Hands out the shards of a job."""

    def run(self, work: Work, todo: PendingSamples, progress: Progress) -> None:
        """Do shards.

        Args:
            work: what is done for each.
            todo: by number of the shard, the numbers of the samples to compute.
            progress: is told what is done.

        Raises:
            ExtractionError: a process was lost. Finished shards stay.
        """
        ...


class ThisProcess:
    """Does all shards here, one after the other, with reading, computing and writing at once."""

    def run(self, work: Work, todo: PendingSamples, progress: Progress) -> None:
        """Do shards."""
        process_shards(work, todo.items(), progress)


@dataclass(frozen=True)
class OneProcessPerDevice:
    """Hands shards to as many processes as there are devices; each has its own copy of the extractor.

    A process asks for its next shard when those that read for it have time, so that these go on from shard to shard.
    """

    devices: Sequence[torch.device]

    def run(self, work: Work, todo: PendingSamples, progress: Progress) -> None:
        """Do shards."""
        context = multiprocessing.get_context("spawn")  # a process that has used CUDA cannot be forked
        left = deque(todo.items())
        processes: dict[Any, Any] = {}  # by the connection to each
        firsts: dict[Any, PendingShard] = {}  # one for each, or the first process to start may take them all
        try:
            for device in self.devices[: len(left)]:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, work, device))
                self._start(process)
                theirs.close()
                processes[ours] = process
                firsts[ours] = left.popleft()
            running = set(processes)
            while running:
                for each in cast("list[Any]", wait(list(running))):
                    if not self._goes_on(each, firsts, left, progress):
                        running.remove(each)
        finally:
            _end(processes)

    def _start(self, process: Any) -> None:
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ExtractionError(
                f"what is computed cannot be sent to the processes of several devices ({error}): transform, load and "
                "functions of features have to be defined at the top of a file, and be no lambda. One device, or Ray, "
                "takes them as they are"
            ) from error

    def _goes_on(
        self, connection: Any, firsts: dict[Any, PendingShard], left: deque[PendingShard], progress: Progress
    ) -> bool:
        """Give a process the shard that it asks for, or count what it has done; return False when it has ended."""
        try:
            found = connection.recv()
            if found == _NEXT:
                connection.send(firsts.pop(connection, None) or (left.popleft() if left else None))
                return True
        except (EOFError, OSError):
            raise ExtractionError(
                f"one of the processes for {', '.join(map(str, self.devices))} was lost. Nothing that was finished "
                "is lost: start the job again to go on. A script that does this needs the line "
                "`if __name__ == '__main__':`"
            ) from None
        if isinstance(found, Exception):
            raise found
        if found is not None:
            progress.add(*found)
        return found is not None


def _end(processes: Mapping[Any, Any]) -> None:
    """End processes: each notices when it tells of its next batch, removes what it was writing, and ends."""
    for connection in processes:
        connection.close()
    limit = time.monotonic() + _SECONDS_TO_END
    for process in processes.values():
        process.join(max(0.0, limit - time.monotonic()))
        process.terminate()
        process.join()


def _serve(connection: Any, work: Work, device: torch.device) -> None:
    """Do the shards that are asked for through a connection, and send back what was done, at last None or the error."""
    try:
        own = replace(work, runner=work.runner.moved(device))
        process_shards(own, _asked_for(connection), _Told(connection))
        last = None
    except Exception as error:  # whatever ends the job
        last = error if isinstance(error, (ExtractionError, OSError)) else ExtractionError(reason_of(error))
    with suppress(OSError):  # the process of the job has ended
        connection.send(last)


def _asked_for(connection: Any) -> Iterator[PendingShard]:
    """Yield the shards that the process of the job gives, as long as it has some."""
    with suppress(OSError, EOFError):  # it has ended
        connection.send(_NEXT)
        while (shard := connection.recv()) is not None:
            yield shard
            connection.send(_NEXT)


class _Told(Progress):
    """Tells the process of the job what is done."""

    def __init__(self, connection: Any) -> None:
        super().__init__(0, is_shown=False)
        self._connection = connection

    def add(self, samples: int, size: int, failures: int, not_finite: int = 0) -> None:
        self._connection.send((samples, size, failures, not_finite))


@dataclass(frozen=True)
class Ray:
    """Hands shards to actors of Ray, each of which reads, computes and writes on its own.

    Args:
        actors: how many; None for as many as the cluster has room for.
        options: of each actor, as `ray.remote` takes them: `{"num_gpus": 1}` puts each one's extractor on a GPU.
    """

    actors: int | None
    options: Mapping[str, Any]

    def run(self, work: Work, todo: PendingSamples, progress: Progress) -> None:
        """Do shards. The shard of an actor that dies goes to another one."""
        ray: Any = require("ray", "Ray hands out shards to actors", "featx[ray]")
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        shared = [ray.put(work)]  # in a list it is fetched by the actor, which can say what is wrong with it
        device = torch.device("cuda" if self.options.get("num_gpus") else "cpu")
        actor: Any = ray.remote(**self.options)(_Actor) if self.options else ray.remote(_Actor)
        wanted = self.actors or self._room(ray.cluster_resources())
        actors = _Actors(ray, lambda: actor.remote(shared, device), min(wanted, len(todo)))
        left, running, attempts = list(todo), dict[Any, tuple[int, Any]](), dict.fromkeys(todo, 0)
        try:
            while left or running:
                while left and actors.idle:
                    shard, worker = left.pop(0), actors.idle.pop()
                    attempts[shard] += 1
                    running[worker.do.remote(shard, list(todo[shard]))] = shard, worker
                done, _ = ray.wait([*running, *(actors.starting if left else ())], timeout=_SAY_EVERY)
                if not done and not running:
                    self._wait_for_room(actors, ray.cluster_resources(), progress)
                if not done or actors.note_start(done[0]):
                    continue
                shard, worker = running.pop(done[0])
                try:
                    progress.add(*ray.get(done[0]))
                    actors.idle.append(worker)
                except ray.exceptions.RayActorError as error:
                    if attempts[shard] == _ATTEMPTS:
                        raise ExtractionError(
                            f"shard {shard} was lost {_ATTEMPTS} times with the actor that did it ({error}). Nothing "
                            "that was finished is lost: start the job again to go on"
                        ) from error
                    left.append(shard)
                    actors.start()
                except ray.exceptions.RayTaskError as error:
                    raise _cause_of(error) from None
        finally:
            actors.kill(worker for _, worker in running.values())

    def _wait_for_room(self, actors: _Actors, resources: Mapping[str, float], progress: Progress) -> None:
        """Say that no actor has started so far.

        Raises:
            ExtractionError: that has lasted too long.
        """
        wants = dict(self.options) or {"num_cpus": 1}
        has = {name: count for name, count in resources.items() if name in ("CPU", "GPU")}
        text = f"no actor of Ray has started: each one wants {wants}, and the cluster has {has}"
        if actors.seconds() > _PATIENCE:
            raise ExtractionError(f"{text}. Give actor_options that fit, or start the job again when there is room")
        progress.say(f"{text}; waiting")

    def _room(self, resources: Mapping[str, float]) -> int:
        cpus = resources.get("CPU", 1) // (self.options.get("num_cpus") or 1)
        gpus = self.options.get("num_gpus")
        return max(1, int(min(cpus, resources.get("GPU", 0) // gpus) if gpus else cpus))


class _Actors:
    """The actors of a job: those that start, and those that have started and have nothing to do.

    Args:
        ray: the package.
        make: starts an actor.
        count: how many there are.
    """

    def __init__(self, ray: Any, make: Callable[[], Any], count: int) -> None:
        self._ray = ray
        self._make = make
        self._asked_at = 0.0
        self._failed = 0
        self.idle: list[Any] = []
        # By what tells that they have.
        self.starting: dict[Any, Any] = {}
        for _ in range(count):
            self.start()

    def start(self) -> None:
        """Start an actor. It gets no shard before it runs: there may be no room for it."""
        worker = self._make()
        self._asked_at = time.perf_counter()
        self.starting[worker.ready.remote()] = worker

    def note_start(self, done: Any) -> bool:
        """Note that an actor has started, if this tells so; say whether it does."""
        worker = self.starting.pop(done, None)
        if worker is None:
            return False
        try:
            self._ray.get(done)
            self.idle.append(worker)
        except self._ray.exceptions.RayActorError as error:
            self._failed += 1
            if self._failed == _ATTEMPTS:
                raise ExtractionError(f"actors of Ray do not start: {error}") from error
            self.start()
        return True

    def seconds(self) -> float:
        """Return how many seconds ago the latest actor was asked for."""
        return time.perf_counter() - self._asked_at

    def kill(self, others: Iterable[Any]) -> None:
        """End all actors, and `others`."""
        for worker in [*self.idle, *self.starting.values(), *others]:
            self._ray.kill(worker)


def _cause_of(error: Any) -> Exception:
    """Return what an actor has raised; that a machine of the cluster lacks a module is said in words."""
    if isinstance(error.cause, FeatxError):
        return error.cause  # Ray's own has the traceback of the actor for its message
    cause: Exception = error.as_instanceof_cause()
    if isinstance(cause, ImportError) or "ModuleNotFoundError" in str(cause):
        return ExtractionError(
            f"an actor of Ray cannot load the model or the transform: {str(cause).splitlines()[-1]}. Their modules "
            "have to be installed on all machines, or shipped by runtime_env of ray.init"
        )
    return cause


class _Actor:
    def __init__(self, shared: list[Any], device: torch.device) -> None:
        self._shared = shared
        self._device = device
        self._work: Work | None = None

    def ready(self) -> None:
        """Return, once the actor has started."""

    def do(self, shard: int, numbers: Sequence[int]) -> tuple[int, int, int, int]:
        if self._work is None:
            work: Work = require("ray", "Ray hands out shards to actors").get(self._shared[0])
            self._work = replace(work, runner=work.runner.moved(self._device))
        progress = Progress(len(numbers), is_shown=False)
        process_shards(self._work, [(shard, numbers)], progress)
        return progress.samples, progress.bytes, progress.failures, progress.not_finite
