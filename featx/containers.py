"""Containers of the modules or parameters that a graph module has of one of the model, which may be some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from featx.errors import RequestError


class PartOfList(nn.ModuleList):
    """What is left of a `ModuleList` or `Sequential`: its modules have their numbers there, so that there may be gaps.

    `len` and iteration go over the modules that are left. A negative number, also in a slice, counts them from the end.
    """

    def __getitem__(self, idx: int | slice) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the module that had this number in the model, or those of a slice as a list.

        Raises:
            IndexError: there is no such module here.
        """
        names = list(self._modules)
        if isinstance(idx, slice):
            of_model = slice(self._number(idx.start), self._number(idx.stop), idx.step)
            numbers = map(str, range(*of_model.indices(self._following())))
            return [self._modules[number] for number in numbers if number in self._modules]
        if idx < 0 and -idx <= len(names):
            return self._modules[names[idx]]
        if str(idx) not in self._modules:
            raise IndexError(f"this part of the model has the modules {', '.join(names)} of a list, and not {idx}")
        return self._modules[str(idx)]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the modules that are left."""
        return iter(self._modules.values())

    def append(self, module: nn.Module) -> PartOfList:
        """Add a module under the number after the largest one."""
        self.add_module(str(self._following()), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> PartOfList:
        """Add several as `append` does."""
        for module in modules:
            self.append(module)
        return self

    def _following(self) -> int:
        return max(map(int, self._modules), default=-1) + 1

    def _number(self, bound: int | None) -> int | None:
        """Return the number that a bound of a slice means; what is before all modules stays negative."""
        names = list(self._modules)
        if bound is None or bound >= 0:
            return bound
        return int(names[bound]) if -bound <= len(names) else -1 - self._following()

    def _get_name(self) -> str:
        return "ModuleList"

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RequestError: see `refuse_call`."""
        refuse_call(self)


class PartOfParameterList(nn.ParameterList):
    """What is left of a `ParameterList`: its parameters have their numbers there, so that there may be gaps.

    `len` and iteration go over the parameters that are left. A negative number counts them from the end.
    """

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[nn.Parameter | None]:
        """Yield the parameters that are left."""
        return iter(dict(self._numbered()).values())

    def __getitem__(self, idx: int | slice) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the parameter that had this number in the model, or those of a slice as a list.

        Raises:
            IndexError: there is no such parameter here.
        """
        present = dict(self._numbered())
        if isinstance(idx, slice):
            return [present[each] for each in range(*idx.indices(max(present, default=-1) + 1)) if each in present]
        if idx < 0 and -idx <= len(present):
            return list(present.values())[idx]
        if idx not in present:
            raise IndexError(f"this part of the model has the parameters {', '.join(map(str, present))}, and not {idx}")
        return present[idx]

    def extra_repr(self) -> str:
        """Return the shape of each parameter by its number."""
        return _shapes(dict(self._numbered()))

    def _numbered(self) -> list[tuple[int, nn.Parameter | None]]:
        return sorted((int(name), parameter) for name, parameter in self._parameters.items())

    def _get_name(self) -> str:
        return "ParameterList"


class PartOfParameterDict(nn.ParameterDict):
    """What is left of a `ParameterDict`, with the keys that it has there."""

    __jit_unused_properties__: ClassVar[list[str]] = ["_keys"]

    @property
    def _keys(self) -> dict[str, None]:
        """The names of the parameters, of which torch's class keeps a dict beside them."""
        return dict.fromkeys(self._parameters)

    @_keys.setter
    def _keys(self, keys: dict[str, None]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Leave the parameters as they are; the constructor of torch's class sets an empty dict."""

    def extra_repr(self) -> str:
        """Return the shape of each parameter by its key."""
        return _shapes(self._parameters)

    def _get_name(self) -> str:
        return "ParameterDict"


class PartOfSequential(nn.Module):
    """What is left of a `Sequential` whose modules have names; each has the number that it has there.

    Args:
        names: the names of all modules of the model's, in order.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.names = names

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        """Yield the modules that are left."""
        return iter(self._modules.values())

    def __getitem__(self, idx: int | slice) -> Any:
        """Return the module that had this number in the model, or those of a slice as a list.

        Raises:
            IndexError: there is no such module here.
        """
        if isinstance(idx, slice):
            return [self._modules[name] for name in self.names[idx] if name in self._modules]
        name = self.names[idx]
        if name not in self._modules:
            raise IndexError(f"this part of the model has {', '.join(self._modules)}, and not '{name}', number {idx}")
        return self._modules[name]

    def _get_name(self) -> str:
        return "Sequential"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RequestError: see `refuse_call`."""
        refuse_call(self)


class PartOfDict(nn.ModuleDict):
    """What is left of a `ModuleDict`, with the keys that it has there."""

    def _get_name(self) -> str:
        return "ModuleDict"


def refuse_call(container: nn.Module) -> NoReturn:
    """Raise RequestError, which says what to call in the place of a container that a graph module has parts of."""
    raise RequestError(
        f"the graph calls the parts of this container ({', '.join(container._modules)}) one by one, so that it cannot "
        "be called itself; call that of the model. For an extractor that starts and ends there, ask for its value "
        "(create_feature_extractor with its name, and inputs= for what is ahead of it)"
    )


def _shapes(parameters: Mapping[Any, torch.Tensor | None]) -> str:
    shapes = {key: None if each is None else tuple(each.shape) for key, each in parameters.items()}
    return "\n".join(f"({key}): {shape}" for key, shape in shapes.items())


def is_of_graph_module(module: nn.Module) -> bool:
    """Say whether a module is a container that a graph module has made, and none of the user's."""
    parts = (PartOfList, PartOfSequential, PartOfDict, PartOfParameterList, PartOfParameterDict)
    return type(module) in (nn.Module, *parts)


def twins_of_containers(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the submodules of a graph module by name, with others in place of its containers, at any depth.

    The others hold the same modules and tensors, so that both can get and lose parts alone. O(parts of containers).
    """
    return _twins_of(module, {})


def _twins_of(module: nn.Module, known: dict[nn.Module, nn.Module]) -> dict[str, nn.Module | None]:
    children = module._modules.items()
    return {name: child if child is None else _twin_of(child, known) for name, child in children}


def _twin_of(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if not is_of_graph_module(module):
        return module
    if module not in known:
        twin = known[module] = type(module)()
        state = module.__dict__.items()
        twin.__dict__.update({name: each.copy() if isinstance(each, (dict, set)) else each for name, each in state})
        twin.__dict__["_modules"] = _twins_of(module, known)
    return known[module]


def empty_like(module: nn.Module) -> nn.Module:
    """Return a module without parts that holds some of those of `module` as it does: by number, by key or by name."""
    numbered = all(map(str.isdigit, module._modules))
    if type(module) in (nn.ModuleList, nn.Sequential, PartOfList) and numbered:
        return PartOfList()
    if type(module) in (nn.Sequential, PartOfSequential):
        return PartOfSequential(getattr(module, "names", None) or tuple(module._modules))
    if type(module) in (nn.ParameterList, PartOfParameterList):
        return PartOfParameterList()
    if type(module) in (nn.ParameterDict, PartOfParameterDict):
        return PartOfParameterDict()
    return PartOfDict() if type(module) in (nn.ModuleDict, PartOfDict) else nn.Module()


def plain(module: nn.Module) -> nn.Module:
    """Return a module, or for a container of a graph module one of torch with the same parts, at any depth. O(modules).

    What is written to a file for others must not need featx.
    """
    if not is_of_graph_module(module):
        return module
    twin = nn.Module()
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = plain_parts(module)
    return twin


def plain_parts(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the submodules of a module by name, each as `plain` gives it."""
    return {name: None if child is None else plain(child) for name, child in module._modules.items()}
