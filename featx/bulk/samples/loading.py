"""Read samples in processes of their own, in batches; a sample that cannot be read is a failure and not an error."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from featx.bulk.samples.packing import Packed, number_of_tensors, pack, unpack
from featx.bulk.samples.plan import Plan
from featx.bulk.samples.sources import Source
from featx.errors import ExtractionError
from featx.tree import tensors_in, tree_leaves, tree_map

# A batch that has been read is sent within that time.
_SECONDS_TO_SEND = 5.0
# What torch says where shared memory is full.
_NO_SHARED_MEMORY = "unable to allocate shared memory"
# How often it is looked whether the processes still read.
_SECONDS_BETWEEN_LOOKS = 1.0
# So many batches a process that reads has begun before the one that is needed.
_READ_AHEAD = 2
# For so many batches in a row processes may be lost, besides those that a process has read ahead.
_MOST_LOST_IN_A_ROW = 3
# Of more tensors in one batch, as samples of many shapes have, those of each dtype are sent as one.
_MOST_TENSORS = 16
# Seeds of two jobs differ by it, so that no sample of one draws what another sample of the other draws.
_LARGE_AND_ODD = 0x9E3779B97F4A7C15
# What is another one in each run: where an object lies in memory, as in `<_io.BytesIO object at 0x7f26b4652340>`, and
# the number of a process, as in `DataLoader worker (pid(s) 31683) exited unexpectedly`.
_OF_THE_RUN = re.compile(r" at 0x[0-9a-f]+| \(pid(?:\(s\))? [0-9, ]+\)")


@dataclass
class Batch:
    """Samples that were read together.

    Attributes:
        groups: numbers of samples, with their inputs as one batch: several where inputs have several shapes.
        failures: numbers of samples that could not be read, with the reason.
    """

    groups: list[tuple[list[int], Any]] = field(default_factory=lambda: list[tuple[list[int], Any]]())
    failures: list[tuple[int, str]] = field(default_factory=lambda: list[tuple[int, str]]())


class _Failed:
    """What a sample that cannot be read gives."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Samples(Dataset[Any]):
    """Samples of a source by their number, ready for the model but for what its own process does.

    Args:
        source: where they come from.
        read: what makes an input of an item of the source.
    """

    def __init__(self, source: Source, read: Callable[[Any], Any]) -> None:
        self._source = source
        self._read = read
        # That of the process of the job, for those that read.
        self.seed = torch.initial_seed()

    def key(self, index: int) -> str:
        """Return the key of a sample."""
        return self._source.keys[index]

    @property
    def kind(self) -> str:
        """What the source is, in words."""
        return self._source.kind

    def __getitem__(self, index: int) -> tuple[int, Any]:
        """Return the number of a sample and its input, or what says why there is none."""
        try:
            return index, as_input(self._read(self._source.item(index)))
        except (Exception, SystemExit, GeneratorExit) as error:  # whatever a file or a function of the user's leads to
            return index, _Failed(reason_of(error))


def as_input(value: Any) -> Any:
    """Return what is read of one sample with tensors without gradients in place of arrays.

    Raises:
        TypeError: it holds something that no batch can be made of.
    """
    return tree_map(_as_leaf, value)


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise TypeError(f"a tensor of the layout {leaf.layout} makes no batch; make it dense")
        return leaf.detach().clone()  # a data set may fill one tensor again and again
    if hasattr(leaf, "getbands"):
        raise TypeError("the transform returns an image; end it with ToTensor(), or with what else makes a tensor")
    if hasattr(leaf, "__array_interface__"):
        return torch.from_numpy(leaf.copy()) if hasattr(leaf, "copy") and getattr(leaf, "ndim", 0) else leaf.item()
    if isinstance(leaf, (bool, int, float)):
        return leaf
    raise TypeError(f"an input is made of tensors, arrays and numbers, and this sample has a {type(leaf).__name__}")


def reason_of(error: BaseException) -> str:
    """Return an error as one line, which is the same in each run."""
    return f"{type(error).__name__}: {_text_of(error)}"[:500]


def _text_of(error: BaseException) -> str:
    return _OF_THE_RUN.sub("", " ".join(str(error).split()))


class _Watched(Dataset[Any]):
    """Samples that processes read: one that takes too long is a failure, and each one is counted.

    What a random transform draws depends on the number of the sample and on the seed of the job alone: processes may be
    lost, and several devices share the shards.
    """

    def __init__(self, samples: Samples, seconds: float) -> None:
        self._samples = samples
        self._seconds = seconds
        self.count = multiprocessing.Value("Q", 0)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            _seed(self._samples.seed * _LARGE_AND_ODD + index)
            with _limited(self._seconds):
                return self._samples[index]
        except TimeoutError as error:  # of the last moment
            return index, _Failed(reason_of(error))
        finally:
            with self.count.get_lock():
                self.count.value += 1


def _seed(number: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.default_generator.manual_seed(number % 2**63)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


@contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise a TimeoutError in what takes longer, where the system has timers for processes."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"reading it took more than {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def batches(samples: Samples, plan: Iterable[list[int]], *, workers: int, timeout: float) -> Iterator[Batch]:
    """Yield a batch for each list of numbers in `plan`, in this order; lists are taken as processes have time for them.

    Where a process that reads is lost, the samples of the batch are read again, one by one, and put together as they
    would have been: one that ends its process again is a failure, and the others are a batch without it.

    Args:
        samples: what is read.
        plan: numbers of samples. It must not raise.
        workers: how many processes read; 0 reads in this one.
        timeout: seconds that reading one sample may take in a process of its own; one that takes longer is a failure.

    Raises:
        ExtractionError: processes cannot be started, or are lost whatever they read, as where shared memory is full.
    """
    left, lost_in_a_row = Plan(plan), 0
    most = _MOST_LOST_IN_A_ROW + _READ_AHEAD * workers
    with _ChildSignal() as signal_of_children:
        while left.first():
            try:
                for batch in _batches(samples, left, workers, timeout, signal_of_children):
                    lost_in_a_row = 0
                    yield batch
                continue
            except _LostError as loss:
                numbers = left.first()
                try:
                    batch = _one_by_one(samples, numbers, timeout, loss, signal_of_children)
                    lost_in_a_row += 1  # also where the process has read ahead, and this batch is not to blame
                    if lost_in_a_row > most:
                        raise loss
                except _LostError as error:
                    raise ExtractionError(
                        f"a process that reads samples was lost or hangs, at '{samples.key(numbers[0])}' or up to "
                        f"{len(numbers) - 1} samples after it: {loss}. Nothing that was written is lost; start the "
                        "job again to go on, with fewer workers, or more shared memory (/dev/shm)"
                    ) from error
            left.finish_first()
            yield batch


class ProcessError(ExtractionError):
    """No process can be started that reads samples."""


class _LostError(Exception):
    """A process that reads samples was lost, or hangs."""

    def __init__(self, reason: str, *, hangs: bool) -> None:
        super().__init__(reason)
        self.hangs = hangs


def _batches(
    samples: Samples, plan: Plan, workers: int, timeout: float, signal_of_children: _ChildSignal,
    ahead: int = _READ_AHEAD, collate: Callable[[list[tuple[int, Any]]], Any] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Yield a batch for each list of numbers, or what `collate` makes of the samples, and note it in the plan.

    Each process begins at most `ahead` of them before they are needed.

    Raises:
        _LostError: a process died, or none has read a sample for too long.
        ProcessError: processes cannot be started.
    """
    watched = _Watched(samples, timeout)
    loader = DataLoader(
        watched if workers else samples, batch_sampler=plan, num_workers=workers,
        collate_fn=partial(_sent, collate or _collated) if workers else _collated,
        timeout=_SECONDS_BETWEEN_LOOKS if workers else 0,
        prefetch_factor=ahead if workers else None,
        generator=torch.Generator(),  # or it would draw from torch's own
    )  # fmt: skip  # pyright: ignore[reportArgumentType] - what yields lists is a batch sampler
    try:
        found = iter(loader)
    except (pickle.PicklingError, AttributeError, AssertionError, TypeError, OSError, RuntimeError) as error:
        raise ProcessError(
            f"no process can be started that reads samples: {reason_of(error)}. workers=0 reads in this one"
        ) from error
    signal_of_children.ignore()
    while plan.first():
        batch = _next(found, watched, timeout) if workers else next(found)
        plan.finish_first()
        yield _received(batch)


def _next(found: Iterator[Any], watched: _Watched, timeout: float) -> Any:
    """Return the next batch of several processes; see `_batches`."""
    count, limit = watched.count.value, time.monotonic() + timeout + _SECONDS_TO_SEND
    while True:
        try:
            return next(found)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, StopIteration) as error:
            if _NO_SHARED_MEMORY in str(error):
                raise ExtractionError(
                    "a batch does not fit into shared memory. Nothing that was written is lost; start the job again to "
                    "go on, with fewer workers, a smaller batch_size, or more shared memory (/dev/shm)"
                ) from None
            is_waiting = isinstance(error, RuntimeError) and "timed out" in str(error)
            if count != (count := watched.count.value):  # a large batch takes its time
                limit = time.monotonic() + timeout + _SECONDS_TO_SEND
            if not is_waiting or time.monotonic() > limit:
                raise _LostError(" ".join(str(error).split()) or "no process is left", hangs=is_waiting) from error


def _one_by_one(
    samples: Samples, numbers: Sequence[int], timeout: float, loss: _LostError, signal_of_children: _ChildSignal
) -> Batch:
    """Return the batch of samples that one process reads, each when it is needed; those that end it are failures.

    Raises:
        _LostError: more of them are lost than can be read, or none is where a process hangs.
    """
    found: list[tuple[int, Any]] = []
    lost = 0
    while len(found) < len(numbers):
        plan = Plan([number] for number in numbers[len(found) :])
        try:
            for read in _batches(samples, plan, 1, timeout, signal_of_children, ahead=1, collate=list):
                found += tree_map(_copied, read)
        except _LostError as error:
            reason = f"the process that read it was lost: {_text_of(error)}"
            found.append((numbers[len(found)], _Failed(reason)))
            lost += 1
            if 2 * lost > len(found) + 1:
                raise
    if not lost and loss.hangs:
        raise loss
    return _received(_packed(_collated(found)))  # packed as a batch that is sent: strides may change the last bits


def _copied(leaf: Any) -> Any:
    """Return a tensor in memory of this process: shared memory takes an open file for each."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class _ChildSignal:
    """Keeps torch from raising an error, wherever this process is, when one that reads has ended.

    The next read of the DataLoader notices it. torch sets its handler when the first DataLoader starts.
    """

    def __enter__(self) -> _ChildSignal:
        self._of_torch: Any = None
        return self

    def ignore(self) -> None:
        """Take the handler of torch away, if there is one; to be called when a DataLoader has started."""
        if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGCHLD)
            if str(getattr(handler, "__module__", "")).startswith("torch.utils.data"):
                self._of_torch = handler
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __exit__(self, *error: object) -> None:
        if self._of_torch is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, self._of_torch)


def _sent(collate: Callable[[list[tuple[int, Any]]], Any], samples: list[tuple[int, Any]]) -> Any:
    """Return what `collate` makes of samples, as it is sent from a process that reads: in shared memory.

    Where that is full, the error is one of reading. A thread of the DataLoader, which would move the tensors there
    later, tells nobody of it.
    """
    sent = _packed(collate(samples))
    for tensor in sent.tensors.values() if isinstance(sent, Packed) else tensors_in(sent):
        tensor.share_memory_()
    return sent


def _packed(made: Any) -> Any:
    return pack(made) if number_of_tensors(made) > _MOST_TENSORS else made


def _received(sent: Any) -> Any:
    return unpack(sent) if isinstance(sent, Packed) else sent


def _collated(samples: list[tuple[int, Any]]) -> Batch:
    batch = Batch()
    groups: dict[Any, list[tuple[int, Any]]] = {}
    for index, value in samples:
        if isinstance(value, _Failed):
            batch.failures.append((index, value.reason))
        else:
            groups.setdefault(form_of(value), []).append((index, value))
    batch.groups = [
        ([index for index, _ in group], stacked([value for _, value in group])) for group in groups.values()
    ]
    return batch


def stacked(values: Sequence[Any]) -> Any:
    """Return inputs of one form as one batch."""
    return _together(
        values, lambda parts: torch.stack(parts) if isinstance(parts[0], torch.Tensor) else torch.tensor(parts)
    )


def joined(batches: Sequence[Any]) -> Any:
    """Return batches of one form as one batch."""
    return _together(batches, torch.cat)


def _together(values: Sequence[Any], join: Callable[[Any], torch.Tensor]) -> Any:
    columns = [list(tree_leaves(value)) for value in values]
    leaves = iter(zip(*columns, strict=True))
    return tree_map(lambda _: join(next(leaves)), values[0])


def form_of(value: Any) -> str:
    """Return a text that is the same for inputs that one batch can be made of."""
    return repr(
        tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf), value)
    )
