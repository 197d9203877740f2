"""Node: one operation of a graph, linked to what it reads and to who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError, OpcodeError
from featx.ir.arguments import ATOMS, Argument, Operand, collect_nodes, freeze, map_arg
from featx.ir.identifiers import Target, is_legal_target, keyword_names, legal_target, plain_text, with_hash
from featx.ir.immutable import ImmutableDict
from featx.ir.opcodes import LEGAL_OPS
from featx.ir.order import LABEL_STEP, spread_labels

if TYPE_CHECKING:
    from torch import nn

    from featx.ir.graph import Graph
    from featx.ir.schemas import ArgsKwargsPair

NO_KWARGS = ImmutableDict()


class Node(Operand):
    """One operation of a `Graph`, as torch.fx defines it.

    `op` says what happens, `target` to whom, `args` and `kwargs` with what:

    - `placeholder`: an input named `target`; `args` is empty or holds its default value.
    - `get_attr`: the parameter, buffer or attribute at the dotted path `target`.
    - `call_function`: `target(*args, **kwargs)`.
    - `call_method`: the method named `target` of `args[0]`.
    - `call_module`: the submodule at the dotted path `target`.
    - `output`: returns `args[0]`.

    Nodes are made by the methods of `Graph`, compare by their place in it (`first < second`, O(1)) and are equal
    only to themselves. `users` maps each reader to None, in the order in which they came. `meta` is free for passes.
    Attributes of your own may be set on a node.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_args",
        "_erased",
        "_kwargs",
        "_next",
        "_op",
        "_pending",
        "_prev",
        "_target",
        "graph",
        "label",
        "meta",
        "name",
        "type",
        "users",
    )

    # The linked list is circular through the graph's root node, so these are never None once a node is in it.
    _next: Node
    _prev: Node

    def __init__(
        self,
        graph: Graph,
        name: str,
        op: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        return_type: Any = None,
    ) -> None:
        if callable(target) is not (op == "call_function") or (op not in LEGAL_OPS and op != "root"):
            legal_target(op, target)
        self.graph = graph
        self.name = name
        self._op = op
        self._target = target
        self.type = return_type
        self.users: dict[Node, None] = {}
        self.meta: dict[str, Any] = {}
        self._erased = False
        self.label = 0
        # Arguments, and which inputs were replaced in them by which, while the outcome was not read; `_args` and
        # `_kwargs` are unset then.
        self._pending: tuple[tuple[Argument, ...], dict[str, Argument], dict[Node, Node]] | None = None
        self._args, self._kwargs = self._adopt(args, kwargs)

    # -- what the node does ------------------------------------------------------------------------------------------

    @property
    def op(self) -> str:
        """The opcode; assigning one counts as an edit of the graph."""
        return self._op

    @op.setter
    def op(self, op: str) -> None:
        if op not in LEGAL_OPS:
            raise OpcodeError(
                f"node '{self.name}': unknown opcode {op!r}; expected one of {', '.join(sorted(LEGAL_OPS))}"
            )
        self.graph.reindex(self, op, self._target)
        self._op = op

    @property
    def target(self) -> Any:  # Any: torch.fx's readers use it as str or as callable without asking which
        """What is called, fetched or named; assigning one counts as an edit of the graph."""
        return self._target

    @target.setter
    def target(self, target: Target) -> None:
        if isinstance(target, str):
            target = plain_text(target)
        target = with_hash(target)
        self.graph.reindex(self, self._op, target)
        self._target = target

    @property
    def args(self) -> tuple[Argument, ...]:
        """The positional arguments; assigning new ones updates `users` of the nodes that are in them."""
        try:
            return self._args
        except AttributeError:
            return self._apply_replacements()[0]

    @args.setter
    def args(self, args: tuple[Argument, ...]) -> None:
        # Code written for torch.fx, which takes it, assigns a list.
        self._assign(tuple(args) if type(cast(object, args)) is list else args, self.kwargs)

    @property
    def kwargs(self) -> dict[str, Argument]:
        """The keyword arguments; assigning new ones updates `users` of the nodes that are in them."""
        try:
            return self._kwargs
        except AttributeError:
            return self._apply_replacements()[1]

    @kwargs.setter
    def kwargs(self, kwargs: dict[str, Argument]) -> None:
        self._assign(self.args, kwargs)

    @property
    def all_input_nodes(self) -> list[Node]:
        """The nodes in `args` and `kwargs`, each once, in the order of their first use."""
        inputs: dict[Node, None] = {}
        for argument in self.args:
            kind = type(argument)
            if kind is Node:
                inputs[argument] = None
            elif kind not in ATOMS:
                collect_nodes(argument, inputs)
        if self._kwargs:  # set, as `args` has been read
            collect_nodes(self._kwargs, inputs)
        return list(inputs)

    @property
    def _input_nodes(self) -> dict[Node, None]:
        # torch.fx's private name for them, which code reads.
        return dict.fromkeys(self.all_input_nodes)

    def update_arg(self, idx: int, arg: Argument) -> None:
        """Replace `args[idx]` by `arg`."""
        args = list(self.args)
        args[idx] = arg
        self.args = tuple(args)

    def insert_arg(self, idx: int, arg: Argument) -> None:
        """Insert `arg` before `args[idx]`.

        Raises:
            GraphError: `idx` is not between 0 and the number of arguments.
        """
        args = self.args
        if not 0 <= idx <= len(args):
            raise GraphError(f"node '{self.name}' has {len(args)} arguments; cannot insert one at {idx}")
        self.args = (*args[:idx], arg, *args[idx:])

    def update_kwarg(self, key: str, arg: Argument) -> None:
        """Set `kwargs[key]` to `arg`."""
        self.kwargs = {**self.kwargs, key: arg}

    @property
    def stack_trace(self) -> str | None:
        """Where the model made this node, if the tracer recorded it."""
        return self.meta.get("stack_trace")

    @stack_trace.setter
    def stack_trace(self, trace: str | None) -> None:
        self.meta["stack_trace"] = trace

    # -- its place in the graph --------------------------------------------------------------------------------------

    @property
    def next(self) -> Node:
        """The node after this one."""
        return self._next

    @property
    def prev(self) -> Node:
        """The node before this one."""
        return self._prev

    def prepend(self, x: Node) -> None:
        """Move `x`, a node of the same graph, to just before this node. O(1), amortised."""
        self._check_movable(x)
        if x is not self:
            x._unlink()
            x.link_between(self._prev, self)

    def append(self, x: Node) -> None:
        """Move `x`, a node of the same graph, to just after this node. O(1), amortised."""
        self._check_movable(x)
        if x is not self:
            x._unlink()
            x.link_between(self, self._next)

    def __lt__(self, other: Node) -> bool:
        return self.label < other.label

    def __gt__(self, other: Node) -> bool:
        return self.label > other.label

    def __le__(self, other: Node) -> bool:
        return self.label <= other.label

    def __ge__(self, other: Node) -> bool:
        return self.label >= other.label

    # -- edits -------------------------------------------------------------------------------------------------------

    def replace_all_uses_with(
        self,
        replace_with: Node,
        delete_user_cb: Callable[[Node], bool] | None = None,
        *,
        propagate_meta: bool = False,
    ) -> list[Node]:
        """Let every user of this node read `replace_with` instead, and return those users. O(uses).

        `replace_with` itself is left alone: where it reads this node (it was built to wrap it), reading itself
        instead would be a cycle. `delete_user_cb` picks the users to change; `propagate_meta` copies `meta` to a
        replacement that has none.

        Raises:
            ForeignNodeError: `replace_with` belongs to another graph.
            GraphError: `propagate_meta` is asked for and the replacement has `meta` of its own.
        """
        self._check_same_graph(replace_with)
        if propagate_meta:
            if replace_with.meta:
                raise GraphError(f"node '{replace_with.name}' has meta of its own; pass propagate_meta=False")
            replace_with.meta.update(self.meta)
        changed: list[Node] = []
        for user in list(self.users):
            if user is not replace_with and (delete_user_cb is None or delete_user_cb(user)):
                user.replace_input_with(self, replace_with)
                changed.append(user)
        return changed

    def replace_input_with(self, old_input: Node, new_input: Node) -> None:
        """Let this node read `new_input` wherever it reads `old_input`.

        O(1): the arguments are rewritten once, in O(arguments), when they are read next. Where it was measured that the
        call writes or returns inputs, they are rewritten at once, and the record stays true.

        Raises:
            ForeignNodeError: `new_input` belongs to another graph.
        """
        self._check_same_graph(new_input)
        self.graph.edits += 1
        if new_input is old_input or self not in old_input.users:
            return
        measured = self.meta.get("effects")
        if measured is not None and (measured.writes or measured.shares):
            from featx.ir.rewiring import replace_inputs

            replace_inputs(self, {old_input: new_input})
            return
        if self._pending is not None and new_input in self._pending[2]:
            self._apply_replacements()  # so that a node that was replaced is never one that replaces
        if self._pending is None:
            self._pending = (self._args, self._kwargs, {})
            del self._args, self._kwargs
        self._pending[2][old_input] = new_input
        new_input.users[self] = None
        del old_input.users[self]

    def is_impure(self, impure_random: bool = True) -> bool:
        """Say whether dead-code removal must keep this node although nothing reads it (see `ir/effects.py`)."""
        from featx.ir.effects import Effects

        return Effects(self.graph).is_impure(self, impure_random=impure_random)

    def normalized_arguments(
        self,
        root: nn.Module,
        arg_types: tuple[Any, ...] | None = None,
        kwarg_types: dict[str, Any] | None = None,
        normalize_to_only_use_kwargs: bool = False,
    ) -> ArgsKwargsPair | None:
        """Return the arguments by name, defaults included; None where the signature of what is called is not known.

        See `normalize_function` and `normalize_module` in `ir/schemas.py`; `root` has the modules that are called.
        """
        from featx.ir.schemas import normalize_function, normalize_module

        if self.op == "call_function":
            return normalize_function(
                self.target, self.args, self.kwargs, arg_types, kwarg_types, normalize_to_only_use_kwargs
            )
        if self.op == "call_module":
            return normalize_module(root, self.target, self.args, self.kwargs, normalize_to_only_use_kwargs)
        return None

    # -- as text -----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self.name

    def format_node(
        self,
        placeholder_names: list[str] | None = None,
        maybe_return_typename: list[str] | None = None,
        *,
        include_tensor_metadata: bool = False,
    ) -> str | None:
        """Describe this node in one line, as `str(graph)` does; with the shape of its value where meta has it."""
        from featx.ir.text import format_node, tensor_annotation

        annotation = tensor_annotation(self.meta) if include_tensor_metadata else None
        return format_node(self, placeholder_names, maybe_return_typename, annotation=annotation)

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Node:
        # A node is a place in a graph. Copied together with its graph it is the place in the copy, otherwise itself.
        return memo.get(id(self), self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_at, (self.graph, [*self.graph.nodes].index(self))

    # -- for the graph -----------------------------------------------------------------------------------------------

    def link_between(self, before: Node, after: Node) -> None:
        """Put this node, which is in no list, between two neighbours. For `Graph` only."""
        self._prev = before
        self._next = after
        before._next = self
        after._prev = self
        graph = self.graph
        graph.edits += 1
        root = graph.root
        if after is root:
            self.label = before.label + LABEL_STEP
        elif before is root:
            self.label = after.label - LABEL_STEP
        else:
            self.label = (before.label + after.label) >> 1
            if self.label == before.label:
                spread_labels(self, root)

    def retire(self) -> None:
        """Leave the list and forget all inputs. For `Graph` only; iterators that stand here can still go on."""
        self._unlink()
        self._erased = True
        self._assign((), NO_KWARGS)

    @property
    def is_erased(self) -> bool:
        """Whether the node was erased from its graph."""
        return self._erased

    def _unlink(self) -> None:
        self._prev._next = self._next
        self._next._prev = self._prev

    def _apply_replacements(self) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Write the pending replacements into the arguments, and return these."""
        # Another thread may do the same at the same time: each step leaves what the other one needs.
        pending = self._pending
        if pending is not None:
            args, kwargs, replaced = pending
            last: dict[Node, Node] = {}
            for old, new in reversed(replaced.items()):
                last[old] = last.get(new, new)

            def current(node: Node) -> Node:
                return last.get(node, node)

            self._kwargs = map_arg(kwargs, current)
            self._args = map_arg(args, current)  # last: where it is set, all is
            self._pending = None
        return self._args, self._kwargs

    def _assign(self, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
        old_inputs = self.all_input_nodes
        frozen, frozen_kwargs = self._adopt(args, kwargs)
        self._args, self._kwargs = frozen, frozen_kwargs
        new_inputs = set(self.all_input_nodes)
        for node in old_inputs:
            if node not in new_inputs:
                node.users.pop(self, None)
        self.graph.edits += 1

    def _adopt(
        self, args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        # Freezes the arguments and makes this node a user of each node in them.
        if type(args) is not tuple and not isinstance(cast(object, args), tuple):
            raise ArgumentTypeError(f"args of node '{self.name}' must be a tuple, got {type(args).__name__}")
        if kwargs and not isinstance(cast(object, kwargs), dict):
            raise ArgumentTypeError(f"kwargs of node '{self.name}' must be a dict, got {type(kwargs).__name__}")
        uses: dict[Node, None] = {}
        for argument in args:
            if type(argument) is Node:
                uses[argument] = None
            elif type(argument) not in ATOMS:
                args = tuple([freeze(item, uses) for item in args])
                break
        frozen = freeze(keyword_names(kwargs), uses) if kwargs else NO_KWARGS
        # Last, so that a refused argument leaves no trace.
        for source in uses:
            source.users[self] = None
        return args, frozen

    def _check_same_graph(self, other: Node) -> None:
        if other.graph is not self.graph or other._erased:
            raise ForeignNodeError(
                f"node '{other.name}' is not in the graph of node '{self.name}'; copy it there with graph.node_copy"
            )

    def _check_movable(self, x: Node) -> None:
        self._check_same_graph(x)
        if self._erased:
            raise ForeignNodeError(f"node '{self.name}' was erased; choose a neighbour that is in the graph")


def _node_at(graph: Graph, index: int) -> Node:
    return list(graph.nodes)[index]


def iterate(root: Node, *, backwards: bool = False) -> Iterator[Node]:
    """Yield the nodes of the list that `root` closes. See `NodeList` for what edits do meanwhile."""
    # The root counts as erased, so that one question finds both the end and nodes to pass over.
    node = root
    while True:
        if backwards:
            while not (node := node._prev)._erased:
                yield node
        else:
            while not (node := node._next)._erased:
                yield node
        if node is root:
            return


def is_well_formed(root: Node, graph: Graph) -> bool:
    """Say, as fast as Python can, whether `verify` has nothing to find fault with in the list that `root` closes."""
    seen: set[Node] = set()
    names: set[str] = set()
    edges = readers = 0
    node = root
    while (node := node._next) is not root:
        op = node._op
        if op not in LEGAL_OPS or node.graph is not graph or callable(node._target) is not (op == "call_function"):
            return False
        if op in ("call_method", "placeholder") and not is_legal_target(op, node._target):
            return False
        args = node.args
        if len(args) == 1 and type(args[0]) is Node and not node._kwargs:
            source = args[0]
            if source not in seen or node not in source.users:
                return False
            edges += 1
        elif args or node._kwargs:
            for source in node.all_input_nodes:
                if source not in seen or node not in source.users:
                    return False
                edges += 1
        readers += len(node.users)
        seen.add(node)
        names.add(node.name)
    return len(names) == len(seen) and edges == readers
