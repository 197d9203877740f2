"""Write a graph as a Python file that needs torch, and numpy where the model calls it, and its tensors beside it."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featx.codegen import standalone_checks
from featx.codegen.constructors import constructor_of
from featx.codegen.emit import ALWAYS_KNOWN, PythonCode
from featx.codegen.identifiers import quoted
from featx.codegen.package import PRIVATE, check_class_name, lines_of_import
from featx.codegen.standalone_tensors import reasons_of_tensors, tensors_of
from featx.errors import MissingExtraError
from featx.ir.apart import later_of, returned_of
from featx.ir.graph import Graph
from featx.ir.names import qualified_name
from featx.tree import held, items_at, with_defaults

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHTS = "weights.safetensors"
_CHECKS: dict[str, Any] = {
    f"featx.{module}.{name}": getattr(standalone_checks, name)
    for module, names in {
        "tracing.guards.guards": (
            "check_decision check_constant check_not_given check_dtype check_is_tensor check_rank check_size "
            "check_aliases check_same_items check_form"
        ),
        "tracing.guards.held": "check_held",
        "tracing.guards.versions": "version_of check_version",
        "tree": "clone_tensors",
        "features.building.raising_graph": "raise_mode_not_traceable",
        "features.requests.processing": "check_layout",
    }.items()
    for name in names.split()
} | {qualified_name(function): function for function in (held, items_at, with_defaults, later_of, returned_of)}
_ALWAYS_NEEDED = (standalone_checks.safetensors_dtypes, standalone_checks.read_safetensors, standalone_checks.put)
# Those that return nothing.
_STATEMENTS = frozenset(check.__name__ for check in _CHECKS.values() if check.__name__.startswith(("check_", "raise_")))
# In messages that say where a model decides something.
_FOLDERS = re.compile(r"(?<= at )/\S*/(?:site-packages/)")
_NAMES = frozenset({"Iterable", "Path", "Any", "Optional", "json", "nn", "torch"})
_STANDARD = frozenset({"builtins", "math", "operator", "_operator", "itertools", "functools"})
_LIBRARIES = frozenset({"torch", "numpy"})
_TEMPLATE = '''"""{name}, written by featx as PyTorch code that needs no other library than those it imports.

{about}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import inf, nan
from pathlib import Path
from typing import Any, Optional

import torch
from torch import device, nn
{imports}

NoneType = type(None)


{functions}


class {name}(nn.Module):
    """Computes what the docstring of this file lists.

    Args:
        weights: a safetensors file with the tensors; by default the one beside this file.
    """

    def __init__(self, weights: Any = None) -> None:
        super().__init__()
        with torch.device("meta"):
{modules}
        tensors = read_safetensors(weights or Path(__file__).with_name("{weights}"))
{tensors}
{modes}

{methods}
'''


def is_standalone(module: nn.Module, graph: Graph) -> bool:
    """Say whether all that a graph calls is torch's or numpy's, or can be written down. O(nodes)."""
    return not _reasons(module, graph)


def what_needs_more(module: nn.Module, graph: Graph) -> str | None:
    """Say what a graph calls that is not torch's or numpy's and cannot be written down; None if nothing. O(nodes)."""
    return next(iter(_reasons(module, graph)), None)


def write_standalone(
    module: nn.Module,
    codes: Mapping[bool, PythonCode],
    graphs: Mapping[bool, Graph],
    folder: Path,
    name: str,
    about: str,
) -> None:
    """Write the class `name` to `folder`, as `__init__.py`, with the tensors beside it.

    Args:
        module: has the targets of the graphs.
        codes: what runs in train mode (True) and in eval mode.
        graphs: the graphs of these.
        folder: is made if it is not there.
        name: of the class.
        about: goes into the docstring of the file.

    Raises:
        ArgumentTypeError: the code needs something else than torch; the message names it.
        MissingExtraError: safetensors is not installed.
    """
    known = {alias: value for code in codes.values() for alias, value in code.globals.items()}
    needed = _needed(known.values())
    check_class_name(name, {*known, *_NAMES, *(each.__name__ for each in needed)})
    save = _safetensors()
    sources = [inspect.getsource(each).rstrip() for each in needed]
    aliases, imports = _globals(known)
    code_of_all = "\n".join(code.src for code in codes.values())
    for alias, function in [*aliases.items()]:
        if re.search(rf"\b{function}\b(?!\()", code_of_all):  # a variable has that name
            sources.append(f"{alias} = {function}")
            del aliases[alias]
    methods = _methods({mode: _renamed(code.src, aliases) for mode, code in codes.items()}, name)
    constructors = _constructors(module, graphs.values())
    tensors, lines = tensors_of(module, constructors)
    text = _TEMPLATE.format(
        name=name,
        about=about.replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join(imports),
        functions="\n\n\n".join(sources),
        modules="\n".join(f"            put(self, {quoted(path)}, {text})" for path, text in constructors.items())
        or "            pass",
        weights=WEIGHTS,
        tensors="\n".join(f"        {line}" for line in lines),
        modes="\n".join(f"        {line}" for line in _modes(module, constructors)),
        methods=methods,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save(tensors, str(folder / WEIGHTS))
    (folder / "__init__.py").write_text(re.sub(r"\n{4,}", "\n\n\n", text), encoding="utf-8")


def _safetensors() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtraError("safetensors writes the tensors: pip install safetensors") from None
    return save_file


def _reasons(module: nn.Module, graph: Graph) -> list[str]:
    found = reasons_of_tensors(module)
    modules: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            target = module.get_submodule(node.target)
            if not modules.setdefault(node.target, constructor_of(target) is not None):
                found.append(f"'{node.target}' is a {type(target).__module__}.{type(target).__qualname__}")
        elif node.op == "call_function" and not _is_known(node.target):
            found.append(f"'{node.name}' calls {qualified_name(node.target)}")
        elif node.op == "get_attr" and node.target != "training" and not _is_tensor(module, node.target):
            found.append(f"'{node.target}' is neither a module nor a tensor")
    return found


def _is_known(target: Any) -> bool:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).partition(".")[0] in ("aten", "prims")  # those of other libraries have to be registered
    path = qualified_name(target)
    if path in _CHECKS:
        return True
    owner, _, name = path.rpartition(".")
    owner = owner or builtins.__name__
    is_there = owner in sys.modules and getattr(sys.modules[owner], name, None) is target
    return is_there and owner.partition(".")[0] in _STANDARD | _LIBRARIES


def _is_tensor(module: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    holder = module.get_submodule(owner)
    return name in holder._parameters or name in holder._buffers


def _needed(values: Iterable[Any]) -> list[Any]:
    """Return the classes and functions whose sources are written for these globals: the checks and what they call."""
    needed = [*_ALWAYS_NEEDED, *(_CHECKS[path] for value in values if (path := qualified_name(value)) in _CHECKS)]
    for function in needed:
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for name in code.co_names:
                called = vars(standalone_checks).get(name, function.__globals__.get(name))
                if getattr(called, "__module__", "").startswith("featx.") and called not in needed:
                    needed.append(called)
    return sorted(needed, key=lambda each: isinstance(each, FunctionType))


def _globals(known: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return what names in the code become, and the imports."""
    aliases: dict[str, str] = {}
    imports: list[str] = []
    for alias, value in known.items():
        if alias in ALWAYS_KNOWN:
            continue
        check = _CHECKS.get(qualified_name(value))
        if check is not None:
            aliases[alias] = check.__name__
        elif _is_foreign_namedtuple(value):
            imports.append("from collections import namedtuple")
            imports.append(f"{alias} = namedtuple({value.__name__!r}, {list(value._fields)!r})")
        else:
            imports += lines_of_import(alias, value)
    # Imports stand before the classes of tuples.
    return aliases, sorted(set(imports), key=lambda line: (not line.startswith("from "), line))


def _is_foreign_namedtuple(value: Any) -> bool:
    """Say whether a value is a class of named tuples of another library, which is nothing but its fields."""
    is_namedtuple = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
    return is_namedtuple and value.__module__.partition(".")[0] not in (*_STANDARD, "torch")


def _renamed(source: str, aliases: Mapping[str, str]) -> str:
    """Return code that calls the checks by their own names, as statements without a result."""
    for alias, name in aliases.items():
        source = re.sub(rf"\b{re.escape(alias)}\(", f"{name}(", source)
    return "\n".join(map(_without_result, _FOLDERS.sub("", source).split("\n")))


def _without_result(line: str) -> str:
    # `check = check_size(x, 1, 3);  x = check = None`
    found = re.fullmatch(r"(\s*)(\w+) = (\w+\(.*\));  (.*)", line)
    if found is None or found[3].partition("(")[0] not in _STATEMENTS:
        return line
    indent, result, call, deleted = found.groups()
    others = [name for name in deleted.split(" = ") if name not in (result, "None")]
    return f"{indent}{call}" + (f";  {' = '.join([*others, 'None'])}" if others else "")


def _methods(sources: Mapping[bool, str], name: str) -> str:
    functions = {f"forward_{'train' if mode else 'eval'}": source.strip() for mode, source in sources.items()}
    if len(set(functions.values())) == 1:
        functions = {"forward": next(iter(functions.values()))}
    else:
        functions = {key: source.replace("def forward(", f"def {key}(", 1) for key, source in functions.items()}
        functions["forward"] = (
            "def forward(self, *args: Any, **kwargs: Any) -> Any:\n"
            "    return (self.forward_train if self.training else self.forward_eval)(*args, **kwargs)"
        )
    if not any(map(PRIVATE.search, functions.values())):
        return "\n\n".join(map(_indented, functions.values()))
    # In the body of a class they would be read as names of that class.
    return "\n\n\n".join(["", *functions.values(), "\n".join(f"{name}.{each} = {each}" for each in functions)])


def _indented(source: str) -> str:
    return "\n".join(f"    {line}" if line.strip() else "" for line in source.strip().split("\n"))


def _constructors(module: nn.Module, graphs: Iterable[Graph]) -> dict[str, str]:
    paths = dict.fromkeys(node.target for graph in graphs for node in graph.find_nodes(op="call_module"))
    in_order = [path for path, _ in module.named_modules(remove_duplicate=False) if path in paths]
    return {path: str(constructor_of(module.get_submodule(path))) for path in in_order}


def _modes(module: nn.Module, constructors: Iterable[str]) -> list[str]:
    """Return the lines that put the module and those inside it into the modes that they are in."""
    made = tuple(constructors)
    inside = [
        path
        for path, each in module.named_modules(remove_duplicate=False)
        if each.training is not module.training and f"{path}.".startswith(tuple(f"{one}." for one in made))
    ]
    lines = [f"self.train({module.training})"]
    if inside:
        lines += [
            f"for path in ({', '.join(map(quoted, inside))},):",
            f"    self.get_submodule(path).training = {not module.training}",
        ]
    return lines
