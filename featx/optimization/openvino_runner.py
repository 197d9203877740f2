"""Run an extractor by OpenVINO, whose float32 kernels for CPUs take less time than PyTorch's for many models."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from featx.errors import MissingExtraError, OptimizationError
from featx.interop.exported import writes_what_it_is_given
from featx.interop.program_integers import integers_of_tables
from featx.tree import tensors_in, tree_leaves, tree_map

# Integers of 64 bits are ones of 32 there, and so are floats.
_DTYPES = {torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8}
_LARGEST = torch.iinfo(torch.int32).max


def is_available() -> bool:
    """Say whether OpenVINO is installed."""
    return importlib.util.find_spec("openvino") is not None


def check_available() -> None:
    """Raise where OpenVINO is not installed.

    Raises:
        MissingExtraError: it is not; the message has the line for pip.
    """
    if not is_available():
        raise MissingExtraError('OpenVINO is not installed: pip install "featx[openvino]"', name="openvino")


class OpenVINORunner:
    """Calls an extractor by OpenVINO, on a CPU, without gradients.

    Each form of the inputs (shapes, dtypes, strides, and what is no tensor) is exported by `torch.export` and compiled
    in its first call, which takes seconds, and OpenVINO keeps a copy of the weights for it. The extractor itself is
    called where a form cannot be exported, under autocast, where two inputs are one tensor, and for what OpenVINO would
    not take as it is: integers beyond 32 bits or that no table of embeddings has, float64, tensors of other classes or
    of no elements. So are programs that compute integers, or look up values by those of inputs. Threads may call at the
    same time.

    Args:
        extractor: in eval mode. For each input of one form it returns tensors in one structure.

    Attributes:
        problem: why the last form that could not be exported is left to the extractor; empty where there is none.
    """

    def __init__(self, extractor: nn.Module) -> None:
        self.problem = ""
        self._extractor = extractor
        self._by_form: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the extractor returns."""
        leaves = list(tree_leaves((args, kwargs)))
        tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        are_apart = len(set(tensors)) == len(tensors)  # the model may notice that two inputs are one tensor
        if torch.is_autocast_enabled("cpu") or not are_apart or not all(map(_is_taken, leaves)):
            return self._extractor(*args, **kwargs)
        structure = tree_map(lambda leaf: None, (args, list(kwargs.items())))
        form = repr(structure), *map(_form_of, leaves)
        if form not in self._by_form:
            self._by_form[form] = self._compiled(args, kwargs)
        return self._by_form[form](*args, **kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        try:
            with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.no_grad():
                warnings.simplefilter("ignore")
                return _compile(self._extractor, *tree_map(_copied, (args, kwargs)))
        except Exception as error:  # whatever an exporter, OpenVINO or the model raises
            self.problem = f"OpenVINO: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
            return self._extractor


class _OfTensors(nn.Module):
    """Takes the tensors of inputs, and returns those of the result, in order. `note` is called with the result."""

    def __init__(
        self, extractor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], note: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self._inputs = args, kwargs
        self._note = note

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = _with_tensors(self._inputs, iter(tensors))
        result = self.extractor(*args, **kwargs)
        self._note(result)
        return tuple(tensors_in(result))


def _compile(extractor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that computes what the extractor does, for inputs of this form. Nothing is computed here."""
    import openvino  # pyright: ignore[reportMissingImports]

    tensors = tuple(tensors_in((args, kwargs)))
    results: list[Any] = []  # an attribute of the module would be put back
    program = torch.export.export(_OfTensors(extractor, args, kwargs, results.append), tensors)
    result = tree_map(_of_dtype, results[-1])
    if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in tree_leaves(result)):
        raise OptimizationError("a number that is returned follows from values")
    dtypes = [tensor.dtype for tensor in tensors_in(result)]
    if not all(
        tensor.dtype in _DTYPES for tensor in (*tensors_in(result), *extractor.parameters(), *extractor.buffers())
    ):
        raise OptimizationError("of floats, only those of 32 bits are computed as they are")
    if writes_what_it_is_given(program):
        raise OptimizationError("a call writes a buffer or an input")
    tables = integers_of_tables(program)
    if tables is None:
        raise OptimizationError("integers are computed, or values are looked up by integers of inputs")
    model: Any = openvino.convert_model(program)
    if len(model.inputs) != len(tensors) or len(model.outputs) != len(dtypes):
        raise OptimizationError("an input is used nowhere, or a value is returned twice")
    model.reshape({given: list(tensor.shape) for given, tensor in zip(model.inputs, tensors, strict=True)})
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Any = openvino.Core().compile_model(model, "CPU", settings)
    of_thread = threading.local()  # a request of OpenVINO serves one thread at a time

    def run(*args: Any, **kwargs: Any) -> Any:
        values = tensors_in((args, kwargs))
        if any(not _are_rows(values[place], count) for place, count in tables):
            return extractor(*args, **kwargs)
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        given = [tensor.detach().contiguous().numpy() for tensor in values]
        found = of_thread.request.infer(given, share_inputs=True)
        return _with_tensors(result, (torch.from_numpy(found[at]).to(dtype) for at, dtype in enumerate(dtypes)))

    return run


def _are_rows(numbers: torch.Tensor, count: int) -> bool:
    low, high = map(int, numbers.aminmax())
    return low >= 0 and high < count


def _with_tensors(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return tree_map(lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf, structure)


def _of_dtype(leaf: Any) -> Any:
    return torch.empty(0, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_taken(leaf: Any) -> bool:
    """Say whether OpenVINO computes with a value of an input as PyTorch does."""
    if not isinstance(leaf, torch.Tensor):
        return leaf is None or type(leaf) in (bool, int, float, str)
    if type(leaf) is not torch.Tensor or leaf.dtype not in _DTYPES or leaf.device.type != "cpu" or not leaf.numel():
        return False
    return leaf.dtype is not torch.int64 or max(map(abs, map(int, leaf.aminmax()))) <= _LARGEST


def _form_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(leaf.shape), leaf.dtype, None if leaf.is_contiguous() else leaf.stride()
