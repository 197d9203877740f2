"""Remember what operators return for fake tensors: an equal call later costs a fraction of the first one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from featx.ir.overloads import Signature, tensors_among

_PLAIN = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# A view, which its schema does not say.
_VIEW = "aten::_unsafe_view"


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FakeResults:
    """What the operators of one fake mode return, by their arguments without values.

    A model makes few distinct calls: each layer of a transformer makes those of the first one. A fake mode remembers
    them too, but most of its time goes into finding out that it does.

    The operators here return tensors and do nothing else: new ones, each in memory of its own, or one view of the first
    argument.
    """

    def __init__(self, fake_mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake_mode, self._fake_class = fake_mode, FakeTensor
        self._known: dict[Any, tuple[_Layout, ...]] = {}

    def of(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns for fake tensors."""
        func = signature.overload
        if signature.is_view or signature.name == _VIEW:  # of the first argument, and of no other tensor
            return self._view(func, args, kwargs) if self._is_plain(args[0]) else func(*args, **kwargs)
        key = self._key((args, tuple(kwargs.items())))
        if key is None:
            return func(*args, **kwargs)
        layouts = self._known.get((func, key))
        if layouts is None:
            result = func(*args, **kwargs)
            layouts = self._layouts_of(result, [*tensors_among(args), *tensors_among(kwargs.values())])
            if layouts:
                self._known[func, key] = layouts
            return result
        results = list(map(self._new, layouts))
        return results[0] if len(results) == 1 else tuple(results)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a view; the meta device has kernels for them that cost nothing."""
        try:
            with torch._C._DisableTorchDispatch():
                view = func(*args, **kwargs)
        except NotImplementedError:
            return func(*args, **kwargs)
        # `lift_fresh` returns the tensor itself.
        is_plain = view is not args[0] and view.layout is torch.strided and not _is_lazy(view)
        return self.fake_of(view, args[0].fake_device) if is_plain else func(*args, **kwargs)

    def _key(self, value: Any) -> Any:
        """Return what an operator sees of an argument; None if it may see more."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is self._fake_class:
            if not self._is_plain(value):
                return None
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
        if kind is tuple or kind is list:
            keys = tuple([self._key(item) for item in value])
            return None if None in keys else (kind, keys)
        return None

    def _is_plain(self, value: Any) -> bool:
        """Say whether an operator sees no more of a tensor than its layout and its device."""
        is_fake = type(value) is self._fake_class
        return is_fake and value.constant is None and value.layout is torch.strided and not _is_lazy(value)

    def _layouts_of(self, result: Any, inputs: list[torch.Tensor]) -> tuple[_Layout, ...]:
        """Return from what the results can be made again; nothing if they cannot."""
        tensors: list[Any] = list(result) if isinstance(result, tuple) else [result]
        if any(type(tensor) is not self._fake_class or self._key(tensor) is None for tensor in tensors):
            return ()
        storages = [tensor.untyped_storage() for tensor in tensors]
        memories = {storage._cdata for storage in storages}
        if len(memories) < len(tensors) or any(tensor.untyped_storage()._cdata in memories for tensor in inputs):
            return ()
        if any(storage.nbytes() != _bytes_of(tensor) for storage, tensor in zip(storages, tensors, strict=True)):
            return ()
        return tuple([_Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device) for tensor in tensors])

    def _new(self, layout: _Layout) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
        return self.fake_of(meta, layout.device)

    def fake_of(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the fake tensor that is on a device and has the layout and the memory of one on the meta device."""
        return self._fake_class(self._fake_mode, meta, device)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the memory that `torch.empty_strided` makes for this layout; -1 if it does not begin there."""
    if tensor.storage_offset():
        return -1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
