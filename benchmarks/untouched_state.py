"""All that a trace could leave changed: in a model, in Python modules, in the thread and in random generators."""

from __future__ import annotations

import builtins
import gc
import math
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

_DEVICES = ("cpu", "cuda")
_LIBRARIES = ("torchvision", "timm")
_DEPTH = 4  # how deep containers lie in containers


class Snapshot:
    """What a model, and the Python and torch around it, are like when this is made. Objects are known by identity.

    Args:
        model: the model.
        written: names of attributes that each run of the model assigns anew.
    """

    def __init__(self, model: nn.Module, written: frozenset[str] = frozenset()) -> None:
        self._written = written
        self._modules = list(model.named_modules(remove_duplicate=False))
        self._model = model
        self._holders = {id(holder): (label, holder) for label, holder in _holders(model)}
        self._contents = {key: _contents(holder) for key, (_, holder) in self._holders.items()}
        self._tensors = dict(tensors_of(model))
        self._values = {place: bytes_of(tensor) for place, tensor in self._tensors.items()}
        self._versions = {place: _facts_of(tensor) for place, tensor in self._tensors.items()}
        self._facts = facts()
        self._states = _states_of_generators()

    def differences(self, outcomes: dict[str, Tensor] | None = None) -> list[str]:
        """Return what is otherwise now, in words. Modes that are too many make the rest unreadable, and are all then.

        Args:
            outcomes: the tensors of another copy of the model after a run. If they are given the model may have run:
                each tensor may have either value, and what a run assigns or draws is not compared.
        """
        present = facts()
        found = [f"{name}: {value} before, {present[name]} now" for name, value in self._facts.items()
                 if present[name] != value]  # fmt: skip
        if any(present[name] != self._facts[name] for name in ("function modes", "dispatch modes")):
            return found
        now = list(self._model.named_modules(remove_duplicate=False))
        if [(path, id(each)) for path, each in now] != [(path, id(each)) for path, each in self._modules]:
            found.append("other modules")
        left_out = self._written if outcomes is not None else frozenset()
        for key, (label, holder) in self._holders.items():
            before, after = self._contents[key], _contents(holder)
            if not _is_same(before, after):
                found += [f"{label}: {each}" for each in _described(before, after) if each.split()[0] not in left_out]
        for place, tensor in self._tensors.items():
            after = bytes_of(tensor)
            if after != self._values[place] and (outcomes is None or after != bytes_of(outcomes[place])):
                found.append(f"values of {place}")
            if outcomes is None and self._versions[place] != _facts_of(tensor):
                found.append(f"{place}: {self._versions[place]} before, {_facts_of(tensor)} now")
        states = _states_of_generators()
        found += [f"generator of {name}" for name in states if states[name] != self._states[name] and outcomes is None]
        return found


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and other tensors that the modules of a model hold, with their places."""
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    yield f"{path}.{name}", value


def bytes_of(tensor: Tensor) -> bytes:
    """Return the values of a tensor, bit for bit."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def facts() -> dict[str, Any]:
    """Return the modes of this thread, and what the process has of modes, switches and handlers."""
    state = torch._C._get_torch_function_state(), torch._C._is_torch_function_all_disabled()
    with torch._C.DisableTorchFunction():  # a mode that was left behind would act here
        return {
            "function modes": torch._C._len_torch_function_stack(),
            "torch function": state,
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "functorch": torch._C._functorch.peek_interpreter_stack(),
            "dispatch keys": (
                torch._C._dispatch_tls_local_include_set().raw_repr(),
                torch._C._dispatch_tls_local_exclude_set().raw_repr(),
            ),
            "gradients": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "anomaly mode": torch.is_anomaly_enabled(),
            "multithreading": torch._C._is_multithreading_enabled(),
            "autocast": [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES],
            "autocast cache": (torch.is_autocast_cache_enabled(), _autocast_nesting()),
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "threads": (torch.get_num_threads(), threading.active_count()),
            "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
            "warnings": (id(warnings.filters), list(warnings.filters), id(warnings.showwarning)),
            "profiler": (sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()),
            "recursion": sys.getrecursionlimit(),
            "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
            "handlers": (signal.getsignal(signal.SIGINT), id(sys.excepthook), id(sys.displayhook)),
            "streams": (id(sys.stdout), id(sys.stderr)),
        }  # fmt: skip


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _states_of_generators() -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python": random.getstate(),
        "numpy": (kind, keys.tobytes(), *rest),
    }


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    hooks = tensor._backward_hooks
    return (
        tensor._version, tensor.data_ptr(), tensor.requires_grad, id(tensor.grad), id(tensor.grad_fn), tensor.shape,
        tensor.stride(), None if hooks is None else list(hooks), sorted(vars(tensor)),
    )  # fmt: skip


def _holders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the dicts and other containers in which something could be another, with names for them."""
    kinds: dict[type, None] = {}
    for path, module in model.named_modules():
        yield from _nested(f"module '{path}'", vars(module))
        kinds.update(dict.fromkeys(type(module).__mro__))
    for kind in (*kinds, Tensor, nn.Parameter):
        if kind is not object:
            yield f"class {kind.__qualname__}", kind
    own = {name for kind in kinds for name in [kind.__module__] if not name.startswith("torch.")} - {"builtins"}
    for name in sorted(own):
        yield from _nested(f"globals of {name}", vars(sys.modules[name]))
    others = [name for name in sys.modules if name.partition(".")[0] in _LIBRARIES and name not in own]
    for name in (*others, "torch.nn.modules.module"):
        yield f"globals of {name}", vars(sys.modules[name])
    for module in (builtins, torch, torch.nn.functional, torch.random, torch.overrides, math, random, numpy.random):
        yield f"globals of {module.__name__}", vars(module)


def _nested(label: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple, set)) and depth < _DEPTH:
        yield label, value
        for key, inner in _contents(value):
            yield from _nested(f"{label}, {key}", inner, depth + 1)


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, type):
        return list(vars(holder).items())
    if isinstance(holder, dict):
        return list(holder.items())
    return [(id(item), item) for item in holder] if isinstance(holder, set) else list(enumerate(holder))


def _is_same(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(one[0] == other[0] and one[1] is other[1] for one, other in pairs)


def _described(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> list[str]:
    was, now = dict(before), dict(after)
    lost = [f"{key} is gone" for key in was if key not in now]
    new = [f"{key} is new: {type(now[key]).__name__}" for key in now if key not in was]
    others = [
        f"{key} was {was[key]!r:.60}, is {now[key]!r:.60}" for key in was if key in now and was[key] is not now[key]
    ]
    return lost + new + others or ([] if list(was) == list(now) else ["order is another"])
