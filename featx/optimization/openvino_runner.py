"""Run an extractor by OpenVINO, whose float32 kernels for CPUs take less time than PyTorch's for many models."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from featx.errors import MissingExtraError, OptimizationError
from featx.interop.exported import writes_what_it_is_given
from featx.interop.program_integers import nodes_of_integers
from featx.interop.program_parts import calls_of, forms_of, inputs_of, outputs_of, part_of
from featx.tree import tensors_in, tree_leaves, tree_map

# Floats of 64 bits are computed in 32 there.
_DTYPES = {torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8}


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
    in its first call, which takes seconds, and OpenVINO keeps a copy of the weights for it. PyTorch computes what is
    done with integers, such as embeddings and masks, and what comes before that: OpenVINO computes integers of 32 bits
    and does not check by what it looks values up. The extractor itself is called where a form cannot be exported, under
    autocast, where two inputs are one tensor, and for float64, tensors of other classes and such without elements.
    Threads may call at the same time.

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
    tensors = tuple(tensors_in((args, kwargs)))
    results: list[Any] = []  # an attribute of the module would be put back
    program = torch.export.export(_OfTensors(extractor, args, kwargs, results.append), tensors)
    result = tree_map(_of_dtype, results[-1])
    if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in tree_leaves(result)):
        raise OptimizationError("a number that is returned follows from values")
    if not all(
        tensor.dtype in _DTYPES for tensor in (*tensors_in(result), *extractor.parameters(), *extractor.buffers())
    ):
        raise OptimizationError("of floats, only those of 32 bits are computed as they are")
    if writes_what_it_is_given(program):
        raise OptimizationError("a call writes a buffer or an input")
    compute = _in_two_parts(program)

    def run(*args: Any, **kwargs: Any) -> Any:
        return _with_tensors(result, iter(compute(tensors_in((args, kwargs)))))

    return run


def _in_two_parts(program: torch.export.ExportedProgram) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Return a function from inputs to results: PyTorch computes what is done with integers, OpenVINO all the rest."""
    if not nodes_of_integers(program) and _is_taken_whole(program):
        infer_all = _compile_program(program, forms_of(inputs_of(program)), forms_of(outputs_of(program)))
        return lambda tensors: list(infer_all(*tensors))
    program = program.run_decompositions({})  # parts have no calls in place
    inputs, outputs, of_torch = inputs_of(program), outputs_of(program), nodes_of_integers(program)
    of_openvino = {node for node in calls_of(program) if node not in of_torch}
    known = {*inputs, *of_torch}
    rest = part_of(program, of_openvino, [node for node in dict.fromkeys(outputs) if node not in known])
    first = part_of(program, of_torch, [node for node in dict.fromkeys((*rest.inputs, *outputs)) if node in of_torch])
    if not rest.outputs:
        raise OptimizationError("all values are computed with integers")
    forms = forms_of(rest.inputs)
    examples = tuple([torch.zeros(form.shape, dtype=form.dtype) for form in forms])
    infer = _compile_program(torch.export.export(rest.module, examples), forms, forms_of(rest.outputs))

    def compute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = dict(zip(inputs, tensors, strict=True))
        for part, function in ((first, first.module), (rest, infer)):
            found = function(*[values[node] for node in part.inputs]) if part.outputs else ()
            values.update(zip(part.outputs, found, strict=True))
        return [values[node] for node in outputs]

    return compute


def _is_taken_whole(program: torch.export.ExportedProgram) -> bool:
    """Say whether each input is used and each value is returned once, as OpenVINO wants it."""
    inputs, outputs = inputs_of(program), outputs_of(program)
    return all(node.users for node in inputs) and len({*inputs, *outputs}) == len(inputs) + len(outputs)


def _compile_program(
    program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Callable[..., Iterator[torch.Tensor]]:
    """Return a function that computes a program by OpenVINO, whose inputs and outputs have the form of these."""
    import openvino  # pyright: ignore[reportMissingImports]

    model: Any = openvino.convert_model(program)
    if len(model.inputs) != len(inputs) or len(model.outputs) != len(outputs):
        raise OptimizationError("an input is used nowhere")
    model.reshape({given: list(form.shape) for given, form in zip(model.inputs, inputs, strict=True)})
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Any = openvino.Core().compile_model(model, "CPU", settings)
    dtypes = [form.dtype for form in outputs]
    of_thread = threading.local()  # a request of OpenVINO serves one thread at a time

    def infer(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        given = [tensor.detach().contiguous().numpy() for tensor in tensors]
        found = of_thread.request.infer(given, share_inputs=True)
        return (torch.from_numpy(found[at]).to(dtype) for at, dtype in enumerate(dtypes))

    return infer


def _with_tensors(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return tree_map(lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf, structure)


def _of_dtype(leaf: Any) -> Any:
    return torch.empty(0, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_taken(leaf: Any) -> bool:
    """Say whether OpenVINO, or PyTorch beside it, computes with a value of an input as the extractor does."""
    if not isinstance(leaf, torch.Tensor):
        return leaf is None or type(leaf) in (bool, int, float, str)
    return type(leaf) is torch.Tensor and leaf.dtype in _DTYPES and leaf.device.type == "cpu" and leaf.numel() > 0


def _form_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(leaf.shape), leaf.dtype, None if leaf.is_contiguous() else leaf.stride()
