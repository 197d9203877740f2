"""Know who has changed the attributes of which module during a trace: its own call, or the code of another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from featx.ir.modules import modules_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.model_state.module_state import (
    LayerState,
    ModuleState,
    Parts,
    are_put_back,
    holds_plain_values,
    parts_of,
    put_back_parts,
    replaced_part,
)
from featx.tracing.objects.module_parts import has_forward_hooks

# A container, and where it is: modules, and the names of their attributes.
_Shared = tuple[Any, list[tuple[nn.Module, str]]]


class AttributeChanges:
    """The attributes of modules, as they were at the start and after their last call.

    What a module that is kept whole does to itself and to those inside it, it will do again when the graph runs. What
    other code does to them is in no graph. O(attributes) at the start and for each call of such a module.

    Args:
        modules: the modules.
        earlier: what was found in an earlier call of the same modules.
    """

    def __init__(self, modules: Iterable[nn.Module], earlier: AttributeChanges | None = None) -> None:
        modules = list(modules)
        known = {} if earlier is None else earlier._layers
        # Those of layers hold until a call of the module around them changes something.
        self._latest = {module: known.get(module) or _state_of(module) for module in modules}
        self._parts = {module: parts_of(module) for module in modules} if earlier is None else earlier._parts_now()
        # What a second call leaves is judged like what the first one left, by what was there before both.
        self._initial = dict(self._latest) if earlier is None else earlier._initial
        # What each entry of `_latest` and `_parts` was before a call that changed it.
        self._earlier: list[tuple[nn.Module, LayerState, Parts]] = []
        self._inside: dict[nn.Module, list[nn.Module]] = {}
        self._shared: dict[nn.Module, list[_Shared]] = {}
        self._written: set[int] = set()

    def _parts_now(self) -> dict[nn.Module, Parts]:
        """Return the parts that modules had after their last calls, with the tensors that were put back since."""
        parts = self._parts.copy()
        for module in {inner for inner, _, _ in self._earlier}:
            if are_put_back(module, parts[module]):
                parts[module] = parts_of(module)
        return parts

    @property
    def _layers(self) -> dict[nn.Module, LayerState]:
        """The states of layers of torch; none of those that hold the tensors of before again."""
        layers = {module: state for module, state in self._latest.items() if type(state) is LayerState}
        for module in {inner for inner, _, _ in self._earlier if inner in layers}:
            if layers[module].are_put_back():
                del layers[module]
        return layers

    def initial(self, module: nn.Module) -> ModuleState | None:
        """Return what a module was like at the start; None for a layer of torch."""
        state = self._initial.get(module)
        return state if isinstance(state, ModuleState) else None

    def mark(self) -> int:
        """Return what `reset` needs to undo what happens from now on. O(1)."""
        return len(self._earlier)

    def reset(self, module: nn.Module, mark: int) -> None:
        """Undo what was done since `mark` to a module, to those inside it and to those whose calls were noted."""
        undone = self._earlier[mark:]
        del self._earlier[mark:]
        for inner, state, parts in reversed(undone):
            self._latest[inner], self._parts[inner] = state, parts
        changed = {*self._at_or_inside(module), *(inner for inner, _, _ in undone)}
        for inner in changed:
            self._latest[inner].restore()
            put_back_parts(inner, self._parts[inner])

    def note_call(self, module: nn.Module) -> None:
        """Take what a module and those inside it are like as the work of its call, which is over."""
        for inner in self._at_or_inside(module):
            if self._latest[inner].difference() is not None or self.replaced_part(inner) is not None:
                self._earlier.append((inner, self._latest[inner], self._parts[inner]))
                self._latest[inner] = _state_of(inner)
                self._parts[inner] = parts_of(inner)

    def changed_by_call(self, module: nn.Module) -> Iterator[tuple[nn.Module, set[str]]]:
        """Yield a module, and each one inside it, with the attributes that are others than after its last call.

        Layers of torch are left out. To be asked before `note_call`.
        """
        for inner in self._at_or_inside(module):
            state = self._latest[inner]
            if isinstance(state, ModuleState):
                assigned = {place.text for place, _ in state.assigned_values()}
                yield inner, assigned.union(name for name, _ in state.plain_values_put())

    def noted_for_others(self, module: nn.Module, assigned: Callable[[nn.Module], Collection[str]]) -> str | None:
        """Return the attribute of a container in which a call of `module` has put plain values, if others have it too.

        Others are modules that are not inside of `module`. To be asked before `note_call`. `assigned` tells which
        attributes the code of a module changes: what it puts there may be what was there.
        """
        put: dict[nn.Module, set[int]] = {}
        for container, places in self._containers_of_others(module):
            inner, name = places[0]
            state = self._latest[inner]
            if inner not in put:
                values = state.plain_values_put() if isinstance(state, ModuleState) else ()
                put[inner] = {id(noted) for _, noted in values}
            if id(container) in put[inner]:
                return name
            if holds_plain_values(container):
                found = (name for inner, name in places if name in assigned(inner))
                name = next(found, None)
                if name is not None:
                    return name
        return None

    def note_opened(self, module: nn.Module, assigned: Collection[str]) -> None:
        """Take note that the code of a module is traced, which changes the attributes `assigned`."""
        state = self._initial[module]
        if assigned and isinstance(state, ModuleState):
            self._written.update(id(container) for name, container in state.containers() if name in assigned)

    def noted_by_opened(self, module: nn.Module) -> str | None:
        """Return the attribute of a container of `module` in which code that is traced has put plain values, if any.

        What it has put there may be what was there: `changed_by_others` compares.
        """
        if not self._written:
            return None
        for container, places in self._containers_of_others(module):
            if id(container) in self._written and holds_plain_values(container):
                return places[0][1]
        return None

    def _containers_of_others(self, module: nn.Module) -> list[_Shared]:
        """Return the containers of a module, and of those inside it, that other modules have too.

        Each with the modules that have it here, and the names of their attributes.
        """
        known = self._shared.get(module)
        if known is None:
            inside = set(self._at_or_inside(module)) if self._held_by_several else set[nn.Module]()
            known = self._shared[module] = [
                (container, own)
                for container, places in self._held_by_several
                if 0 < len(own := [place for place in places if place[0] in inside]) < len(places)
            ]
        return known

    @cached_property
    def _held_by_several(self) -> list[_Shared]:
        """The containers that several modules have."""
        found: dict[int, _Shared] = {}
        for module, state in self._initial.items():
            for name, container in state.containers() if isinstance(state, ModuleState) else ():
                found.setdefault(id(container), (container, []))[1].append((module, name))
        return [each for each in found.values() if len({module for module, _ in each[1]}) > 1]

    @property
    def are_changed_by_calls(self) -> bool:
        """Whether a call of a module has changed attributes of it, or of one inside it."""
        return bool(self._earlier)

    def are_as_at_the_start(self) -> bool:
        """Say whether all modules have the attributes and buffers that they had at the start."""
        return all(state.difference() is None for state in self._initial.values())

    def put_back_aliases(self) -> None:
        """Let modules hold the tensors that they held at the start where they now hold another name of the same."""
        for state in self._initial.values():
            if isinstance(state, ModuleState):
                state.put_back_aliases()

    def changed_by_others(self, module: nn.Module) -> str | None:
        """Return an attribute of a module, or of one inside it, that is another than after its last call."""
        found = (self._latest[inner].difference() for inner in self._at_or_inside(module))
        return next((name for name in found if name is not None), None)

    def replaced_by_others(self, module: nn.Module) -> str | None:
        """Return a part of a module, or of one inside it, that is another than after its last call."""
        return next(filter(None, map(self.replaced_part, self._at_or_inside(module))), None)

    def changed_attribute(self, module: nn.Module) -> str | None:
        """Return an attribute of a module that is another than after its last call."""
        return self._latest[module].difference()

    def replaced_part(self, module: nn.Module) -> str | None:
        """Return the name of a parameter, buffer or submodule of a module that is another than after its last call.

        Buffers of modules that are no layers of torch are told by `initial`.
        """
        return replaced_part(module, self._parts[module]) if module in self._parts else None

    def restore(self) -> None:
        """Put all modules back as they were at the start."""
        for state in self._initial.values():
            state.restore()

    def _at_or_inside(self, module: nn.Module) -> list[nn.Module]:
        if not module._modules:
            return [module] if module in self._initial else []
        known = self._inside.get(module)
        if known is None:
            known = self._inside[module] = [inner for inner in modules_of(module) if inner in self._initial]
        return known


def _state_of(module: nn.Module) -> LayerState:
    # A hook may set attributes of the layer.
    is_layer = is_torch_layer(type(module)) and not has_forward_hooks(module)
    return LayerState(module) if is_layer else ModuleState(module)
