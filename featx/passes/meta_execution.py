"""Run operators on tensors that have a form and no values, wherever the tensors of the model really are.

Weights and buffers are not moved and not copied: each operator gets stand-ins for them, on the meta device or of a
fake mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from featx.errors import InputError
from featx.ir.memory import memory_of
from featx.ir.overloads import Signature, tensors_among
from featx.passes.fake_results import FakeResults
from featx.passes.operators import OperatorMode

_META = torch.device("meta")


class MetaValues(OperatorMode):
    """Hands operators tensors on the meta device in place of real ones, and writes nothing that is real.

    What the graph computes from constants of its own alone (`torch.arange(5)`) runs for real, because code may ask for
    its values; so do views, and questions for a value of a tensor that nothing has written.

    Args:
        owned: the parameters and buffers of the model and its real inputs, which count as having no values.

    Raises (as operators run):
        InputError: an operator asks for a value that there is not.
    """

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = _StandIns()
        # Memory that is there and that counts as having no values; what of it has been written on a stand-in; and
        # memory that was made here.
        self._valueless = set(map(memory_of, owned))
        self._outdated: set[int] = set()
        self._made: set[int] = set()

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        if signature is None:
            return func(*replaced(args, self.stand_in), **replaced(kwargs, self.stand_in))
        tensors = [*tensors_among(args), *tensors_among(kwargs.values())]
        real = [tensor for tensor in tensors if not tensor.is_meta]
        is_constant = len(real) == len(tensors) and self._may_run(signature, real, args, kwargs)
        if is_constant and not signature.draws:
            return self._run(signature, args, kwargs)
        if kwargs.get("device") is not None or not tensors:
            kwargs = {**kwargs, "device": _META}
        try:
            return call_on(func, args, kwargs, self.stand_in) if real else func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not signature.needs_values:
                raise
            what = signature.name.replace("::", ".")
            raise InputError(
                f"{what} needs values, and tensors on the meta device have none; pass real tensors"
            ) from error
        finally:
            for target in signature.targets(args, kwargs) if real else ():
                if not target.is_meta:
                    self._valueless.add(memory_of(target))
                    self._outdated.add(memory_of(target))

    def _may_run(self, signature: Signature, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        if signature.is_view:
            return True
        memories = set(map(memory_of, tensors))
        if memories & self._valueless:
            return signature.asks and not memories & self._outdated
        return all(memory_of(target) in self._made for target in signature.targets(args, kwargs))

    def _run(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = signature.overload(*args, **kwargs)
        if not signature.is_view and not signature.written:
            self._made.update([memory_of(tensor) for tensor in tensors_among((result,)) if not tensor.is_meta])
        return result

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the meta device that stands for a tensor, in memory that stands for its memory."""
        return tensor if tensor.is_meta else self._stand_ins.of(tensor)


class _StandIns:
    """Makes tensors on the meta device; those that stand for one storage share one."""

    def __init__(self) -> None:
        # By memory: the real storage, which must stay alive, and the one that stands for it.
        self._storages: dict[int, tuple[Any, Any]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to(_META)
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            known = self._storages[storage._cdata] = (storage, twin)
        plain = torch.empty(0, dtype=tensor.dtype, device=_META)
        return plain.set_(known[1], tensor.storage_offset(), tensor.shape, tensor.stride())


class FakeValues(OperatorMode):
    """Hands operators tensors of a fake mode, which has to be entered already, in place of real ones."""

    def __init__(self, fake_mode: Any) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        # By id: a real tensor, which must stay alive, and what stands for it.
        self._fakes: dict[int, tuple[torch.Tensor, Any]] = {}
        # Symbolic sizes are left to the fake mode itself.
        is_symbolic = fake_mode.shape_env is not None
        self._results = None if is_symbolic else FakeResults(fake_mode)
        self._stand_ins = None if is_symbolic else _StandIns()

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        if self._results is None or signature is None or not signature.only_makes_tensors(args, kwargs):
            return call_on(func, args, kwargs, self.fake)
        return self._results.of(signature, replaced(args, self.fake), replaced(kwargs, self.fake))

    def fake(self, value: Any) -> Any:
        """Return what stands for a tensor, the same for the same one; other values, and fake tensors, stay."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return value
        known = self._fakes.get(id(value))
        if known is None:
            known = self._fakes[id(value)] = (value, self._converted(value))
        return known[1]

    def _converted(self, tensor: torch.Tensor) -> Any:
        # Apart from its history, of which a buffer may get one meanwhile.
        with torch._C._DisableTorchDispatch():
            plain = tensor.detach()
            is_plain = plain.layout is torch.strided and not (plain.is_quantized or plain.is_conj() or plain.is_neg())
            if self._stand_ins is not None and self._results is not None and is_plain:
                return self._results.fake_of(self._stand_ins.of(plain), plain.device)
        return self._fake_mode.from_tensor(plain, static_shapes=True)


def call_on(func: Any, args: Any, kwargs: dict[str, Any], stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Call an operator on what stands for its tensors; if it returns one of those, return the tensor itself."""
    originals: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        twin = stand_in(tensor)
        originals[id(twin)] = tensor
        return twin

    result = func(*replaced(args, convert), **replaced(kwargs, convert))
    if isinstance(result, (tuple, list)):
        return type(result)([originals.get(id(value), value) for value in result])
    return originals.get(id(result), result)


def replaced(values: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the arguments of an operator with `function` applied to each tensor."""
    kind = type(values)
    if kind is tuple or kind is list:  # the most frequent ones first
        return kind([replaced(value, function) for value in values])
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: replaced(value, function) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        items = [replaced(value, function) for value in values]
        return items if isinstance(values, list) else tuple(items)
    return values
