"""Graph: an ordered list of nodes that says what a forward function computes."""

from __future__ import annotations

import collections
import contextlib
import inspect
import operator
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from featx.errors import ForeignNodeError, GraphError, NodeInUseError, NodeNameError
from featx.ir.arguments import Argument, map_arg
from featx.ir.identifiers import legal_target, with_hash
from featx.ir.names import Namespace, name_of_target, shown_name
from featx.ir.node import Node, Target, iterate
from featx.ir.paths import attribute_at, did_you_mean, parents_of

if TYPE_CHECKING:
    from featx.codegen.emit import PythonCode

CodeTransformer = Callable[[list[str]], list[str]]
# The nodes by opcode and target; but for functions, also by opcode alone.
_Index = dict[tuple[str, Target | None], dict[Node, None]]

_LABEL = operator.attrgetter("label")


class NodeList:
    """The nodes of a graph in order: iterable, reversible, with a length in O(1).

    Edits while iterating are safe. A node that is erased before the iteration reaches it is passed over; one that is
    inserted after the current node, in the direction of the iteration, is visited; a node that moves is visited
    where the iteration meets it. When the current node itself is erased, the iteration goes on with the node that
    followed it then; move that one before the erasure, as the iteration goes on from where it is.
    """

    __slots__ = ("_graph",)

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __len__(self) -> int:
        return self._graph.node_count

    def __iter__(self) -> Iterator[Node]:
        return iterate(self._graph.root)

    def __reversed__(self) -> Iterator[Node]:
        return iterate(self._graph.root, backwards=True)


class _InsertPoint:
    """Where new nodes go. In a `with` statement, the earlier point comes back at the end."""

    __slots__ = ("_earlier", "_graph")

    def __init__(self, graph: Graph, anchor: Node, *, before: bool) -> None:
        self._graph = graph
        self._earlier = graph.insert_point
        graph.insert_point = (anchor, before)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._graph.insert_point = self._earlier


class Graph:
    """What a forward function computes: nodes in execution order, from placeholders to one output.

    A graph holds names of modules and parameters (the targets of its nodes), never the modules themselves; give it to
    `GraphModule` together with a module that has them to run it. Every single edit is O(1), a walk is O(nodes).
    `edits` counts the changes made so far.
    """

    def __init__(
        self,
        owning_module: object | None = None,
        tracer_cls: type[Any] | None = None,
        tracer_extras: dict[str, Any] | None = None,
    ) -> None:
        self.edits = 0
        self.node_count = 0
        self.root = Node(self, "", "root", "", (), {})
        self.root._next = self.root._prev = self.root
        self.root._erased = True  # no iteration yields it
        self.insert_point: tuple[Node, bool] = (self.root, True)
        self.tracer_cls = tracer_cls
        self.tracer_extras = tracer_extras
        self.code_transformer: CodeTransformer | None = None
        self._names = Namespace()
        self._index: _Index | None = None
        self._owner: weakref.ref[object] | None = None
        self.owning_module = owning_module

    @property
    def owning_module(self) -> Any | None:  # Any: a GraphModule, which this file must not know
        """The module that runs this graph, if any; held weakly, and asked only whether targets exist."""
        return None if self._owner is None else self._owner()

    @owning_module.setter
    def owning_module(self, module: object | None) -> None:
        self._owner = None if module is None else weakref.ref(module)

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeList:
        """The nodes in order; see `NodeList` for what may be edited while iterating."""
        return NodeList(self)

    def output_node(self) -> Node:
        """Return the `output` node.

        Raises:
            GraphError: the last node is not an output.
        """
        last = self.root.prev
        if last.op != "output":
            raise GraphError("the graph has no output node at its end; add one with graph.output(value)")
        return last

    def find_nodes(self, *, op: str, target: Target | None = None, sort: bool = True) -> list[Node]:
        """Return the nodes with this opcode and target, in graph order if `sort`.

        The first call indexes the graph in O(nodes); after that edits keep the index and a call is O(matches).

        Raises:
            GraphError: `op` is `call_function` and no target is given.
        """
        if op == "call_function" and target is None:
            raise GraphError("find_nodes(op='call_function') needs the target function as well")
        index = self._index
        if index is None:
            index = self._index = _index_of(self.nodes)
        found = list(index.get((op, with_hash(target)), ()))
        if sort:
            found.sort(key=_LABEL)
        return found

    def lint(self) -> None:
        """Check that the graph is well-formed; see `verify`. O(nodes + edges).

        Raises:
            GraphError: a node is foreign, used before it is computed, misnamed, or has no such target.
        """
        from featx.ir.verify import verify

        verify(self, self.owning_module)

    # -- new nodes ---------------------------------------------------------------------------------------------------

    def create_node(
        self,
        op: str,
        target: Target,
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a node at the insert point (by default the end) and return it. O(1), amortised.

        `name` is a wish; the node gets it with a number appended where it is taken.

        Raises:
            GraphError: the opcode is unknown.
            NodeTargetError: `target` is not callable (`call_function`) or not a string (every other opcode), or it is
                not the name of a method or of an input.
            ArgumentTypeError: `kwargs` has a key that is not a string.
        """
        target = legal_target(op, target)  # before a name is taken
        names = self._names.mark()
        name = self._names.create_name(name if name is not None else name_of_target(target))
        try:
            node = Node(self, name, op, target, args or (), kwargs or {}, type_expr)
        except BaseException:
            self._names.forget(names)
            raise
        anchor, before = self.insert_point
        while anchor.is_erased and anchor is not self.root:
            # Its neighbours are where it was.
            anchor = anchor.next if before else anchor.prev
        if before:
            node.link_between(anchor.prev, anchor)
        else:
            node.link_between(anchor, anchor.next)
        self.node_count += 1
        if self._index is not None:
            _add_to_index(self._index, node, op, target)
        return node

    def placeholder(self, name: str, type_expr: Any = None, default_value: Any = inspect.Signature.empty) -> Node:
        """Add an input. A name that starts with `*` or `**` takes the rest of the arguments, as in a signature."""
        args = () if default_value is inspect.Signature.empty else (default_value,)
        return self.create_node("placeholder", name, args=args, type_expr=type_expr)

    def get_attr(self, qualified_name: str, type_expr: Any = None) -> Node:
        """Add the read of a parameter, buffer or attribute at a dotted path below the root module.

        Where the graph's module has nothing there by now, this warns, as torch.fx does.
        """
        owner = self.owning_module
        if owner is not None and attribute_at(owner, qualified_name, missing := object()) is missing:
            warnings.warn(
                f"get_attr: there is no underlying reference '{qualified_name}' in the owning GraphModule; add it "
                "before the code is made",
                stacklevel=2,
            )
        return self.create_node("get_attr", qualified_name, type_expr=type_expr)

    def call_module(
        self,
        module_name: str,
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a call of the submodule at a dotted path below the root module."""
        return self.create_node("call_module", module_name, args, kwargs, type_expr=type_expr)

    def call_method(
        self,
        method_name: str,
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a call of a method of `args[0]`."""
        return self.create_node("call_method", method_name, args, kwargs, type_expr=type_expr)

    def call_function(
        self,
        the_function: Callable[..., Any],
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        type_expr: Any = None,
        name: str | None = None,
    ) -> Node:
        """Add a call of a function."""
        return self.create_node("call_function", the_function, args, kwargs, name, type_expr)

    def output(self, result: Argument, type_expr: Any = None) -> Node:
        """Add the return of `result`."""
        return self.create_node("output", "output", (result,), type_expr=type_expr)

    def node_copy(self, node: Node, arg_transform: Callable[[Node], Argument] = lambda node: node) -> Node:
        """Add a copy of `node`, of this or another graph; `arg_transform` says what each of its inputs is here.

        `meta` is copied one level deep.
        """
        args = map_arg(node.args, arg_transform)
        kwargs = map_arg(node.kwargs, arg_transform)
        copy = self.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copy.meta = node.meta.copy()
        return copy

    def graph_copy(self, g: Graph, val_map: dict[Node, Node], return_output_node: bool = False) -> Argument | None:
        """Add copies of the nodes of `g` and return what its output returns, in terms of this graph.

        `val_map` maps nodes of `g` to nodes here; it is filled, and nodes that are in it already are not copied. The
        output node is not copied either; with `return_output_node` the result is `(value, output node of g)`.
        """
        for node in g.nodes:
            if node in val_map:
                continue
            if node.op == "output":
                value = map_arg(node.args[0], val_map.__getitem__)
                return (value, node) if return_output_node else value
            val_map[node] = self.node_copy(node, val_map.__getitem__)
        return None

    __iter__ = None  # a graph is no sequence: `graph.nodes` is

    def __getitem__(self, name: str) -> Node:
        """Return the node of this name: as it can be asked for (`"layer1.0.add"`), or else as the code has it.

        The path of a module means its first call, as in `get_graph_node_names`. O(nodes).

        Raises:
            NodeNameError: there is none.
        """
        found = self._find(name)
        if found is not None:
            return found
        nodes = list(self.nodes)
        known = [shown_name(node) for node in nodes]
        inside = [path for path in known if name in parents_of(path)]
        if inside:
            hint = f" It is a module that was traced through: '{inside[0]}' to '{inside[-1]}' are inside it."
        else:
            hint = did_you_mean(str(name), known)
        raise NodeNameError(f"the graph has no node {name!r}.{hint} print(graph) lists all.")

    def __contains__(self, name: object) -> bool:
        """Say whether `graph[name]` is a node, or whether a node is one of this graph. O(nodes)."""
        return name.graph is self and not name.is_erased if isinstance(name, Node) else self._find(name) is not None

    def _find(self, name: object) -> Node | None:
        nodes = list(self.nodes)
        by_path = (node for node in nodes if node.meta.get("qualified_name") == name)
        return next(by_path, None) or next((node for node in nodes if node.name == name), None)

    def process_inputs(self, *args: Any) -> Any:
        """Return the inputs as the placeholders take them: as they are, since featx does not flatten them."""
        return args

    def process_outputs(self, out: Any) -> Any:
        """Return the output of the graph as its code returns it: as it is."""
        return out

    # -- edits -------------------------------------------------------------------------------------------------------

    def inserting_before(self, n: Node | None = None) -> _InsertPoint:
        """Let new nodes go before `n` (without `n`: to the start of the graph).

        In a `with` statement the earlier insert point is restored at the end; otherwise the new one stays.

        Raises:
            ForeignNodeError: `n` is not in this graph.
        """
        if n is None:
            return _InsertPoint(self, self.root, before=False)
        self._check_owned(n, "insert before")
        return _InsertPoint(self, n, before=True)

    def inserting_after(self, n: Node | None = None) -> _InsertPoint:
        """Let new nodes go right after `n` (without `n`: to the end of the graph); as `inserting_before`.

        Each new node goes right after `n`, so several come out in reverse order, as in torch.fx.
        """
        if n is None:
            return _InsertPoint(self, self.root, before=True)
        self._check_owned(n, "insert after")
        return _InsertPoint(self, n, before=False)

    def erase_node(self, to_erase: Node) -> None:
        """Remove a node that nothing reads. O(its arguments).

        Raises:
            NodeInUseError: other nodes read it.
            ForeignNodeError: it belongs to another graph, or is erased already.
        """
        if to_erase.users:
            readers = ", ".join(f"'{user.name}'" for user in list(to_erase.users)[:5])
            raise NodeInUseError(
                f"cannot erase node '{to_erase.name}': {len(to_erase.users)} node(s) read it ({readers}). "
                "Point them elsewhere with node.replace_all_uses_with(other), or erase them first."
            )
        self._check_owned(to_erase, "erase")
        if self._index is not None:
            _drop_from_index(self._index, to_erase)
        to_erase.retire()
        self.node_count -= 1

    def mark(self) -> tuple[Node, int]:
        """Return what `forget` takes: the last node, and how many names have been given out. O(1)."""
        return self.root.prev, self._names.mark()

    def forget(self, mark: tuple[Node, int]) -> None:
        """Erase the nodes that have been added at the end since `mark`, and let their names be given out again.

        Nodes that are added then have the names that they would have had without them. O(nodes erased).
        """
        last, names = mark
        for node in reversed(self.nodes):
            if node is last:
                break
            self.erase_node(node)
        self._names.forget(names)

    def eliminate_dead_code(self, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
        """Erase what has no effect on the output, on the inputs, on the model's state or on random draws.

        A node that nothing reads stays if it writes into a value that is read later, or that the caller or the model
        holds. `is_impure_node` replaces that rule: a node that nothing reads stays where it returns True. Returns
        whether anything was erased. O(nodes + edges).

        Raises:
            GraphError: the graph is malformed.
        """
        from featx.ir.dead_code import eliminate_dead_code

        self.lint()
        return eliminate_dead_code(self, is_impure_node)

    def reindex(self, node: Node, op: str, target: Target) -> None:
        """Note that `node` is about to get this opcode and target. For `Node` only."""
        self.edits += 1
        if self._index is not None and not node.is_erased:
            _drop_from_index(self._index, node)
            _add_to_index(self._index, node, op, target)

    # -- as text and code --------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from featx.ir.text import format_graph

        return format_graph(self)

    def print_tabular(self) -> None:
        """Print a table with the opcode, name, target and arguments of each node."""
        from featx.ir.text import format_table

        print(format_table(self))  # noqa: T201 - printing is what it is for

    def python_code(self, root_module: str = "self", *, verbose: bool = False) -> PythonCode:
        """Return the source of the forward function, and the objects that it refers to.

        `root_module` is the name by which the code calls the module; `verbose` adds where each node comes from.
        """
        # The one reference upwards in the package: torch.fx's users ask the graph for its code.
        from featx.codegen.emit import emit

        return emit(self, root_module, verbose=verbose)

    def on_generate_code(
        self, make_transformer: Callable[[CodeTransformer | None], CodeTransformer]
    ) -> contextlib.AbstractContextManager[None]:
        """Register a function that edits the lines of the generated body.

        `make_transformer` gets the transformer registered so far, or None, and returns the new one. As a context
        manager the earlier transformer comes back at the end; code compiled meanwhile keeps the change.
        """
        earlier = self.code_transformer
        self._set_code_transformer(make_transformer(earlier))

        @contextlib.contextmanager
        def restoring() -> Generator[None]:
            try:
                yield
            finally:
                # Not an edit: what was compiled inside the block stays, as with torch.fx.
                self.code_transformer = earlier

        return restoring()

    def _set_code_transformer(self, transformer: CodeTransformer) -> None:
        self.code_transformer = transformer
        self.edits += 1

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Graph:
        # Node by node, because following the links between nodes would recurse as deep as the graph is long.
        from featx.ir.copying import deepcopy_graph

        return deepcopy_graph(self, {} if memo is None else memo)

    def __reduce__(self) -> tuple[Any, ...]:
        from featx.ir.copying import rebuild_graph, reduce_graph

        return rebuild_graph, reduce_graph(self)

    def _check_owned(self, node: Node, verb: str) -> None:
        if node.graph is not self:
            raise ForeignNodeError(f"cannot {verb} node '{node.name}': it belongs to another graph than this one")
        if node.is_erased:
            raise ForeignNodeError(f"cannot {verb} node '{node.name}': it was erased from this graph")


def _index_of(nodes: Iterable[Node]) -> _Index:
    index: _Index = collections.defaultdict(dict)
    for node in nodes:
        op = node._op
        index[op, node._target][node] = None
        if op != "call_function":
            index[op, None][node] = None
    return index


def _add_to_index(index: _Index, node: Node, op: str, target: Target) -> None:
    for key in _index_keys(op, target):
        index.setdefault(key, {})[node] = None


def _drop_from_index(index: _Index, node: Node) -> None:
    for key in _index_keys(node.op, node.target):
        index.get(key, {}).pop(node, None)


def _index_keys(op: str, target: Target) -> Iterable[tuple[str, Target | None]]:
    return ((op, target),) if op == "call_function" else ((op, target), (op, None))
