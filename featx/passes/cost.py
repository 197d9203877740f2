"""cost: parameters, FLOPs, bytes moved and memory of each node of a graph, and of each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from featx.errors import ArgumentTypeError, CostError, InputError
from featx.interpret.interpreter import Interpreter
from featx.ir.memory import memory_of
from featx.ir.names import shown_name
from featx.ir.node import Node
from featx.ir.text import format_target
from featx.passes.cost_report import CostReport, NodeCost, sum_by_module
from featx.passes.counting import Count, OperatorCount
from featx.passes.flops import Rule
from featx.passes.hierarchy import Hierarchy
from featx.passes.lookup import quoted
from featx.passes.meta_execution import FakeValues
from featx.passes.preserved_state import WrittenMemory, preserve_model
from featx.passes.traffic import bytes_of
from featx.traced import as_graph_module, on_graph_that_holds
from featx.tracing.environment.fake_tensor_log import failures_expected
from featx.tree import tensors_in, tree_map


def cost(
    gm: nn.Module,
    *args: Any,
    example_inputs: Any = None,
    unknown: str = "raise",
    rules: Mapping[Any, Rule] | None = None,
    gradients: bool = False,
    **kwargs: Any,
) -> CostReport:
    """Count what a model or a graph computes, moves and holds in memory for these inputs, for each node and module.

    The graph runs on fake tensors, which have the device of the model and no values, and each operator that torch runs
    below a node is counted: a module that is kept whole counts as what runs inside it. Nothing is computed and no
    memory is taken, unless the graph asks for a value; then it runs for real. The model, its inputs and random
    generators stay as they were.

    - FLOPs: multiplications and additions of matrix products, convolutions and attentions (a multiply-add is two), as
      `torch.utils.flop_counter` counts them, and 5 n log2 n for a Fourier transform.
    - Element-wise operations: all else that computes, so many for each element whatever the function.
    - Bytes read and written: each operator reads its inputs once and writes its results once. Views are free.
    - Memory: what values take from where they are made until their last use; without inputs, weights, and
      what kernels use inside.

    The forward pass alone is counted; a backward pass takes about twice its FLOPs. O(operators), some tens of
    microseconds each; the first call in a process loads torch's fake tensors, which takes seconds.

    Args:
        gm: a graph module, or a model, which is traced.
        args: its inputs; those on the meta device stand for ones beside the weights. For a model they are by default
            what it declares or its first layer suggests, and for an extractor those that it was made with.
        example_inputs: the inputs in place of `args` and `kwargs`: a tensor, a tuple of positional inputs, or a dict of
            inputs by name.
        unknown: what to do with an operator that has no rule: "raise", or "list" it in `CostReport.unknown` and count
            no FLOPs for it.
        rules: FLOPs of your own operators: by `torch.ops.mylib.attention`, a function that gets the arguments of the
            operator and, as `result`, what it returned. Formulas that are registered with
            `torch.utils.flop_counter` are used too.
        gradients: run with autograd on, so that memory has what a backward pass needs.
        kwargs: inputs by name.

    Raises:
        CostError: there is no rule for an operator, or one raises; the message names the node, its line, and
            what to do.
        InputError: the graph takes other inputs.
    """
    if unknown not in ("raise", "list"):
        raise ArgumentTypeError(f"unknown must be 'raise' or 'list', got {unknown!r}")
    gm, args, kwargs = as_graph_module(gm, args, kwargs, example_inputs, may_be_meta=True)

    def count(each: nn.Module) -> CostReport:
        return _Run(each, is_unknown_listed=unknown == "list", rules=rules).count(args, kwargs)

    with torch.set_grad_enabled(gradients):
        return on_graph_that_holds(gm, args, kwargs, count)


class _Run:
    """Counts one module, on fake tensors or for real."""

    def __init__(self, gm: nn.Module, *, is_unknown_listed: bool, rules: Mapping[Any, Rule] | None) -> None:
        self._gm = gm
        self._graph = Interpreter(gm).graph
        self._is_unknown_listed = is_unknown_listed
        self._rules = rules

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CostReport:
        try:
            with failures_expected():
                return self.on_fakes(args, kwargs)
        except (CostError, InputError):
            raise
        except Exception:  # perhaps one that fake tensors alone raise, each in its own way
            tensors = [*tensors_in((args, kwargs)), *self._gm.parameters(), *self._gm.buffers()]
            if any(tensor.is_meta for tensor in tensors):
                raise
        return self.for_real(args, kwargs)

    def on_fakes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CostReport:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake_mode = FakeTensorMode()
        fakes = FakeValues(fake_mode)
        weights = [*self._gm.parameters()] or [*self._gm.buffers()] or [torch.empty(0, device="cpu")]
        devices = {tensor.device for tensor in weights}
        device = devices.pop() if len(devices) == 1 else None

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_meta and device is not None and device.type != "meta":
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            return fakes.fake(value)

        given = tensors_in((args, kwargs))
        with preserve_model(self._gm, self._graph, given, has_values=False), fake_mode, fakes:
            return self._count(*tree_map(fake, (args, kwargs)))

    def for_real(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CostReport:
        written = WrittenMemory()
        with preserve_model(self._gm, self._graph, tensors_in((args, kwargs))):
            try:
                with written:
                    return self._count(args, kwargs)
            finally:
                written.restore()

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CostReport:
        gm, inputs = self._gm, tensors_in((args, kwargs))
        weights = [*gm.parameters(), *gm.buffers()]
        interpreter = _CountingInterpreter(gm, self._is_unknown_listed)
        with OperatorCount(gm.parameters(), [*gm.buffers(), *inputs], self._rules, interpreter.on_unknown) as counter:
            interpreter.counter = counter
            result = interpreter.run(*args, **kwargs)
            kept = counter.alive
        del result
        nodes = tuple(interpreter.rows)
        return CostReport(
            nodes=nodes,
            modules=sum_by_module(nodes, interpreter.parameters, interpreter.around, interpreter.hierarchy),
            weight_bytes=sum({memory_of(tensor): bytes_of(tensor) for tensor in weights}.values()),
            input_bytes=sum({memory_of(tensor): bytes_of(tensor) for tensor in inputs}.values()),
            kept_bytes=kept,
        )


class _CountingInterpreter(Interpreter):
    """Makes a row for each node of what `counter` counts while it runs."""

    counter: OperatorCount

    def __init__(self, gm: nn.Module, is_unknown_listed: bool) -> None:
        super().__init__(gm)
        self.rows: list[NodeCost] = []
        # For each row: the parameters that the node read, by memory, and the paths of the modules around it.
        self.parameters: list[dict[int, torch.Tensor]] = []
        self.around: list[tuple[str, ...]] = []
        self.hierarchy = Hierarchy(gm)
        self._is_unknown_listed = is_unknown_listed
        self._node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._node = n
        count = self.counter.now = Count(peak=self.counter.alive)
        result = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            self._add_row(n, count, result)
        return result

    def on_unknown(self, operator: str) -> None:
        """Raise, unless unknown operators are to be listed."""
        node = self._node
        if self._is_unknown_listed or node is None:
            return
        packet = operator.partition(".")[0].replace("::", ".")
        raise CostError(
            f"there is no FLOP rule for {packet}, which node {quoted(node)} runs; pass one with "
            f"rules={{torch.ops.{packet}: function}}, or go on without with unknown='list'"
        )

    def _add_row(self, node: Node, count: Count, result: Any) -> None:
        around = self.hierarchy.around(node)
        self.rows.append(
            NodeCost(
                name=node.name,
                qualified_name=shown_name(node),
                op=node.op,
                target=format_target(node.target),
                path=around[-1],
                shape=tuple(result.shape) if isinstance(result, torch.Tensor) else None,
                operators=count.operators,
                unknown=count.unknown,
                flops=count.flops,
                elementwise=count.elementwise,
                bytes_read=count.bytes_read,
                bytes_written=count.bytes_written,
                parameters=sum(tensor.numel() for tensor in count.parameters.values()),
                parameter_bytes=sum(map(bytes_of, count.parameters.values())),
                allocated=count.allocated,
                peak=count.peak,
            )
        )
        self.parameters.append(count.parameters)
        self.around.append(around)
