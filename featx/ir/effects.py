"""What a call writes, what memory its result may share, and whether it draws random numbers.

The facts about operators and modules are in operator_facts.py, module_effects.py and callables.py. Operators are asked
for their schema, in which torch states what is written and what is a view; the tables hold only what schemas do not
say. What is not known is assumed to write its arguments and to return a view of them, so the answers err on the side of
keeping code.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featx.ir.apart import later_of, returned_of
from featx.ir.arguments import nodes_in
from featx.ir.callables import has_own_name, is_given_code, is_reading_builtin, is_switch
from featx.ir.known_tensors import KnownTensors
from featx.ir.module_effects import module_draws, module_effects, module_writes_state
from featx.ir.modules import modules_of
from featx.ir.names import has_borrowed_name, qualified_name
from featx.ir.node import Node
from featx.ir.operator_facts import (
    RENORMALIZING,
    draws_now,
    facts_of,
    facts_of_call,
    first_argument,
    is_magic,
    is_set,
    is_training,
    is_written,
    renormalizes,
    statistics_written,
)
from featx.ir.paths import held_at, module_at
from featx.ir.runtime_checks import is_runtime_check
from featx.ir.side_effects import is_marked
from featx.libraries import training_argument_of
from featx.rebuilding import rebuild_dict, rebuild_list, rebuild_object, rebuild_tuple
from featx.tree import clone_tensors, held, items_at, with_defaults

if TYPE_CHECKING:
    from featx.ir.graph import Graph

_CHECKS = frozenset({"torch._assert", "torch._assert_async", "torch._check"})
# Modules of Python whose functions never write their arguments.
_PURE_MODULES = frozenset({"math", "functools", "itertools", "typing", "dataclasses"})
# What operators of Python and methods with such names do besides those that write or give a view: they compute.
_COMPUTING = frozenset(name for name in vars(operator) if name not in ("call", "iconcat")) | frozenset(
    "bool int float complex round divmod len hash repr str format reversed dir sizeof trunc floor ceil "
    "array_priority".split()
)

# Those of them that put lists, tuples or dicts together.
_JOINING = frozenset("add radd iadd concat mul rmul imul or or_ ror ior".split())


@dataclasses.dataclass(frozen=True)
class CallEffects:
    """The effects of one node: the inputs that it may write, those that its result may share memory with, and more.

    `is_opaque` says that the writes are assumed, because the call is unknown. `is_check` marks an assertion,
    `is_random` a draw of random numbers, `changes_global_state` a switch such as autocast, `writes_state` a write to
    buffers of the called module. `leaves_attributes` says that the called module gets other attributes, which a later
    call of it may read, and `returns_state` that the result may share memory with what it keeps. `writes_elsewhere`
    says that it writes tensors of the model that are not those of the called module.
    """

    writes: tuple[Node, ...] = ()
    shares: tuple[Node, ...] = ()
    is_opaque: bool = False
    is_check: bool = False
    is_random: bool = False
    changes_global_state: bool = False
    writes_state: bool = False
    leaves_attributes: bool = False
    returns_state: bool = False
    writes_elsewhere: bool = False
    shares_if_container: bool = False

    @property
    def has_side_effects(self) -> bool:
        """Whether the call does something besides computing its value; that it draws random numbers does not count."""
        return bool(
            self.writes or self.is_check or self.changes_global_state or self.writes_state or self.leaves_attributes
        )


_NOTHING = CallEffects()
_REBUILDING = (held, items_at, rebuild_dict, rebuild_list, rebuild_object, rebuild_tuple, with_defaults)


@dataclasses.dataclass(frozen=True)
class MeasuredEffects:
    """What a call was seen to do when it ran; a tracer leaves it in `node.meta["effects"]`.

    `writes` and `shares` are positions in `node.all_input_nodes`. `has_conditional_writes` says that its code has
    writes to inputs under conditions that did not hold.
    """

    writes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    is_random: bool = False
    writes_state: bool = False
    leaves_attributes: bool = False
    has_conditional_writes: bool = False
    returns_state: bool = False
    writes_elsewhere: bool = False

    def joined(self, other: MeasuredEffects) -> MeasuredEffects:
        """Return what either of two runs of one call did."""
        return MeasuredEffects(
            writes=tuple(sorted({*self.writes, *other.writes})),
            shares=tuple(sorted({*self.shares, *other.shares})),
            is_random=self.is_random or other.is_random,
            writes_state=self.writes_state or other.writes_state,
            leaves_attributes=self.leaves_attributes or other.leaves_attributes,
            has_conditional_writes=self.has_conditional_writes or other.has_conditional_writes,
            returns_state=self.returns_state or other.returns_state,
            writes_elsewhere=self.writes_elsewhere or other.writes_elsewhere,
        )

    def of(self, node: Node) -> CallEffects:
        """Return them as the effects of `node`."""
        inputs = tuple(node.all_input_nodes)
        return CallEffects(
            writes=inputs if self.has_conditional_writes else tuple([inputs[position] for position in self.writes]),
            shares=tuple([inputs[position] for position in self.shares]),
            is_opaque=self.has_conditional_writes,
            is_random=self.is_random,
            writes_state=self.writes_state,
            leaves_attributes=self.leaves_attributes,
            returns_state=self.returns_state,
            writes_elsewhere=self.writes_elsewhere,
        )


class Effects:
    """The effects of the calls of one graph.

    `root` is the module that has the graph's targets (by default the graph's owner); without it a `call_module` may
    do anything. Answers are remembered for each node; make a new object after editing the graph.
    """

    def __init__(self, graph: Graph, root: object | None = None) -> None:
        self._root = graph.owning_module if root is None else root
        self._calls: dict[Node, CallEffects] = {}
        self._schemas: dict[str, list[Any]] = {}
        # Operators that write nothing in their plain form: whether the result may be a view.
        self._plain: dict[tuple[str, Any], bool] = {}
        self._tensors = KnownTensors(self._root)

    def of(self, node: Node) -> CallEffects:
        """Return what `node` does besides computing its value."""
        known = self._calls.get(node)
        if known is None:
            known = self._calls[node] = self._find(node)
        return known

    def is_impure(self, node: Node, *, impure_random: bool = True) -> bool:
        """Say whether `node` must run although nothing reads it, whatever is around it."""
        if node.op in ("placeholder", "output"):
            return True
        effects = self.of(node)
        return effects.has_side_effects or (impure_random and effects.is_random)

    def copies_if_needed(self, node: Node) -> bool:
        """Say whether it depends on the form of its input whether `node` shares its memory, or gives a copy."""
        if node.op == "call_module":
            return isinstance(self.module_of(node), (nn.Flatten, nn.Upsample))
        return facts_of_call(node).copies_if_needed

    def module_of(self, node: Node) -> nn.Module | None:
        """Return the module that a `call_module` node calls, or None where the root has none at that path."""
        return module_at(self._root, node.target)

    def storage_of(self, node: Node) -> object:
        """Return what two `get_attr` nodes have in common if they read one memory: its storage, or else the path."""
        value = held_at(self._root, node.target)
        is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return value.untyped_storage()._cdata if is_strided else node.target

    def _find(self, node: Node) -> CallEffects:
        measured: MeasuredEffects | None = node.meta.get("effects")
        if measured is not None:
            return measured.of(node)
        is_view = self._plain.get((node.op, node.target)) if not node.kwargs else None
        if is_view is not None:
            return CallEffects(shares=_nodes(node)) if is_view else _NOTHING
        if node.op == "call_method":
            if is_magic(node.target):
                return _of_python_operator(node, node.target[2:-2], self._tensors)
            return self._of_operator(node, node.target)
        if node.op == "call_function":
            return self._of_function(node, node.target)
        if node.op == "call_module":
            return self._of_module(node)
        return _NOTHING

    # -- functions and methods ---------------------------------------------------------------------------------------

    def _of_function(self, node: Node, function: Callable[..., Any]) -> CallEffects:
        if is_marked(function) or has_borrowed_name(function):
            return dataclasses.replace(_unknown(node), writes_state=True)
        name = qualified_name(function)
        module, _, short = name.rpartition(".")
        if name in _CHECKS or is_runtime_check(function):
            return CallEffects(is_check=True)
        if function is clone_tensors:
            return _NOTHING
        if function is later_of or function is returned_of:
            return CallEffects(shares=_first_node(node))
        if any(function is each for each in _REBUILDING):
            return CallEffects(shares=_nodes(node))
        if name.startswith("torch.ops.profiler.") or (name.startswith("torch.") and is_switch(short)):
            return CallEffects(changes_global_state=True)
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return self._of_overloads(node, function)
        if not has_own_name(function) or is_given_code(node):
            return _unknown(node)
        if module == "operator":
            return _of_python_operator(node, short, self._tensors)
        if isinstance(function, type) or module.split(".")[0] in _PURE_MODULES:
            return CallEffects(shares=_nodes(node))
        if not module and is_reading_builtin(short):
            return CallEffects(shares=_nodes(node))
        if module == "torch" or module.startswith(("torch.nn.functional", "torch._C", "torch.Tensor", "torch.ops")):
            return self._of_operator(node, short)
        if module.startswith("torch.") and not module.startswith("torch.distributed"):
            # fft, linalg, nn.init and the like: they write no argument without saying so in their name.
            is_init = module == "torch.nn.init"
            writes = _first_node(node) if is_init or short.endswith("_") else ()
            is_random = is_init or _is_random(node, short)
            return CallEffects(writes=writes + _out_argument(node), shares=_nodes(node), is_random=is_random)
        position = training_argument_of(name)
        if position is not None:
            is_random = is_training(node.args, node.kwargs, position, by_default=True)
            return CallEffects(shares=_nodes(node), is_random=is_random)
        return _unknown(node)

    def _of_operator(self, node: Node, name: str) -> CallEffects:
        facts = facts_of(name)
        if facts.changes_gradients:
            return CallEffects(writes=_first_node(node))
        if name in ("setitem", "set_"):
            return CallEffects(writes=_first_node(node), shares=_nodes(node))
        if is_set(node.args, node.kwargs, "inplace", _inplace_position(node)):
            return CallEffects(writes=_first_node(node), shares=_first_node(node), is_random=_is_random(node, name))
        if renormalizes(name, node.args, node.kwargs):
            return CallEffects(writes=_nodes(node))
        if facts.writes_statistics:
            return CallEffects(writes=tuple(nodes_in(statistics_written(node.target, node.args, node.kwargs))))
        schemas = self._schemas.get(name)
        if schemas is None:
            schemas = self._schemas[name] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        if not schemas and node.op == "call_method" and not hasattr(torch.Tensor, name):
            # A method of something else than a tensor: `features.append(x)`.
            return CallEffects(writes=_first_node(node), shares=_nodes(node), is_opaque=True)
        if not schemas:
            writes = _first_node(node) if name.endswith("_") else ()
            return CallEffects(
                writes=writes + _out_argument(node), shares=_nodes(node), is_random=_is_random(node, name)
            )
        return self._from_schemas(node, schemas, name)

    def _of_overloads(self, node: Node, function: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> CallEffects:
        # An operator of `torch.ops`, perhaps one of another library that has the name of one of torch's.
        is_one = isinstance(function, torch._ops.OpOverload)
        overloads = [function] if is_one else [getattr(function, name) for name in function.overloads()]
        namespace, _, name = overloads[0]._schema.name.partition("::")
        if namespace == "aten" and (not is_one or name == "set_" or facts_of(name).writes_statistics):
            return self._of_operator(node, name)
        effects = self._from_schemas(node, [each._schema for each in overloads], name)
        is_random = any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
        return dataclasses.replace(effects, is_random=True) if is_random else effects

    def _from_schemas(self, node: Node, schemas: list[Any], name: str) -> CallEffects:
        writes: dict[Node, None] = dict.fromkeys(_out_argument(node))
        facts = facts_of(name)
        is_view = facts.may_return_input
        for schema in schemas:
            arguments = schema.arguments
            if not writes and any(argument.kwarg_only and is_written(argument) for argument in arguments):
                continue  # the form with `out=`, which this is not
            is_view = is_view or any(result.alias_info is not None for result in schema.returns)
            for position, argument in enumerate(arguments):
                if is_written(argument) and not argument.kwarg_only:
                    value = _argument(node, position, argument.name)
                    writes.update(dict.fromkeys(nodes_in(value)))
        is_random = _is_random(node, name)
        depends = facts.draws or facts.dropout_at is not None or name in RENORMALIZING
        if not writes and not depends and _inplace_position(node) is None:
            self._plain[node.op, node.target] = is_view
        shares = tuple(writes) if writes else (_nodes(node) if is_view else ())
        return CallEffects(writes=tuple(writes), shares=shares, is_random=is_random)

    # -- modules -----------------------------------------------------------------------------------------------------

    def _of_module(self, node: Node) -> CallEffects:
        module = self.module_of(node)
        inputs = _nodes(node)
        if module is None:
            return dataclasses.replace(_unknown(node), writes_state=True)
        parts = modules_of(module)
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return dataclasses.replace(_unknown(node), writes_state=True)
        writes, shares = module_effects(module)
        return CallEffects(
            writes=inputs if writes else (),
            shares=inputs if shares or writes else (),
            is_opaque=writes and not module.__dict__.get("inplace"),
            is_random=any(module_draws(part) for part in parts),
            writes_state=any(module_writes_state(part) for part in parts),
        )


def _of_python_operator(node: Node, name: str, tensors: KnownTensors) -> CallEffects:
    if name in ("setitem", "delitem"):
        # A dict or list that gets a value holds its memory from then on.
        return CallEffects(writes=_first_node(node), shares=_nodes(node))
    if name == "iconcat":
        return CallEffects(writes=_first_node(node), shares=_nodes(node))
    if _may_join_containers(node, name, tensors):
        writes = _first_node(node) if facts_of(name).writes_first else ()
        return CallEffects(writes=writes, shares=_nodes(node), shares_if_container=True)
    if facts_of(name).writes_first or name == "next":
        return CallEffects(writes=_first_node(node), shares=_first_node(node))
    if name in ("getitem", "pos", "iter", "array"):
        return CallEffects(shares=_first_node(node))
    is_known = name in _COMPUTING or name.removeprefix("r") in _COMPUTING
    return _NOTHING if is_known else _unknown(node)


def _unknown(node: Node) -> CallEffects:
    """Return the effects of code that may do anything with what it is given."""
    return CallEffects(writes=_nodes(node), shares=_nodes(node), is_opaque=True, is_random=True)


def _may_join_containers(node: Node, name: str, tensors: KnownTensors) -> bool:
    """Say whether an operator may make a list, tuple or dict of what its operands hold, as `parts[1:] * 2` does."""
    if name not in _JOINING:
        return False
    # A list times a number is a list, and a list plus a number is an error.
    numbers = (float, complex) if name in ("mul", "rmul", "imul") else (int, float, complex)
    return not any(isinstance(value, numbers) or tensors.has(value) for value in node.args)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _nodes(node: Node) -> tuple[Node, ...]:
    return tuple(node.all_input_nodes)


def _first_node(node: Node) -> tuple[Node, ...]:
    return tuple(nodes_in(first_argument(node.args, node.kwargs)))


def _argument(node: Node, position: int, name: str) -> Any:
    """Return an argument of a call of torch by its position and name in a schema, in which the first one is `self`."""
    if position < len(node.args):
        return node.args[position]
    return first_argument((), node.kwargs) if name == "self" else node.kwargs.get(name)


def _out_argument(node: Node) -> tuple[Node, ...]:
    return tuple(nodes_in(node.kwargs.get("out")))


def _inplace_position(node: Node) -> int | None:
    if node.op != "call_function" or not inspect.isfunction(node.target) or "inplace" not in _parameters(node.target):
        return None
    return _parameters(node.target).index("inplace")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_random(node: Node, name: str) -> bool:
    return draws_now(name, node.args, node.kwargs)
