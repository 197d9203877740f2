"""ShapeProp: run a graph and note shape, dtype and layout of each value on its node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.interpret.interpreter import Interpreter
from featx.ir.arguments import leaves_of, map_aggregate
from featx.ir.node import Node
from featx.passes.by_rule import ByRule, known_output, refuse_autocast
from featx.passes.meta_execution import FakeValues, MetaValues
from featx.passes.preserved_state import WrittenMemory, preserve_model
from featx.tree import tensors_in, tree_map

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_ABSENT = object()


class TensorMetadata(NamedTuple):
    """What is known of a tensor besides its values.

    `stride` counts elements and is empty for sparse tensors. `memory_format` is the first of contiguous, channels_last
    and channels_last_3d that the layout is, or None. `qparams` has `qscheme`, `scale`, `zero_point` and, for values
    by channel, `axis` of a quantized tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]
    memory_format: torch.memory_format | None
    is_quantized: bool
    qparams: dict[str, Any]


class ShapeProp(Interpreter):
    """Runs the graph of `gm` and writes what each node returns into its `meta`.

    `meta["type"]` is the type of the value, and `meta["tensor_meta"]`, where there are tensors in it, the value with a
    `TensorMetadata` in place of each. The model stays as it was: buffers, attributes and random generators, and the
    inputs too. After an error the meta is as before.

    With real inputs the graph runs for real. With an input on the meta device nothing is computed and no memory is
    taken, wherever the weights are; asking for values raises, and strides are those of torch's meta kernels (fused
    attention, and convolutions in other layouts than the contiguous one, have others). With a `FakeTensorMode`, given
    or of an input, the graph runs on fake tensors. Override `run_node` to note more.

    Args:
        gm: the graph module.
        fake_mode: a `torch._subclasses.FakeTensorMode`.
    """

    def __init__(self, gm: nn.Module, fake_mode: Any = None) -> None:
        super().__init__(gm)
        self.fake_mode = fake_mode
        self._is_formal = False
        self._replaced: list[tuple[Node, object, object]] = []

    def propagate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on inputs, note what the nodes give, and return what the graph returns.

        O(nodes + edges) besides what the nodes do; on the meta device most common layers and functions cost no more
        than a few microseconds.

        Raises:
            InputError: the graph takes other inputs, or asks for values that its inputs do not have.
        """
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        initial_env: dict[Node, Any] | None = None,
        enable_io_processing: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As `propagate`, with `initial_env` as `Interpreter.run` has it."""
        with self._prepared((args, kwargs)) as (take, give):
            args, kwargs = take((args, kwargs))
            return give(super().run(*args, initial_env=initial_env, **kwargs))

    def boxed_run(self, args_list: list[Any]) -> Any:
        """As `propagate`, for a list with a value for each placeholder, which is emptied."""
        with self._prepared(args_list) as (take, give):
            args_list[:] = take(args_list)
            return give(super().boxed_run(args_list))

    def run_node(self, n: Node) -> Any:
        """Run a node and note what it returns."""
        result = super().run_node(n)
        with torch._C.DisableTorchFunction():
            self._note(n, result)
        return result

    def _note(self, n: Node, result: Any) -> None:
        meta = n.meta
        self._replaced.append((n, meta.get("tensor_meta", _ABSENT), meta.get("type", _ABSENT)))
        if type(result) is torch.Tensor:
            meta["tensor_meta"] = metadata_of(result)
        elif any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(result)):
            meta["tensor_meta"] = map_aggregate(
                result, lambda leaf: metadata_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
            )
        else:
            meta.pop("tensor_meta", None)
        meta["type"] = type(result)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a submodule, or say what it would return."""
        if self._is_formal:
            module = self.fetch_attr(target)
            refuse_autocast(module._get_name())
            result = known_output(module, args, kwargs)
            if result is not None:
                return result
        return super().call_module(target, args, kwargs)

    # -- where it runs -----------------------------------------------------------------------------------------------

    @contextmanager
    def _prepared(self, inputs: Any) -> Generator[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
        tensors = tensors_in(inputs)
        fake_mode = self.fake_mode or _fake_mode_of(tensors)
        module = self.module
        is_without_values = any(tensor.is_meta for tensor in tensors or module.parameters())
        with ExitStack() as stack:
            stack.enter_context(self._notes_kept())
            has_values = fake_mode is None and not is_without_values
            stack.enter_context(preserve_model(module, self.graph, tensors, has_values=has_values))
            if fake_mode is not None:
                stack.enter_context(fake_mode)
                if fake_mode.shape_env is not None:
                    stack.enter_context(torch._C._EnablePythonDispatcher())
                stack.enter_context(FakeValues(fake_mode))
                yield lambda values: tree_map(_faker(fake_mode), values), _same
            elif is_without_values:
                self._is_formal = True
                stack.callback(setattr, self, "_is_formal", False)
                values = MetaValues([*module.parameters(), *module.buffers(), *tensors])
                stack.enter_context(values)
                stack.enter_context(ByRule(values.stand_in))
                yield _same, _same
            else:
                written = WrittenMemory()
                stack.callback(written.restore)
                stack.enter_context(written)
                yield _same, written.apart

    @contextmanager
    def _notes_kept(self) -> Generator[None]:
        self._replaced = []
        try:
            yield
        except BaseException:
            for node, *before in reversed(self._replaced):
                for name, value in zip(("tensor_meta", "type"), before, strict=True):
                    if value is _ABSENT:
                        node.meta.pop(name, None)
                    else:
                        node.meta[name] = value
            raise
        finally:
            self._replaced = []


def metadata_of(tensor: torch.Tensor) -> TensorMetadata:
    """Describe a tensor. O(1)."""
    is_plain, memory_format = tensor.layout is torch.strided, None
    if is_plain and not tensor.is_nested:
        for memory_format in _FORMATS:
            if tensor.is_contiguous(memory_format=memory_format):
                break
        else:
            memory_format = None
    return TensorMetadata(
        tensor.shape,
        tensor.dtype,
        tensor.requires_grad,
        tensor.stride() if is_plain else (),
        memory_format,
        tensor.is_quantized,
        _quantization_of(tensor) if tensor.is_quantized else {},
    )


def _quantization_of(tensor: torch.Tensor) -> dict[str, Any]:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"qscheme": scheme, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "qscheme": scheme,
        "scale": tensor.q_per_channel_scales().tolist(),
        "zero_point": tensor.q_per_channel_zero_points().tolist(),
        "axis": tensor.q_per_channel_axis(),
    }


def _same(value: Any) -> Any:
    return value


def _fake_mode_of(tensors: list[torch.Tensor]) -> Any:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    found = (tensor for tensor in tensors if fakes is not None and isinstance(tensor, fakes.FakeTensor))
    fake: Any = next(found, None)
    return None if fake is None else fake.fake_mode


def _faker(fake_mode: Any) -> Callable[[Any], Any]:
    return lambda leaf: fake_mode.from_tensor(leaf) if type(leaf) is torch.Tensor else leaf
