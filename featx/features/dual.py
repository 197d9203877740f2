"""DualGraphModule: one graph for train mode and one for eval mode, switched by `train()` and `eval()`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featx.codegen.emit import PythonCode
from featx.codegen.standalone import is_standalone
from featx.examples import Example, as_example
from featx.features.building.case_state import leave_the_same
from featx.features.building.cases import Cases, with_cases
from featx.features.describing.info import FeatureInfos
from featx.features.own_conversion import check_conversion
from featx.features.shared_tensors import tensors_kept_shared
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.ir.paths import module_at
from featx.module import GraphModule, opened

_COMPILED_STATE = ("_graph", "_code", "_bound", "_compiled_edits")


class DualGraphModule(GraphModule):
    """Runs `train_graph` in train mode and `eval_graph` in eval mode; it starts in the mode that `root` is in.

    Where the two are the same there is one. Assigning `graph` replaces that of the present mode. Switching back and
    forth compiles each graph once. Submodules are shared with `root`, and building this module does not touch their
    modes.

    Args:
        root: the module that has the targets of the graphs.
        train_graph: what runs in train mode.
        eval_graph: what runs in eval mode.
        class_name: the name that `repr` prints.
        present_graph: what runs until `train()` or `eval()` is called, for a `root` whose submodules are in modes that
            neither of the two gives them.
        exceptions: by mode, the paths of the submodules that `root` itself keeps in the other one, as a `train()` that
            freezes batch norm does.
        infos: by mode, what is returned. It is there as `feature_info`, `channels` and `strides`, unless `root` has a
            module or tensor of such a name.
        cases: makes further graphs, for inputs for which these do not hold.

    Raises:
        TargetError: `root` lacks a target of one of the graphs.
    """

    __jit_unused_properties__: ClassVar[list[str]] = [
        *GraphModule.__jit_unused_properties__, "free_dims", "makes_further_graphs",
    ]  # fmt: skip
    __jit_ignored_attributes__: ClassVar[list[str]] = [
        *GraphModule.__jit_ignored_attributes__, "train_graph", "eval_graph", "_resting", "_exceptions", "_cases",
        "feature_info", "channels", "strides",
    ]  # fmt: skip
    if TYPE_CHECKING:  # at run time they are attributes of instances, so that a model may have such names
        feature_info: FeatureInfos
        channels: list[Any]  # numbers, and None where they are not known
        strides: list[Any]
    train_graph: Graph
    eval_graph: Graph
    _resting: dict[str, Any] | None
    _exceptions: dict[bool, tuple[str, ...]]
    _cases: Cases | None

    def __init__(
        self,
        root: nn.Module,
        train_graph: Graph,
        eval_graph: Graph,
        class_name: str = "GraphModule",
        *,
        present_graph: Graph | None = None,
        exceptions: Mapping[bool, Iterable[str]] | None = None,
        infos: Mapping[bool, FeatureInfos] | None = None,
        cases: Cases | None = None,
    ) -> None:
        self.__dict__["_cases"] = cases
        if is_same_graph(train_graph, eval_graph) and leave_the_same(train_graph, eval_graph):
            eval_graph = train_graph
        exceptions = {mode: tuple(paths) for mode, paths in (exceptions or {}).items()}
        first = present_graph or (train_graph if root.training else eval_graph)
        super().__init__(root, first, class_name)
        self.__dict__.update(train_graph=train_graph, eval_graph=eval_graph, _resting=None, _exceptions=exceptions)
        for other in (train_graph, eval_graph):
            if other is not first:
                self._copy_targets(root, [other])
                other.owning_module = self
        self.meta["feature_info"] = dict(infos or {})
        self._show_infos()
        if cases is not None:
            cases.start(train_graph, eval_graph, first)

    @GraphModule.graph.setter
    def graph(self, graph: Graph) -> None:
        """Run another graph in this mode, and in the other one too where both have one."""
        replaced = self.train_graph if self.training else self.eval_graph
        GraphModule.graph.__set__(self, graph)
        state = self.__dict__
        state.update({name: graph for name in ("train_graph", "eval_graph") if state[name] is replaced})

    @property
    def free_dims(self) -> Any:
        """Which dimensions of the inputs may differ from the example, in the present mode; None without an example."""
        return self.meta.get("free_dims", {}).get(self.training)

    @property
    def makes_further_graphs(self) -> bool:
        """Whether it traces the model again for inputs for which its graphs do not hold."""
        return self._cases is not None

    def train(self, mode: bool = True) -> DualGraphModule:
        """Switch to the train graph or the eval graph, and the submodules to that mode."""
        graph = self.train_graph if mode else self.eval_graph
        if graph is not self._graph:
            state = self.__dict__
            resting = self._resting
            state["_resting"] = {name: state[name] for name in _COMPILED_STATE}
            if resting is None or resting["_graph"] is not graph:
                self._compile(graph)
            else:
                state.update(resting)
        super().train(mode)
        self._show_infos()
        self.keep_exceptions()
        return self

    def keep_exceptions(self) -> None:
        """Put those parts into the other mode that the model itself keeps in it."""
        for path in self._exceptions.get(self.training, ()):
            module = module_at(self, path)
            if module is not None:
                module.training = not self.training

    def _present_infos(self) -> FeatureInfos:
        return self.meta.get("feature_info", {}).get(self.training, FeatureInfos(()))

    def _show_infos(self) -> None:
        infos = self._present_infos()
        shown = {"feature_info": infos, "channels": infos.channels(), "strides": infos.reduction()}
        own = (*self._modules, *self._parameters, *self._buffers)
        self.__dict__.update({name: value for name, value in shown.items() if name not in own})

    def __repr__(self) -> str:
        infos = self._present_infos()
        return f"{infos}\n\n{super().__repr__()}" if infos else super().__repr__()

    def _heading(self) -> str:
        infos = self._present_infos()
        return str(infos) if infos else super()._heading()

    def graph_modules_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[GraphModule]:
        """Yield modules with the graphs of this one: of those that hold for these inputs, all return the same.

        The last one is traced for these inputs when it is asked for.
        """
        yield self
        graphs = iter(()) if self._cases is None else self._cases.graphs_for(self, args, kwargs)
        yield from (GraphModule(self, graph, self._get_name()) for graph in islice(graphs, 1, None))

    def compiled(self, graph: Graph) -> Callable[..., Any]:
        """Return a function that runs another graph on a module with the parts of this one, which stays as it is.

        Raises:
            TargetError: this module lacks a target of the graph.
        """
        state = {name: self.__dict__[name] for name in _COMPILED_STATE}
        try:
            super()._compile(graph)
            return self._bound.__func__
        finally:
            self.__dict__.update(state)

    def _graphs_in_use(self) -> list[Graph]:
        return super()._graphs_in_use() + ([] if self._cases is None else self._cases.further_graphs())

    def _compile(self, graph: Graph) -> PythonCode:
        code = super()._compile(graph)
        if self._cases is not None:
            self.__dict__["_bound"] = with_cases(self._bound, self._cases)
        return code

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DualGraphModule:
        check_conversion(self, fn)
        if self._cases is None:
            super()._apply(fn, recurse)
            return self
        # Further graphs are traced from the model, so it must be of the same dtype and on the same device.
        with tensors_kept_shared(self._cases.model, [self]):
            self._cases.model._apply(fn)
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._cases is not None:
            self._cases.has_loaded = True
        super()._load_from_state_dict(*args, **kwargs)

    def _standalone_modules(self, example_inputs: Any) -> dict[bool, GraphModule]:
        modules = {mode: _with_graph(self, graph) for mode, graph in self._graphs().items()}
        needy = [mode for mode, module in modules.items() if not is_standalone(module, module.graph)]
        if not needy:
            return modules
        known = self.meta.get("example") or _example_of(self.eval_graph)
        inputs = known if example_inputs is None else as_example(example_inputs)
        if inputs is None:
            return super()._standalone_modules(None)
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        given = inputs.with_values(device)
        return {**modules, **{mode: opened(modules[mode], mode, given.args, given.kwargs) for mode in needy}}

    def _reasons_to_pickle(self) -> list[str]:
        """Say that parts are in another mode than the whole, where the code depends on that."""
        if self.code == _with_graph(self, self._graphs()[self.training]).code:
            return []
        return ["modules of the model are in another mode than the model, and their code asks for it"]

    def _graphs(self) -> dict[bool, Graph]:
        return {True: self.train_graph, False: self.eval_graph}

    def _about(self) -> str:
        return f"It computes what {self._get_name()} does, and returns a dict of:\n\n{self.feature_info}"

    def __prepare_scriptable__(self) -> GraphModule:
        """Return this module without further graphs, of which TorchScript knows nothing.

        Raises:
            ScriptError: the graph holds something that TorchScript is known not to express.
        """
        super().__prepare_scriptable__()
        if self._cases is None:
            return self
        plain = copy.copy(self)
        plain.__dict__["_cases"] = None
        plain.recompile()
        return plain

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_resting": None}
        if self._cases is not None:
            is_as_traced = self._cases.is_for(self.train_graph) and self._cases.is_for(self.eval_graph)
            state["_cases"] = self._cases if is_as_traced else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cases = state.get("_cases")
        super().__setstate__({**state, "_cases": None if cases is None else copy.copy(cases)})
        if self._cases is not None:
            self._cases.start(self.train_graph, self.eval_graph, self._graph)


def _with_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """Return a module of one graph, a copy, with the parts of `module`."""
    own = Graph(tracer_cls=graph.tracer_cls)
    own.output(own.graph_copy(graph, {}))
    own.code_transformer = graph.code_transformer
    return GraphModule(module, own, module._get_name())


def _example_of(graph: Graph) -> Example | None:
    """Return inputs like those that a graph was traced with, without values, if all of them were tensors."""
    found: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            if "shape" not in node.meta:
                return None
            found.append(torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device="meta"))
    return Example(tuple(found), {}, "the trace") if found else None
