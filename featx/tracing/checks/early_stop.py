"""Find what forward does after the point at which a trace stopped early: write state, or call a module again."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Mapping
from itertools import chain

from torch import nn

from featx.errors import TraceError
from featx.ir.effects import Effects
from featx.ir.equality import first_nodes
from featx.ir.graph import Graph
from featx.ir.memory import MemoryGroups
from featx.ir.paths import parents_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.plain_run import FullRun, run_to_the_end
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.freedom.same_needed import count_needed
from featx.tracing.objects.module_tree import registered_tensors, tensors_at
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import KEEP_WHOLE_ADVICE
from featx.tracing.source.attributes import is_read_once

# `mul_(...)`, `p.data = ...`, `self.m += ...`, `w[0] = ...`
_WRITE = re.compile(r"(?<!_)_\(|\.data\b|\bself\.[\w.]+\s*[-+*/]=|\]\s*[-+*/]?=(?!=)")

_GRADIENT_HOOK = re.compile(r"\.(register_(post_accumulate_grad_)?hook|retain_grad)\b")


def go_on_where_needed(request: TraceRequest, trace: ExampleTrace) -> ExampleTrace:
    """Return `trace`, or one for real that goes on where `trace` ended early and missed something that matters.

    A tensor of the model that the graph reads and that forward writes after that place would be another one in the
    next call, and a requested module that is called again there would return another value. To find out, the model runs
    once on a copy, and its source is read for what other inputs may write. Code that asks for values can be followed
    for real.

    Raises:
        TraceError: the code that does it cannot be followed.
    """
    missed = _missed(request, trace)
    if not trace.is_real and (missed is not None or _may_write_by_any_code(trace)):
        trace.drop_replica()
        conditions = Conditions("what follows the last node", is_real=True, gradients=trace.gradients)
        trace = request.run(trace, conditions)
        missed = _missed(request, trace)
    if missed is not None:
        name = trace.name
        raise TraceError(
            f"cannot trace {name}: forward {missed}, in code that cannot be followed: {trace.early_stop_reason}. To go "
            f"on, {KEEP_WHOLE_ADVICE}."
        )
    return trace


def _may_write_by_any_code(trace: ExampleTrace) -> bool:
    """Say whether code that did not run may write what the graph reads by a method or a function of any kind."""
    if trace.early_stop_reason is None:
        return False
    read = _within_reach(_read_tensors(trace.graph, trace.model_context), trace)
    missed = trace.conditional_writes() if read else ()
    root = trace.model_context.root
    written = tensors_at(root, chain.from_iterable(write.written for write in missed))
    return not written.isdisjoint(tensors_at(root, read))


def _missed(request: TraceRequest, trace: ExampleTrace) -> str | None:
    """Say what forward does after the place where a trace stopped, if that matters."""
    if trace.early_stop_reason is None:
        return None
    tracer, root = request.tracer, trace.model_context.root
    if any(_has_line(type(module), _GRADIENT_HOOK, unless_known=False) for module in root.modules()):
        return "may register a hook for the gradients of a requested value"
    read = _within_reach(_read_tensors(trace.graph, trace.model_context), trace)
    missed = trace.missed_state_writes() if read else ()
    missed_tensors = tensors_at(root, chain.from_iterable(write.written for write in missed))
    written = [path for path in read if not missed_tensors.isdisjoint(tensors_at(root, [path]))]
    modules = {str(node.target) for node in trace.graph.find_nodes(op="call_module")}
    leaves = {path for path in modules if tracer.is_leaf(root.get_submodule(path), path)}
    # Of a leaf, a name means the first call.
    called = {
        path
        for path in trace.module_calls.calls_asked_for.keys() - leaves
        if _may_be_called_again(root, path, trace.module_calls.failed_module_path)
    }
    again = sorted(called & trace.called_later)
    if again:
        return f"may call '{again[0]}' again, whose last call is requested"
    if not written and (read or called):
        run = _run_to_the_end(request, trace, read, called)
        again = [path for path in sorted(called) if run.calls[path] > trace.module_calls.calls_asked_for[path]]
        if again:
            return f"calls '{again[0]}' again, whose last call is requested"
        written = run.written
    return f"writes '{written[0]}', which the requested nodes read in the next call" if written else None


def _run_to_the_end(
    request: TraceRequest, trace: ExampleTrace, read: Mapping[str, str], called: Collection[str]
) -> FullRun:
    """Run a copy of the model: on guessed inputs without convolutions, unless forward fails so and not with them."""
    context, tracer = trace.model_context, request.tracer

    def run(*, skips_convolutions: bool) -> FullRun:
        replica, _ = context.replica(tracer.training, "all")
        with tracer.log.run(context.name, "what follows the last node", is_real=True):
            found = run_to_the_end(
                context, replica, request.args, request.kwargs, read, called, skips_convolutions=skips_convolutions
            )
        replica.drop()
        return found

    if tracer.inputs_are_guessed and not (quick := run(skips_convolutions=True)).has_failed:
        return quick
    return run(skips_convolutions=False)


def _within_reach(read: dict[str, str], trace: ExampleTrace) -> dict[str, str]:
    """Return those of `_read_tensors` that needed nodes may read: their own, and those of the modules they call."""
    root = trace.model_context.root
    nodes = [node for node in first_nodes(trace.graph, count_needed(trace)) if node.op in ("get_attr", "call_module")]
    reached = tensors_at(root, [str(node.target) for node in nodes])
    return {path: reader for path, reader in read.items() if not reached.isdisjoint(tensors_at(root, [path]))}


def _read_tensors(graph: Graph, context: ModelContext) -> dict[str, str]:
    """Return the paths of the tensors of the model that a graph reads, each with the path of the module that does.

    What the graph writes itself is left out. The reader is a module that the graph calls, and whose own calls may write
    the tensor; "" where the graph reads the tensor itself.
    """
    root = context.root
    memory = MemoryGroups(graph, Effects(graph, root))
    written = memory.written()
    tensors = dict(registered_tensors(root))
    reads = [node for node in graph.find_nodes(op="get_attr") if node.target in tensors]
    found = {str(node.target): "" for node in reads if memory.of(node) not in written}
    if not any(_has_line(kind, _WRITE, unless_known=True) for kind in {type(module) for module in root.modules()}):
        buffers = {name for name, _ in root.named_buffers(remove_duplicate=False)}
        return {path: reader for path, reader in found.items() if path in buffers}
    readers = {str(node.target) for node in graph.find_nodes(op="call_module")}
    of_modules = {path: reader for path in tensors for reader in parents_of(path) if reader in readers}
    return of_modules | found


@functools.lru_cache(maxsize=4096)
def _has_line(kind: type[nn.Module], line: re.Pattern[str], *, unless_known: bool) -> bool:
    """Say whether a method of a class of the user's has such a line; `unless_known` where it cannot be read."""
    own = [each for each in kind.__mro__ if each is not object and not is_torch_layer(each)]
    methods = [value for each in own for value in vars(each).values() if inspect.isfunction(value)]
    try:
        return any(line.search(inspect.getsource(method)) for method in methods if method.__name__ != "__init__")
    except (OSError, TypeError):
        return unless_known


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
