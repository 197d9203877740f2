"""What a schema says that an operator writes, against what running it changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from featx.ir.overloads import Signatures, tensors_among


class Compared(TorchDispatchMode):
    """Collects the tensors that operators changed, and those that their schemas say they write."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: list[tuple[str, list[int]]] = []
        self.told: list[tuple[str, list[int]]] = []
        self._signatures = Signatures()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_among((*args, *kwargs.values())))
        before = [tensor.clone() for tensor in tensors]
        result = func(*args, **kwargs)
        changed = [id(now) for now, old in zip(tensors, before, strict=True) if not torch.equal(now, old)]
        signature = self._signatures.of(func)
        assert signature is not None
        name = signature.name
        if changed:
            self.changed.append((name, changed))
        told = [id(tensor) for tensor in signature.targets(args, kwargs)]
        if told:
            self.told.append((name, told))
        return result


def foreach(x: Tensor) -> object:
    return torch._foreach_add_([x.clone(), x.clone()], 1.0)


CALLS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.clone().mul_(2),
    "into out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "foreach": foreach,
    "batch norm": nn.BatchNorm2d(3, momentum=0.5),
    "batch norm in eval mode": nn.BatchNorm2d(3).eval(),
    "batch norm without statistics": nn.BatchNorm2d(3, track_running_stats=False),
    "instance norm": nn.InstanceNorm2d(3, momentum=0.5, track_running_stats=True),
    "instance norm in eval mode": nn.InstanceNorm2d(3, track_running_stats=True).eval(),
    "nothing": lambda x: functional.relu(x + 1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_tensors_that_an_operator_writes_are_those_that_change(
    call: Callable[[Tensor], object], inference: bool
) -> None:
    x = torch.rand(2, 3, 4, 4) + 1
    with torch.inference_mode(inference), Compared() as compared:
        call(x)
    assert compared.told == compared.changed
