"""Find what forward does after the point at which a trace stopped early: write state, or call a module again."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from torch import nn

from featx.errors import TraceError
from featx.ir.effects import Effects
from featx.ir.equality import first_nodes
from featx.ir.memory import MemoryGroups
from featx.ir.operator_facts import facts_of
from featx.ir.paths import parents_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.checks.other_calls import attributes_assigned_in
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.full_run import SETS_HOOKS, FullRun, run_to_the_end
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.objects.module_parts import forward_of, registered_tensors, tensors_at
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import KEEP_WHOLE_ADVICE
from featx.tracing.sizes.same_needed import count_needed
from featx.tracing.source.attributes import is_read_once, names_read_in
from featx.tracing.source.location import names_in


def go_on_where_needed(request: TraceRequest, trace: ExampleTrace) -> ExampleTrace:
    """Return `trace`, or one for real that goes on where `trace` ended early and missed something that matters.

    A tensor of the model that the graph reads and that forward writes after that place would be another one in the
    next call, and a requested module that is called again there would return another value. To find out, the model runs
    once on a copy, and its source is read for what other inputs may write. Code that asks for values can be followed
    for real.

    Raises:
        TraceError: the code that does it cannot be followed.
    """
    if trace.early_stop_reason is None:
        return trace
    state = _ModelTensorUse(trace)
    needs_values = not trace.is_real and _may_write_by_any_code(trace, state)
    missed = None if needs_values else _missed(request, trace, state)
    if needs_values or (missed is not None and not trace.is_real):
        trace.drop_replica()
        conditions = Conditions("what follows the last node", is_real=True, gradients=trace.gradients)
        trace = request.run(trace, conditions)
        missed = None if trace.early_stop_reason is None else _missed(request, trace, _ModelTensorUse(trace))
    if missed is not None:
        name = trace.name
        raise TraceError(
            f"cannot trace {name}: forward {missed}, in code that cannot be followed: {trace.early_stop_reason}. To go "
            f"on, {KEEP_WHOLE_ADVICE}."
        )
    return trace


class _ModelTensorUse:
    """What the needed nodes of a trace do with the parameters and buffers of the model.

    Attributes:
        read: the paths of those that they may read, and that the graph itself does not write, each with the path of the
            module that does. This is a module that the graph calls, and whose own calls may write the tensor; "" where
            the graph reads the tensor itself.
        rewritten: the paths of those that they may read and that the graph itself writes.
    """

    def __init__(self, trace: ExampleTrace) -> None:
        graph, root = trace.graph, trace.model_context.root
        memory = MemoryGroups(graph, Effects(graph, root))
        written = memory.written()
        tensors = dict(registered_tensors(root))
        reads = [node for node in graph.find_nodes(op="get_attr") if node.target in tensors]
        rewritten = {str(node.target) for node in reads if memory.of(node) in written}
        by_graph = {str(node.target): "" for node in reads}
        readers = {str(node.target) for node in graph.find_nodes(op="call_module")}
        of_modules = {path: reader for path in tensors for reader in parents_of(path) if reader in readers}
        needed = [n for n in first_nodes(graph, count_needed(trace)) if n.op in ("get_attr", "call_module")]
        reached = tensors_at(root, [str(node.target) for node in needed])
        within_reach = {
            path: reader
            for path, reader in (of_modules | by_graph).items()
            if not reached.isdisjoint(tensors_at(root, [path]))
        }
        self.read = {path: reader for path, reader in within_reach.items() if path not in rewritten}
        self.rewritten = sorted(within_reach.keys() & rewritten)


def _may_write_by_any_code(trace: ExampleTrace, state: _ModelTensorUse) -> bool:
    """Say whether code that did not run may write what the graph reads by a method or a function of any kind."""
    missed = trace.conditional_writes() if state.read else ()
    root = trace.model_context.root
    written = tensors_at(root, chain.from_iterable(write.written for write in missed))
    return not written.isdisjoint(tensors_at(root, state.read))


def _missed(request: TraceRequest, trace: ExampleTrace, state: _ModelTensorUse) -> str | None:
    """Say what forward does after the place where a trace stopped, if that matters."""
    root = trace.model_context.root
    if any(_sets_gradient_hooks(type(module)) for module in root.modules()):
        return SETS_HOOKS
    missed = trace.possible_state_writes() if state.read else ()
    missed_tensors = tensors_at(root, chain.from_iterable(write.written for write in missed))
    written = [path for path in state.read if not missed_tensors.isdisjoint(tensors_at(root, [path]))]
    called = _called_again(request, trace)
    again = sorted(called & trace.called_later)
    if again:
        return f"may call '{again[0]}' again, whose last call is requested"
    return _missed_in_run(request, trace, state, called) if not written else _writes(written[0])


def _called_again(request: TraceRequest, trace: ExampleTrace) -> set[str]:
    """Return the requested modules that may be called after the place where the trace stopped."""
    tracer, root = request.tracer, trace.model_context.root
    modules = {str(node.target) for node in trace.graph.find_nodes(op="call_module")}
    leaves = {path for path in modules if tracer.is_leaf(root.get_submodule(path), path)}
    # Of a leaf, a name means the first call.
    return {
        path
        for path in trace.module_calls.requested_calls.keys() - leaves
        if _may_be_called_again(root, path, trace.module_calls.failed_module_path)
    }


def _missed_in_run(
    request: TraceRequest, trace: ExampleTrace, state: _ModelTensorUse, called: Collection[str]
) -> str | None:
    """Run a copy of the model to its end, and say what it does there that matters."""
    run = _run_to_the_end(request, trace, state.read, called)
    again = [path for path in sorted(called) if run.calls[path] > trace.module_calls.requested_calls[path]]
    if again:
        return f"calls '{again[0]}' again, whose last call is requested"
    if run.gradients is not None:
        return run.gradients
    written = [*run.written, *_written_again(trace, state, run)]
    if written:
        return _writes(written[0])
    stored = sorted(_read_attributes(trace, run.changed - attributes_assigned_in(trace)))
    if stored:
        path, name = stored[0]
        return f"stores a value in '{f'{path}.{name}'.lstrip('.')}', which the code of the requested nodes reads"
    return next(
        (
            f"calls '{path}' again, which writes its own tensors"
            for path, count in _writing_calls(trace).items()
            if run.runs[path] > count
        ),
        None,
    )


def _written_again(trace: ExampleTrace, state: _ModelTensorUse, run: FullRun) -> list[str]:
    """Return the paths of tensors that the graph writes, and that forward may write again where the trace has ended.

    Only a trace for real knows how often forward has written them until then.
    """
    if not state.rewritten or trace.model_writes is None:
        return state.rewritten
    counts = trace.model_writes.counts()
    assigned = {".".join(filter(None, attribute)) for attribute in attributes_assigned_in(trace)}
    return [path for path in state.rewritten if run.writes[path] > counts[path] or path in run.replaced - assigned]


def _writes(path: str) -> str:
    return f"writes '{path}', which the requested nodes read in the next call"


def _read_attributes(trace: ExampleTrace, changed: Iterable[Attribute]) -> Iterator[Attribute]:
    """Yield those of some attributes that code may read which runs before the last needed node."""
    modules = {path: module for module, path in trace.replica.paths.items()}
    needed = first_nodes(trace.graph, count_needed(trace))
    on_the_way = {"", *(path for node in needed for path in node.meta.get("nn_module_stack", ()))}
    reading = [path for path in on_the_way if path in modules and not is_torch_layer(type(modules[path]))]
    forwards = {path: forward_of(modules[path]) for path in reading}
    names = {
        path: names_read_in(forward, type(modules[path]))
        for path, forward in forwards.items()
        if inspect.isfunction(forward)
    }
    for owner, name in changed:
        if any(name in read and f"{owner}.".startswith(f"{path}." if path else "") for path, read in names.items()):
            yield owner, name


def _writing_calls(trace: ExampleTrace) -> Counter[str]:
    """Return how often needed nodes call each module that writes its own tensors, by path."""
    root = trace.model_context.root
    effects = Effects(trace.graph, root)
    needed = first_nodes(trace.graph, count_needed(trace))
    calls = [node for node in needed if node.op == "call_module" and effects.of(node).writes_state]
    paths = {id(module): path for path, module in root.named_modules()}
    return Counter(paths[id(root.get_submodule(node.target))] for node in calls)


def _run_to_the_end(
    request: TraceRequest, trace: ExampleTrace, read: Mapping[str, str], called: Collection[str]
) -> FullRun:
    """Run a copy of the model: on guessed inputs without the products, unless forward fails so and not with them."""
    context, tracer = trace.model_context, request.tracer

    def run(*, skips_products: bool) -> FullRun:
        replica, tensors = context.replica(tracer.training, "all")
        with tracer.log.run(context.name, "what follows the last node", is_real=True):
            found = run_to_the_end(
                context, replica, tensors, request.args, request.kwargs, read, called,
                skips_products=skips_products,
            )  # fmt: skip
        replica.drop()
        return found

    if tracer.inputs_are_guessed and not (quick := run(skips_products=True)).has_failed:
        return quick
    return run(skips_products=False)


@functools.lru_cache(maxsize=4096)
def _sets_gradient_hooks(kind: type[nn.Module]) -> bool:
    """Say whether a method of a class of the user's sets a hook for gradients; no where it cannot be read."""
    own = [each for each in kind.__mro__ if each is not object and not is_torch_layer(each)]
    methods = [value for each in own for value in vars(each).values() if inspect.isfunction(value)]
    return any(
        facts_of(name).changes_gradients
        for method in methods
        if method.__name__ != "__init__"
        for name in names_in(method.__code__)
    )


def _may_be_called_again(root: nn.Module, path: str, failed_module_path: str) -> bool:
    """Say whether a module may be called after the place where a trace broke off: inside of `failed_module_path`.

    It is not where a module around it that has come to its end is called once in one call of the next one around.
    """
    module, around = root, ""
    for name in path.split("."):
        if not is_read_once(type(module), name):
            return True
        module, around = module.get_submodule(name), f"{around}{name}."
        if not f"{failed_module_path}.".startswith(around):
            return False
    return True
