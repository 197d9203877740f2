"""trace and symbolic_trace: a model or a function as a graph module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, FeatxError, InputError, SpecializationError
from featx.examples import find_example, holds_inputs, inputs_in, inputs_of, refuse_shape, refused_guess
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.module import GraphModule, is_of_torch_fx
from featx.tracing.checks.checked_trace import trace_checked, trace_recording_mode_reads
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.freedom.gradient_mode import asks_for_gradients
from featx.tracing.freedom.other_mode import OtherMode
from featx.tracing.guards.guards import require_mode
from featx.tracing.inputs.given_example import example_for
from featx.tracing.replica.replica import modes_after_train, only_sets_flags
from featx.tracing.sizes.outcomes import FreeDims
from featx.tracing.symbolic.tracer import Tracer

_Result = TypeVar("_Result")


def symbolic_trace(
    root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
) -> GraphModule:
    """Trace a module or function symbolically and return its graph as a module; see `Tracer.trace`."""
    tracer = Tracer()
    graph = tracer.trace(root, concrete_args)
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "GraphModule")
    return GraphModule(tracer.root, graph, name)


def trace(root: nn.Module | Callable[..., Any], *args: Any, example_inputs: Any = None, **kwargs: Any) -> GraphModule:
    """Follow `root(*args, **kwargs)` and return the graph of every operation that ran, as a module.

    Without inputs, for a model that takes some, they are what it declares or its first layer suggests, as in
    `create_feature_extractor`. `example_inputs` may stand in place of them: a tensor, a tuple of positional inputs, or
    a dict of inputs by name.

    A replica of the model runs on tensors that have a form and no values; where it asks for a value, on a copy of the
    example. The model and the inputs are only read. Each node's meta has `qualified_name`, `source` (the line of the
    model) and, for a tensor, `shape` and `dtype`. `module.meta["free_dims"]` says which dimensions of the inputs are
    free; for an input for which the model would do something else, calling the module raises `SpecializationError`.

    One run, and some more at other sizes and in other dtypes where the model's code looks at these. O(nodes + modules)
    each.

    Raises:
        TraceError: something cannot be followed, or the model fails on inputs that were not given; the message says
            where and what to do.
        ArgumentTypeError: inputs are given in both ways, or `example_inputs` is something else.
    """
    return _with_inputs(root, args, kwargs, example_inputs)[0]


def _with_inputs(
    root: nn.Module | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], example_inputs: Any
) -> tuple[GraphModule, tuple[Any, ...], dict[str, Any]]:
    """Return a trace, and the inputs that it has followed.

    A container that is given as in a call, and is no input that the model takes, holds the inputs, as `example_inputs`
    does. That shows where the model raises.
    """
    args, kwargs, guessed_from = _inputs(root, args, kwargs, example_inputs)
    try:
        return _graph_module(root, args, kwargs, guessed_from), args, kwargs
    except FeatxError:
        raise
    except Exception as error:  # the model's own
        is_container = len(args) == 1 and isinstance(args[0], (tuple, list, Mapping))
        if kwargs or example_inputs is not None or not is_container:
            raise
        inside = inputs_in(args[0])
        try:
            return _graph_module(root, *inside, None), *inside
        except Exception as other:  # whatever it is, the inputs are no better in this form
            kind, took = type(args[0]).__name__, f"{type(other).__name__}: {other!s:.200}"
            error.add_note(
                f"This is for the {kind} as the only input. What is in it does not work as the inputs either ({took}). "
                "Give the inputs as in a call of the model, or by example_inputs=..."
            )
        raise


def _graph_module(
    root: nn.Module | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], guessed_from: str | None
) -> GraphModule:
    try:
        found, free_dims, is_for_both_modes = _checked_trace(root, args, kwargs)
    except FeatxError:
        raise
    except Exception as error:  # the model's own
        if guessed_from is not None and isinstance(root, nn.Module):
            raise refused_guess(root, guessed_from, error) from error
        raise
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "GraphModule")
    if isinstance(root, nn.Module) and not is_for_both_modes:
        reason = "a model has a graph for each mode: trace again after train() or eval()"
        require_mode(found.graph, root.training, reason)
    if isinstance(root, nn.Module) and not all(map(only_sets_flags, root.modules())):
        _require_kept_modes(found.graph, root)
    module = GraphModule(found.model_context.root, found.graph, name)
    module.meta["free_dims"] = free_dims
    return module


def _require_kept_modes(graph: Graph, root: nn.Module) -> None:
    """Let `graph` check the mode of a called module that `train` of the model leaves alone, as of a frozen batch norm.

    `train` of a graph sets the modes of all modules at once, so that one of them tells.
    """
    in_train, in_eval = (modes_after_train(root, training) for training in (True, False))
    called = tuple(f"{node.target}." for node in graph.find_nodes(op="call_module"))
    kept = (path for path, mode in in_train.items() if in_eval.get(path) is mode and f"{path}.".startswith(called))
    path = next(kept, None)
    if path is not None:
        reason = "the model's own train() leaves it as it is: call that of the model, and not of the graph"
        require_mode(graph, in_train[path], reason, path)


def _checked_trace(
    root: nn.Module | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ExampleTrace, FreeDims, bool]:
    """Return a trace, which dimensions of its inputs are free, and whether the other mode does the same."""
    tracer, known = ExampleTracer(keep_source=True), OtherMode(keeps_first=True)
    if isinstance(root, nn.Module) and all(map(only_sets_flags, root.modules())):
        found, free_dims = trace_recording_mode_reads(tracer, root, args, kwargs, None, known)
        known.drop()
        if known.reads is not None and not known.reads.any:
            return found, free_dims, True
    else:
        found, free_dims = trace_checked(tracer, root, args, kwargs, None, known)
    if not isinstance(root, nn.Module):
        return found, free_dims, False
    if not tracer.is_as_made:  # a first run in the other mode would be set up in another way
        known.first = None
    return found, free_dims, _is_same_in_other_mode(root, args, kwargs, found.graph, known.first)


def _is_same_in_other_mode(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Graph, first: Graph | None
) -> bool:
    """Say whether `graph`, which was `first` before the checks of what is fixed, holds in the other mode too.

    One run tells where the two differ. Only if they do not, all other checks are made in that mode as well.
    """
    training = not root.training
    try:
        if first is not None and (torch.is_grad_enabled() or not asks_for_gradients(first)):
            once = ExampleTracer(keep_source=True, training=training).trace(root, args, kwargs)
            if not is_same_graph(once.graph, first):
                return False
        other, _ = trace_checked(ExampleTracer(keep_source=True, training=training), root, args, kwargs)
    except Exception:  # whatever it is, the other mode cannot be said to be the same
        return False
    return is_same_graph(graph, other.graph)


def as_graph_module(
    root: object,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    example_inputs: Any = None,
    *,
    may_be_meta: bool = False,
) -> tuple[Any, Any, Any]:
    """Return a module that has a graph, and its inputs: what is given, or a trace of a model, and an example for it.

    `example_inputs` may stand in place of `args` and `kwargs`, in the forms that `create_feature_extractor` takes. An
    extractor without inputs gets those that it was made with where `may_be_meta`: on the meta device.
    """
    if isinstance(root, nn.Module) and len(args) == 1 and not kwargs and isinstance(args[0], (tuple, list)):
        refuse_shape(cast("list[Any]", args[0]), f"the input {args[0]!r:.80}")
    # By its class: a model may have attributes of any name.
    has_graph = isinstance(root, GraphModule) or has_several_graphs(root) or is_of_torch_fx(root)
    if has_graph or not isinstance(root, nn.Module):
        if len(args) == 1 and not kwargs and example_inputs is None and _is_container_for_graph(root, args[0]):
            args, kwargs = inputs_in(args[0])
        args, kwargs = inputs_of(args, kwargs, example_inputs)
        made_with = getattr(root, "meta", {}).get("example") if may_be_meta and not args and not kwargs else None
        return (root, args, kwargs) if made_with is None else (root, made_with.args, made_with.kwargs)
    return _with_inputs(root, args, kwargs, example_inputs)


def _is_container_for_graph(root: object, value: object) -> bool:
    """Say whether a value that is given as the first input of a graph holds inputs: that one is a tensor in a trace."""
    graph = getattr(root, "graph", None)
    if not isinstance(value, (tuple, list, Mapping)) or not isinstance(graph, Graph):
        return False
    first = next(iter(graph.find_nodes(op="placeholder")), None)
    return first is not None and "shape" in first.meta


def has_several_graphs(module: object) -> bool:
    """Say whether a module is an extractor that may have a graph for each kind of input."""
    return hasattr(type(module), "graph_modules_for")


def on_graph_that_holds(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[Any], _Result]
) -> _Result:
    """Return what `call` returns for `module`, or for that of its graphs which holds for these inputs.

    An extractor that makes a graph for each kind of input has several. One that none of them fits gets another one,
    which it does not keep.

    Raises:
        SpecializationError: the only graph does not hold.
    """
    if not has_several_graphs(module):
        return call(module)
    refused: SpecializationError | None = None
    for each in module.graph_modules_for(args, kwargs):
        try:
            return call(each)
        except SpecializationError as error:
            refused = refused or error
    raise refused or InputError(f"{type(module).__name__} has no graph for these inputs")


def _inputs(
    root: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any], str | None]:
    """Return the inputs of a call; without any, for a model that takes some, those of an example, and its source.

    A tuple, list or dict of inputs is read as in `example_inputs` where the first input is declared to be a tensor:
    otherwise it may be that input.
    """
    if (
        len(args) == 1
        and not kwargs
        and example_inputs is None
        and isinstance(root, nn.Module)
        and holds_inputs(root, args[0])
    ):
        args, example_inputs = (), args[0]
    if isinstance(root, nn.Module) and example_inputs is not None and not args and not kwargs:
        example_inputs = example_for(root, example_inputs)
    args, kwargs = inputs_of(args, kwargs, example_inputs)
    if args or kwargs or not isinstance(root, nn.Module) or not _needs_inputs(root):
        return args, kwargs, None
    example = find_example(root, root.training)
    if example is None:
        raise ArgumentTypeError(
            f"{type(root).__name__} does not declare its inputs; give them as in a call of the model: "
            f"forward{inspect.signature(root.forward)}"
        )
    return example.args, example.kwargs, example.source


def _needs_inputs(root: nn.Module) -> bool:
    """Say whether a model cannot be called without inputs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(root.forward).parameters.values()
    is_of_transformers = hasattr(root, "main_input_name")  # whose inputs all default to None
    is_optimized = hasattr(root, "why_not_traced")
    return (
        is_of_transformers
        or is_optimized
        or any(each.default is each.empty and each.kind not in variadic for each in parameters)
    )
