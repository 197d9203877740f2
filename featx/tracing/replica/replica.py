"""Replica: a copy of the modules of a model that shares its tensors, which a trace may run and change.

A trace runs code of the model: it switches modes, intercepts calls, and forward may write attributes, containers and
buffers. All of that happens to the replica, which is dropped afterwards. The model is only read, so that other
threads may run, train or trace it meanwhile, and an interrupt leaves it as it was.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from featx.errors import TraceError
from featx.ir.memory import memory_of
from featx.ir.modules import walk_modules
from featx.libraries import trains_as_usual
from featx.tracing.file_globals.caches import Caches
from featx.tracing.replica.hook_globals import HookGlobals
from featx.tracing.replica.object_copies import ObjectCopies
from featx.tracing.replica.size_caches import SizeCaches
from featx.tracing.replica.unfinalized import bare_copy_of
from featx.tracing.signals import WritesSharedTensor
from featx.tracing.source.attributes import EMPTY_DICT
from featx.tracing.stand_ins.kernels import Kernels

_SHARED = frozenset({bool, int, float, str, type(None), torch.Tensor, nn.Parameter, torch.Size})
_SHARED_WITHOUT_TENSORS = _SHARED - {torch.Tensor}
# Containers that nn.Module makes for each module, most of which are empty.
_OF_ONE_MODULE = frozenset({"_modules", "_non_persistent_buffers_set"})
_FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
# Those that do not run during a trace.
_OTHER_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_HOOKS = (*_FORWARD_HOOKS, *_OTHER_HOOKS)
_LOOKED_AFTER = frozenset({"training", "_parameters", "_buffers", *_HOOKS})


# In the place of the value of an attribute: that which the class has for it.
OF_CLASS = object()


class Replica:
    """A copy of the modules of `model`; classes are the same, and tensors are shared unless they are to be copied.

    Attributes that lead back to modules (bound methods, closures, hooks, lists) lead to those of the replica. See
    `ObjectCopies` for what is copied. O(modules + attributes), about 5 us a module.

    Args:
        model: what is copied.
        training: the mode that the replica is put into, by its own `train`; None keeps the modes of the model.
        copies_tensors: "none" shares all tensors; "buffers" copies what is no parameter; "all" copies parameters too;
            "forms" has tensors without values, on the meta device, in place of all.
        caches: what the globals of the model's files hold. What the model holds too is not copied, so that code finds
            in one what it has put into the other. Hooks of other files get copies of their globals.

    Attributes:
        root: the copy of `model`.
        paths: the paths of its modules, in the order of `named_modules`.
        originals: the module of the model for each module of the replica that has one.
        size_caches: its dicts in which forward keeps things by the sizes of its inputs.

    Raises:
        TraceError: a scripted module cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        training: bool | None = None,
        copies_tensors: str = "none",
        caches: Caches | None = None,
    ) -> None:
        self._copies = ObjectCopies(self._tensor, self._new, () if caches is None else caches.containers)
        self._hook_globals = HookGlobals(self._copies, () if caches is None else caches.namespaces)
        self._copies_buffers, self._copies_parameters = copies_tensors != "none", copies_tensors in ("all", "forms")
        self._has_values = copies_tensors != "forms"
        self._original_tensors: dict[int, torch.Tensor] = {}
        self._copied_scripted = False
        self._storages: dict[int, torch.UntypedStorage] = {}
        # What takes the place of hooks that do not run, the same for all modules.
        self._no_hooks: dict[str, OrderedDict[int, Any]] = {name: OrderedDict() for name in _OTHER_HOOKS}
        self._twins: list[tuple[nn.Module, nn.Module]] = []
        self.paths: dict[nn.Module, str] = {}
        self.originals: dict[nn.Module, nn.Module] = {}
        self.size_caches = SizeCaches(self.paths, () if caches is None else caches.holders)
        with torch._C.DisableTorchFunction():
            modules = list(walk_modules(model))
            for _, module in modules:
                self._new(module)
            for module, twin in self._twins:  # grows by the modules that are not registered
                self._fill(module, twin)
        self.root: nn.Module = self._copies.known[id(model)][1]
        self._note_paths(modules)
        self._sets_flags_only = training is None or all(map(only_sets_flags, self.paths))
        if training is not None:
            self.set_mode(training)

    @property
    def has_tensors_of_model(self) -> bool:
        """Whether its modules hold the tensors of the model, under the same paths."""
        return not self._copies_buffers and not self._copied_scripted and self._sets_flags_only

    @property
    def shares_parameters(self) -> bool:
        """Whether its modules hold the parameters of the model, and not copies of them."""
        return not self._copies_parameters

    @property
    def has_hidden_state(self) -> bool:
        """Whether it holds objects in which code can keep a state that no attribute shows: iterators, closures..."""
        return self._copies.have_hidden_state

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the model that `tensor` is a copy of, or `tensor` itself."""
        return self._original_tensors.get(id(tensor), tensor)

    def put_back(self, attributes: Mapping[tuple[str, str], Any]) -> None:
        """Give attributes, by the path of the module and name, other values.

        `OF_CLASS` removes one, `EMPTY_DICT` stands for an empty dict of their own.
        """
        for (path, name), value in attributes.items():
            members = self.root.get_submodule(path).__dict__
            if value is OF_CLASS:
                members.pop(name, None)
            else:
                members[name] = {} if value is EMPTY_DICT else value

    def drop(self) -> None:
        """Empty the modules, which lead to one another, so that all they hold is freed at once."""
        for _, twin in self._twins:
            twin.__dict__.clear()
        self._twins = []
        self._copies.known.clear()
        self._hook_globals.drop()
        self.size_caches.forget()

    # -- modules -----------------------------------------------------------------------------------------------------

    def _new(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return self._copy_scripted(module)
        twin: nn.Module = bare_copy_of(module)
        pair = self._copies.known[id(module)] = (module, twin)
        self._twins.append(pair)
        return twin

    def _copy_scripted(self, module: nn.Module) -> nn.Module:
        known = self._copies.known.get(id(module))
        if known is not None:  # a part of another one
            return known[1]
        try:
            twin = copy.deepcopy(module)
        except RuntimeError as error:
            raise TraceError(
                f"a scripted {module.original_name} cannot be copied, and a trace runs a copy of the model; "
                "make the extractor of the model before it is scripted"
            ) from error
        self._copied_scripted = True
        for (_, part), (_, twin_of_part) in zip(walk_modules(module), walk_modules(twin), strict=True):
            self._copies.note(part, twin_of_part)
        return twin

    def _fill(self, module: nn.Module, twin: nn.Module) -> None:
        state, copies, shares_tensors = twin.__dict__, self._copies.of, not self._copies_buffers
        state.update(module.__dict__)
        state.pop("_compiled_call_impl", None)  # a compiled module would run its compiled code
        if any(map(state.get, _HOOKS)):
            state.update((name, hooks) for name, hooks in self._no_hooks.items() if not state.get(name))
            state.update((name, self._copied_hooks(state[name])) for name in _FORWARD_HOOKS if state[name])
        else:
            state.update(self._no_hooks)
        state.update((name, OrderedDict()) for name in _FORWARD_HOOKS if not state[name])
        for name in ("_parameters", "_buffers"):
            state[name] = dict(state[name]) if shares_tensors and type(state[name]) is dict else copies(state[name])
        shared = _SHARED if shares_tensors else _SHARED_WITHOUT_TENSORS
        known = self._copies.known.keys()
        for name, value in state.items():
            kind = type(value)
            if kind in shared or name in _LOOKED_AFTER:
                if kind is int and value in known:  # `id(layer)`
                    state[name] = copies(value)
                continue
            if kind is tuple and shared.issuperset(map(type, value)) and known.isdisjoint(value):
                continue
            # Two modules may share an empty container of the model's own.
            state[name] = kind() if name in _OF_ONE_MODULE and not value else copies(value)
        if is_compiled(module):
            state["forward"] = MethodType(_run_uncompiled, twin)
        elif (uncompiled := _uncompiled_forward(type(module))) is not None and "forward" not in state:
            state["forward"] = MethodType(uncompiled, twin)
        self._copies.fill_slots(module, twin)

    def _copied_hooks(self, hooks: Any) -> Any:
        twins = self._copies.of(hooks)
        twins.update((key, self._hook_globals.of(hook)) for key, hook in list(twins.items()))
        return twins

    def _note_paths(self, modules: list[tuple[str, nn.Module]]) -> None:
        known = self._copies.known
        for path, module in modules:
            twin = known[id(module)][1]
            self.paths[twin] = path
            self.originals[twin] = module

    # -- modes -------------------------------------------------------------------------------------------------------

    def set_mode(self, training: bool) -> None:
        """Put its modules into a mode, by the `train` of the model.

        Raises:
            WritesSharedTensor: that writes a tensor which is shared with the model.
        """
        modules = list(self.paths)
        if self._sets_flags_only:
            for module in modules:
                if isinstance(module, torch.jit.ScriptModule):
                    module.training = training
                else:  # setting an attribute takes nn.Module ten times as long
                    module.__dict__["training"] = training
            return
        owned = {memory_of(tensor) for module in modules for tensor in tensors_held_by(module)}

        def refuse_write(kernel: object, written: list[torch.Tensor]) -> None:
            if not self._copies_parameters and not owned.isdisjoint(map(memory_of, written)):
                raise WritesSharedTensor

        with Kernels(lambda *kernel: None, refuse_write):
            try:
                self.root.train(training)
            except NotImplementedError as error:
                raise TraceError(
                    f"{type(self.root).__name__}.train({training}) is not implemented ({error}), and an extractor has "
                    "both modes. Of a program of torch.export, make the extractor of the model that was exported"
                ) from error
        # What `train` does may go beyond flags: layers that are merged into one have gone.
        self.paths = {module: path for path, module in walk_modules(self.root)}

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if tensor.is_meta or not (self._copies_parameters if is_parameter else self._copies_buffers):
            return tensor
        twin = self._copies.note(tensor, self._copy_of_tensor(tensor))
        self._original_tensors[id(twin)] = tensor
        return twin

    def _copy_of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            twin = copy.deepcopy(tensor.detach()) if self._has_values else tensor.detach().to("meta")
            return twin.requires_grad_(tensor.requires_grad)
        # One copy of each storage, so that tensors that share memory still do.
        storage = self._storages.get(memory_of(tensor))
        if storage is None:
            storage = self._storages[memory_of(tensor)] = self._copy_of_storage(tensor.untyped_storage())
        twin = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def _copy_of_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._has_values:
            return storage.clone()
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()


def replica_of(
    model: nn.Module,
    training: bool | None = None,
    copies_tensors: str = "none",
    caches: Caches | None = None,
) -> Replica:
    """Return a replica in a mode; where its own `train` writes tensors, a replica that has copies of all of them."""
    try:
        return Replica(model, training, copies_tensors, caches)
    except WritesSharedTensor:
        return Replica(model, training, "all", caches)


def modes_after_train(model: nn.Module, training: bool) -> dict[str, bool]:
    """Return which mode each submodule would be in after `train(training)` of the model, by path; the model has ""."""
    return {path: module.training for module, path in replica_of(model, training).paths.items()}


def view_in_mode(model: nn.Module, training: bool) -> nn.Module:
    """Return a tree of modules that differs from the model in its modes alone, to be asked and not to be run.

    It shares everything else, so it holds for modules whose `train` does no more than to set flags. O(modules).
    """
    twins: dict[nn.Module, nn.Module] = {}
    for _, module in walk_modules(model):
        twin = twins[module] = bare_copy_of(module)
        twin.__dict__.update(module.__dict__, training=training)
    for module, twin in twins.items():
        if module._modules:
            children = module._modules.items()
            twin.__dict__["_modules"] = {name: None if child is None else twins[child] for name, child in children}
    return twins[model]


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is what `torch.compile` made of another one."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and "_orig_mod" in module._modules


@functools.cache
def _uncompiled_forward(kind: type[nn.Module]) -> Any:
    """Return the function that a class has decorated with `torch.compile` as its forward; None without."""
    return getattr(kind.forward, "_torchdynamo_orig_callable", None)


def _run_uncompiled(module: Any, *args: Any, **kwargs: Any) -> Any:
    # torch's compiler would trace the trace.
    return module._orig_mod(*args, **kwargs)


def only_sets_flags(module: nn.Module) -> bool:
    """Say whether `train` of a module does no more than to set flags."""
    is_known = type(module).train is nn.Module.train or trains_as_usual(module)
    return is_known and "train" not in module.__dict__


def tensors_held_by(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, without those of its submodules."""
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]
