"""The tensors of a module for a file of code that stands alone: what is saved, and the lines that put it in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from featx.codegen.identifiers import quoted
from featx.codegen.standalone_checks import safetensors_dtypes
from featx.ir.memory import memory_of, overlap


def tensors_of(module: nn.Module, constructors: Iterable[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors to save, each once, and the lines that put them into the module.

    Args:
        module: has the tensors.
        constructors: the paths of modules that are made by constructors of torch.nn, with parameters of their own.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {}
    strides: dict[str, tuple[int, ...]] = {}
    first: dict[int, str] = {}
    tied: list[str] = []
    for name, tensor in {**parameters, **buffers}.items():
        if id(tensor) not in first:
            first[id(tensor)] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
            if not tensor.is_contiguous() and _is_dense(tensor):
                strides[name] = tensor.stride()
        else:
            kind = "parameter" if name in parameters else "buffer"
            tied.append(f"put(self, {quoted(name)}, self.get_{kind}({quoted(first[id(tensor)])}))")
    made = tuple(f"{path}." for path in constructors)
    others = sorted(name for name in parameters if name in tensors and not name.startswith(made))
    frozen = sorted(name for name, value in parameters.items() if name in tensors and not value.requires_grad)
    persistent = module.state_dict().keys()
    lines = [
        f"parameters = {{name for name, _ in self.named_parameters()}} | {_set(others)}",
        f"frozen = {_set(frozen)}",
        f"temporary = {_set(sorted(name for name in buffers if name not in persistent))}",
        *_lines_of_strides(strides),
        "for name, value in tensors.items():",
        "    is_trained = (value.is_floating_point() or value.is_complex()) and name not in frozen",
        "    tensor = nn.Parameter(value, is_trained) if name in parameters else value",
        "    put(self, name, tensor, persistent=name not in temporary)",
        *tied,
    ]
    return tensors, lines


def reasons_of_tensors(module: nn.Module) -> list[str]:
    """Say which tensors a file of plain tensors cannot hold: those of other dtypes, and views of one another."""
    found: list[str] = []
    by_memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided:
            found.append(f"'{name}' is a tensor of the layout {tensor.layout}")
            continue
        if tensor.dtype not in safetensors_dtypes().values():
            found.append(f"'{name}' has the dtype {tensor.dtype}, which safetensors does not know")
        others = by_memory.setdefault(memory_of(tensor), [])
        found += [f"'{name}' and '{other}' share memory" for other, each in others if overlap((tensor, each))]
        others.append((name, tensor))
    return found


def _set(names: Iterable[str]) -> str:
    return f"{{{', '.join(map(quoted, names))}}}" if names else "set()"


def _lines_of_strides(strides: dict[str, tuple[int, ...]]) -> Iterator[str]:
    if strides:
        items = ", ".join(f"{quoted(name)}: {stride}" for name, stride in strides.items())
        yield f"for name, strides in {{{items}}}.items():"
        yield "    value = tensors[name]"
        yield "    tensors[name] = torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements of a tensor fill its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
