"""The one table of what torch.fx has and where featx has it: by its module paths, and by the members of its classes.

`scripts/write_fx.py` writes the modules of `featx/fx/` and `docs/migration.md` from it; a name that is not there is
explained from it. It is complete for the public names of the torch.fx of `TORCH`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

TORCH = "2.15"


@dataclass(frozen=True)
class Path:
    """What of one module of torch.fx, or of one of its classes, is here, is here but does otherwise, and is not.

    `here` maps modules of featx to the names that they define, in one string; `this=that` is what featx calls `this`
    and torch.fx `that`. `otherwise` and `left_out` map names, one or more in a string, to what is to be said of them;
    `*` stands for all others.
    """

    here: Mapping[str, str] = field(default_factory=dict[str, str])
    otherwise: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])


_ARGUMENTS, _NODE = "Argument map_aggregate map_arg", "Node Target"
_OPERATORS = {
    "featx.migration.operators": "MAGIC=magic_methods REFLECTABLE=reflectable_magic_methods INPLACE=inplace_methods"
}
_OWN_TOOL = "the tool of torch.fx works on `featx.to_torch_fx(module)`"
_SYMBOLS = (
    "sizes as symbols belong to torch.export and torch.compile; featx.trace keeps sizes open, records them as nodes, "
    "and checks at run time what the model decided on them"
)
_DISPATCH = (
    "traces of ATen operators belong to torch.export and torch.compile; featx.trace records what the model calls"
)
_TYPES = "gradual types: featx.trace gives each node its shape and dtype (`node.meta`)"
_COPIED = (
    "a part of torch.fx's own tracer or code generator, which work by patching classes; subclass featx.Tracer and "
    "override its methods"
)
_CODEGEN = (
    "featx generates code in one way: `graph.on_generate_code` edits its lines, and inputs stay nested as they are"
)
_PROVENANCE = "meta that torch.compile keeps: featx puts the line of the model into `node.meta['source']`"
_CURRENT = "there is no state of the process that says which node runs; give nodes their meta where you make them"
_PLACEMENT = f"placement on devices is left to others: split with split_module, or {_OWN_TOOL}"
_GROUPS = "featx.passes has partition, split_module and extract_subgraph, which make submodules of groups of nodes"
_COMPILE = "it belongs to torch.compile, which takes featx's modules as they are"

TABLE: Mapping[str, Path] = {
    "": Path(
        {
            "featx.interpret.interpreter": "Interpreter",
            "featx.interpret.transformer": "Transformer",
            "featx.ir.graph": "Graph",
            "featx.ir.arguments": "map_arg",
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.traced": "symbolic_trace",
            "featx.rewrite.replace": "replace_pattern",
            "featx.ir.side_effects": "has_side_effect",
            "featx.tracing.symbolic.inputs": "PH",
            "featx.tracing.nodes.proxy": "Proxy",
            "featx.tracing.symbolic.proxyable": "ProxyableClassMeta",
            "featx.tracing.symbolic.tracer": "Tracer",
            "featx.tracing.file_globals.wrapping": "wrap",
        },
        {
            "symbolic_trace": "`x += y` is `operator.iadd`, since another reference to `x` sees the write: look for "
            "both. Tensors made in forward are literals of the graph; fixed inputs keep their names; nested "
            "`concrete_args` stay one input, and their names and values are checked. What seeds torch's generator is "
            "refused. `featx.trace(model, x)` follows an example where this refuses",
            "Graph": "live writes in place survive dead-code removal",
            "GraphModule": "one class for all: `type(module)` is GraphModule, and `forward` belongs to the "
            "instance; plain tensor attributes stay plain; an edited graph is compiled again by itself",
            "Proxy": "`x[0] = 1` is recorded; `len(x)` raises ControlFlowError",
            "wrap": "a mark counts wherever the model's globals name the function",
            "PH": "the input stays one placeholder; places in it are read with getitem",
            "map_arg": "keeps subclasses of tuple",
        },
        {"CodeGen": _CODEGEN},
    ),
    "node": Path(
        {
            "featx.ir.schemas": "ArgsKwargsPair normalize_function normalize_module",
            "featx.ir.arguments": _ARGUMENTS,
            "featx.ir.node": _NODE,
            "featx.ir.side_effects": "has_side_effect",
            "featx.migration.compatibility": "BASE_TYPES=base_types BaseArgumentTypes",
            "featx.migration.operator_support": "target_name=_get_qualified_name",
        },
        {
            "Argument": "an alias of Any",
            "has_side_effect": "marks the function itself; needed only for operators whose schema says nothing",
        },
        {"_side_effectful_functions": "functions are marked with has_side_effect", "_type_repr _format_arg": _COPIED},
    ),
    "graph": Path(
        {
            "featx.ir.immutable": "ImmutableDict=immutable_dict",
            "featx.codegen.emit": "PythonCode",
            "featx.ir.graph": "Graph",
            "featx.ir.arguments": _ARGUMENTS,
            "featx.ir.node": _NODE,
            **_OPERATORS,
        },
        {"PythonCode": "`src` and `globals` as there; `lines` and `tensors` in place of the private fields"},
        {"CodeGen _PyTreeCodeGen _CodeGen": _CODEGEN},
    ),
    "graph_module": Path(
        {"featx.codegen.emit": "PythonCode", "featx.ir.graph": "Graph", "featx.module": "GraphModule"},
        {},
        {
            "reduce_graph_module reduce_package_graph_module": "pickle keeps the graph itself; nothing is traced again",
            "_copy_attr _forward_from_src _exec_with_source _WrappedCall _CodeOnlyModule": _COPIED,
        },
    ),
    "proxy": Path(
        {
            "featx.ir.immutable": "ImmutableDict=immutable_dict ImmutableList=immutable_list",
            "featx.ir.schemas": "check_for_mutable_operation",
            "featx.ir.graph": "Graph",
            "featx.ir.arguments": _ARGUMENTS,
            "featx.ir.node": _NODE,
            "featx.tracing.nodes.proxy": "Attribute ParameterProxy Proxy",
            "featx.tracing.symbolic.tracer": "Scope",
            "featx.tracing.nodes.tracer_base": "GraphAppendingTracer TracerBase",
            "featx.errors": "TraceError",
            "featx.migration.compatibility": "BASE_TYPES=base_types",
            **_OPERATORS,
        },
        {"TraceError": "many more cases, each with the module, the line and the way out"},
        {
            "MetaProxy": "featx.trace follows values that have a shape and a dtype",
            "ScopeContextManager": "`Tracer.call_module` keeps the scope; call super().call_module",
        },
    ),
    "_symbolic_trace": Path(
        {
            "featx.ir.graph": "Graph",
            "featx.ir.arguments": _ARGUMENTS,
            "featx.ir.node": _NODE,
            "featx.module": "GraphModule",
            "featx.traced": "symbolic_trace",
            "featx.migration.compatibility": "BASE_TYPES=base_types compatibility",
            "featx.tracing.guards.input_checks": "check_is_none=_assert_is_none",
            "featx.tracing.symbolic.inputs": "PH PHBase",
            "featx.tracing.nodes.proxy": "ParameterProxy Proxy",
            "featx.tracing.symbolic.proxyable": "ProxyableClassMeta",
            "featx.tracing.symbolic.tracer": "Scope Tracer is_tracing=is_fx_tracing is_tracing=is_fx_symbolic_tracing",
            "featx.tracing.nodes.tracer_base": "TracerBase",
            "featx.tracing.file_globals.wrapping": "wrap",
        },
        {},
        {
            "is_fx_tracing_warning": _COPIED,
            "PHWithMeta": "the input stays one placeholder, with the meta that the tracer gives it",
            "*": _COPIED,
        },
    ),
    "_compatibility": Path({"featx.migration.compatibility": "compatibility"}, {"compatibility": "does nothing"}),
    "interpreter": Path(
        {
            "featx.interpret.interpreter": "Interpreter",
            "featx.interpret.transformer": "Transformer",
            "featx.ir.graph": "Graph",
            "featx.ir.arguments": _ARGUMENTS,
            "featx.ir.node": _NODE,
            "featx.module": "GraphModule",
            "featx.tracing.nodes.proxy": "Proxy",
            "featx.tracing.symbolic.tracer": "Tracer",
        },
    ),
    "subgraph_rewriter": Path(
        {
            "featx.ir.graph": "Graph",
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.traced": "symbolic_trace",
            "featx.rewrite.replace": "Match ReplacedPatterns replace_pattern replace_pattern_with_filters",
        },
        {
            "replace_pattern replace_pattern_with_filters": "a match stays where replacing it could be seen by the "
            "rest of the graph; more ways to match: see featx.replace_pattern_with_filters",
        },
    ),
    "immutable_collections": Path(
        {"featx.ir.immutable": "ImmutableDict=immutable_dict ImmutableList=immutable_list"},
    ),
    "_lazy_graph_module": Path(left_out={"*": "modules are compiled when they are made, and once for each edit"}),
    "_pytree": Path(left_out={"*": _CODEGEN}),
    "config": Path(left_out={"*": _COMPILE}),
    "tensor_type": Path(left_out={"*": _TYPES}),
    "annotate": Path(left_out={"*": "annotations of values of a symbolic trace; set `node.type`"}),
    "traceback": Path(
        {"featx.migration.compatibility": "preserve_node_meta"},
        {"preserve_node_meta": "does nothing: Transformer always keeps meta"},
        {
            "NodeSource NodeSourceAction get_graph_provenance_json": _PROVENANCE,
            "annotate annotate_fn": "set `node.meta` after the trace, or in `Tracer.create_node`",
            "*": _CURRENT,
        },
    ),
    "operator_schemas": Path(
        {
            "featx.ir.schemas": "ArgsKwargsPair check_for_mutable_operation get_signature_for_torch_op "
            "normalize_function normalize_module type_matches",
        },
        {
            "normalize_function": "overloads that do not differ for the arguments are not ambiguous",
            "check_for_mutable_operation": "raises TraceError",
        },
        {"create_type_hint": "take the types of the elements; type_matches takes `list[int]` and `tuple[int, int]`"},
    ),
    "passes": Path(),
    "passes.operator_support": Path(
        {
            "featx.passes.shapes": "TensorMetadata",
            "featx.migration.operator_support": "OpSupports OperatorSupport OperatorSupportBase any_chain chain "
            "create_op_support get_node_target CALLABLE_NODE_OPS",
        },
    ),
    "passes.tools_common": Path(
        {
            "featx.migration.operator_support": "get_node_target is_node_output_tensor CALLABLE_NODE_OPS",
            "featx.migration.topology": "stable_topological_sort stable_topological_sort=legalize_graph",
        },
        {"legalize_graph stable_topological_sort": "moves the nodes; an order that is right stays"},
        {"FxNetAccFusionsFinder get_acc_ops_name": "a part of one backend's splitter"},
    ),
    "passes.shape_prop": Path(
        {
            "featx.ir.arguments": "map_aggregate",
            "featx.ir.node": "Node",
            "featx.passes.shapes": "ShapeProp TensorMetadata metadata_of=_extract_tensor_metadata",
        },
        {"ShapeProp": "leaves the model as it was; with inputs on the meta device it computes nothing"},
    ),
    "passes.fake_tensor_prop": Path(left_out={"*": "ShapeProp(module, FakeTensorMode()) runs on fake tensors"}),
    "passes.split_module": Path(
        {"featx.ir.node": "Node", "featx.module": "GraphModule", "featx.passes.split": "split_module"},
        {
            "split_module": "effects stay in order; parts that need each other raise PassError; in a part, modules and "
            "parameters have their paths in the model: `submod_0.block.0.weight`"
        },
        {"Partition": "parts are not objects here", "split_module_simple": "use split_module"},
    ),
    "passes.split_utils": Path(
        {
            "featx.migration.operator_support": "is_node_output_tensor",
            "featx.migration.grouping": "getattr_recursive setattr_recursive split_by_tags",
        },
        {
            "split_by_tags": "gives featx.GraphModule whatever class is wanted; a call without a tag raises PassError; "
            "results of a part are in the order of the graph; the mapping of names has modules, and no parameters"
        },
        {"Component move_non_tensor_nodes_on_boundary": "a part of one backend's splitter"},
    ),
    "passes.splitter_base": Path(left_out={"*": _PLACEMENT}),
    "passes.graph_drawer": Path(left_out={"*": "it makes graphs of pydot; featx.draw(gm) gives dot, SVG and a page"}),
    "passes.graph_manipulation": Path(
        {
            "featx.ir.arguments": "map_arg",
            "featx.ir.graph": "Graph",
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.passes.shapes": "ShapeProp TensorMetadata",
            "featx.migration.grouping": "replace_target_nodes_with",
        },
        {},
        {"get_size_of_all_nodes get_size_of_node get_tensor_meta size_bytes": "featx.cost says what each node holds"},
    ),
    "passes.graph_transform_observer": Path(left_out={"*": "compare `module.code` before and after a pass"}),
    "passes.annotate_getitem_nodes": Path(left_out={"*": _TYPES}),
    "passes.backends": Path(),
    "passes.backends.cudagraphs": Path(left_out={"*": _COMPILE}),
    "passes.canonicalize": Path(left_out={"*": _OWN_TOOL}),
    "passes.dialect": Path(),
    "passes.dialect.common": Path(),
    "passes.dialect.common.cse_pass": Path(
        {
            "featx.ir.graph": "Graph",
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.migration.pass_manager": "CSEPass PassBase PassResult",
        },
        {"CSEPass": "works in place, with effects in mind; `banned_ops` is not needed and not used"},
        {"get_CSE_banned_ops": "what may be merged is known from the effects of each call"},
    ),
    "passes.infra": Path(),
    "passes.infra.partitioner": Path(
        {
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.migration.operator_support": "OperatorSupportBase",
            "featx.migration.partitioner": "CapabilityBasedPartitioner Partition",
        },
        {"CapabilityBasedPartitioner": "gives a new module; effects count as dependencies; asks about calls alone"},
    ),
    "passes.infra.pass_base": Path(
        {"featx.module": "GraphModule", "featx.migration.pass_manager": "PassBase PassResult"}
    ),
    "passes.infra.pass_manager": Path(
        {
            "featx.module": "GraphModule",
            "featx.migration.pass_manager": "PassManager PassResult pass_result_wrapper "
            "this_before_that_pass_constraint",
        },
        {"PassManager": "takes featx's passes too, which return a bool; errors are PassError, a RuntimeError"},
    ),
    "passes.net_min_base": Path(left_out={"*": "run both modules with Interpreter and compare node by node"}),
    "passes.param_fetch": Path(left_out={"*": "a part of one backend's lowering"}),
    "passes.pass_manager": Path(left_out={"*": "use passes.infra.pass_manager, or featx.passes.PassManager"}),
    "passes.regional_inductor": Path(left_out={"*": _COMPILE}),
    "passes.regional_inductor_invoke_subgraph": Path(left_out={"*": _COMPILE}),
    "passes.reinplace": Path(left_out={"*": _COMPILE}),
    "passes.runtime_assert": Path(left_out={"*": _SYMBOLS}),
    "passes.utils": Path(),
    "passes.utils.common": Path(left_out={"*": _GROUPS}),
    "passes.utils.fuser_utils": Path(left_out={"*": _GROUPS}),
    "passes.utils.source_matcher_utils": Path(
        left_out={
            "*": "it reads meta that only torch.export writes; node.meta['nn_module_stack'] says which modules ran"
        }
    ),
    "passes.utils.matcher_utils": Path(
        {
            "featx.ir.graph": "Graph",
            "featx.ir.node": "Node",
            "featx.rewrite.match": "InternalMatch SubgraphMatcher",
        },
    ),
    "passes.utils.matcher_with_name_node_map_utils": Path(
        {
            "featx.ir.graph": "Graph",
            "featx.ir.node": "Node",
            "featx.module": "GraphModule",
            "featx.rewrite.match": "InternalMatch SubgraphMatcher SubgraphMatcherWithNameNodeMap",
        },
    ),
    "experimental": Path(),
    "experimental.accelerator_partitioner": Path(left_out={"*": _PLACEMENT}),
    "experimental.partitioner_utils": Path(left_out={"*": _PLACEMENT}),
    "experimental.const_fold": Path(left_out={"*": "use featx.passes.fold_constants"}),
    "experimental.debug": Path(left_out={"*": "put `breakpoint()` among the lines in `graph.on_generate_code`"}),
    "experimental.dynamic_spec": Path(left_out={"*": _SYMBOLS}),
    "experimental.graph_gradual_typechecker": Path(left_out={"*": _TYPES}),
    "experimental.migrate_gradual_types": Path(left_out={"*": _TYPES}),
    "experimental.refinement_types": Path(left_out={"*": _TYPES}),
    "experimental.unification": Path(left_out={"*": _TYPES}),
    "experimental.unify_refinements": Path(left_out={"*": _TYPES}),
    "experimental.schema_type_annotation": Path(left_out={"*": _TYPES}),
    "experimental.merge_matmul": Path(left_out={"*": _OWN_TOOL}),
    "experimental.meta_tracer": Path(left_out={"*": "featx.trace(model, x) follows an example, and computes nothing"}),
    "experimental.normalize": Path(left_out={"*": "use featx.passes.normalize_arguments"}),
    "experimental.optimization": Path(
        {
            "featx.migration.optimization": "extract_subgraph fuse matches_module_pattern remove_dropout "
            "replace_node_module",
        },
        {"fuse": "the fused layer is a new module, `layer1_0_conv1_fused`; the graph checks that it runs in eval mode"},
        {"*": "MKL-DNN layouts of the CPU are left to torch.compile"},
    ),
    "experimental.recording": Path(left_out={"*": _SYMBOLS}),
    "experimental.rewriter": Path(left_out={"*": "asserts are recorded as they are: `Tracer.trace_asserts`"}),
    "experimental.sym_node": Path(left_out={"*": _SYMBOLS}),
    "experimental.symbolic_shapes": Path(left_out={"*": _SYMBOLS}),
    "experimental.validator": Path(left_out={"*": _SYMBOLS}),
    "experimental.proxy_tensor": Path(left_out={"*": _DISPATCH}),
}

# Members of the classes of torch.fx; those that are not here are as there.
MEMBERS: Mapping[str, Path] = {
    "Graph": Path(
        otherwise={
            "create_node": "methods and inputs have identifiers",
            "eliminate_dead_code": "writes in place that are seen later stay, and so do draws of random numbers",
            "erase_node": "erasing twice raises ForeignNodeError",
            "call_module": "the target is looked for by `lint` and when the code is made",
            "lint": "a missing target raises TargetError, a RuntimeError and an AttributeError",
            "nodes": "what may be edited during iteration is specified",
            "on_generate_code": "the body is one statement a string",
            "owning_module": "held weakly",
            "process_inputs process_outputs": "return what they get: inputs and outputs are not flattened",
            "python_code": "other text: shared prefixes of module paths stand in locals",
        },
        left_out={
            "set_codegen": _CODEGEN,
            "create_size_node create_stride_node create_storage_offset_node materialize_symint materialize_symints": (
                "sizes are nodes by themselves: `graph.call_method('size', (node, 0))`"
            ),
        },
    ),
    "Node": Path(
        otherwise={
            "insert_arg": "an index out of range raises GraphError",
            "is_impure": "methods and functions that write in place are",
            "replace_all_uses_with": "a replacement that reads the node is left as it is, not made to read itself",
            "stack_trace": "one line of the model: file, line, function and code",
            "users": "a node keeps its place there when its arguments are set again",
        },
    ),
    "GraphModule": Path(
        otherwise={
            "forward": "made for the instance: `type(module).forward` calls the instance's",
            "recompile": "never needed; an edited graph is compiled again before it runs",
            "code print_readable": "other text, see Graph.python_code; no options for colours, strides or devices",
            "to_folder": "writes one file of state",
        },
    ),
    "Tracer": Path(
        otherwise={
            "check_mutable_operations": "refuses methods that write in place too",
            "create_arg": "called for each argument, not for the tuple and the dict of all; "
            "what no graph can hold raises ArgumentTypeError, a TypeError",
            "getattr": "called for parameters, and for buffers with `proxy_buffer_attributes`",
            "is_leaf_module": "scripted modules are leaves too",
            "module_stack": "from path to path and type, as `node.meta['nn_module_stack']`",
            "record_stack_traces": "records one line of the model",
            "trace_asserts": "on by default",
        },
        left_out={
            "create_args_for_root": _COPIED,
            "get_fresh_qualname": "take a name that `hasattr(tracer.root, name)` does not know",
        },
    ),
    "Proxy": Path(otherwise={"__len__": "raises ControlFlowError, a RuntimeError, TypeError and ValueError"}),
    "Interpreter": Path(
        otherwise={
            "run": "takes inputs by name too; `enable_io_processing` has no effect; errors keep their type and name "
            "the node and its line in the model",
        }
    ),
    "Transformer": Path(otherwise={"transform": "keeps all meta, and the names of nodes"}),
}


def names_here(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield for each name that is here: the module of featx, the name there, and torch.fx's name."""
    for module, names in path.here.items():
        for name in names.split():
            there, _, theirs = name.partition("=")
            yield module, there, theirs or there


def said(about: Mapping[str, str]) -> dict[str, str]:
    """Return what is said of each single name."""
    return {name: text for names, text in about.items() for name in names.split()}


def reason(path: str, name: str) -> str:
    """Say why `name` of the module `path` of torch.fx is left out."""
    texts = said(TABLE[path].left_out)
    default = "it is not among torch.fx's public names; docs/migration.md lists those"
    return f"{texts.get(name) or texts.get('*') or default}."
