"""Torch calls: run those that a model makes, and turn them into nodes."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from featx.ir.memory import memory_of
from featx.ir.operator_facts import draws_now, facts_of, first_argument, targets_of_write, tensors_written
from featx.tracing.calls.model_writes import ModelWrites
from featx.tracing.calls.tensor_reads import TensorReads
from featx.tracing.calls.value_log import ValueLog
from featx.tracing.environment.generators import SETS_GENERATOR, TorchGenerator
from featx.tracing.environment.switches import put_back, switches
from featx.tracing.guards.scalars import plain_numbers
from featx.tracing.history.noted_set import NotedSet
from featx.tracing.nodes.written_calls import as_written
from featx.tracing.objects.arrays import array_of_scalar, is_array_of_numbers, tensor_of
from featx.tracing.objects.tensor_versions import versions_of
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import Results
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.side_effects.recent_writes import RecentWrites
from featx.tracing.signals import NeedsRealValues, UnsupportedSideEffect, Untraceable
from featx.tracing.source.frames import line_of, user_frame
from featx.tracing.stand_ins.kernels import Kernels
from featx.tracing.stand_ins.recurrent import check_states_of_packed
from featx.tree import tensors_in

# What changes the shape of a tensor and of all that are the same object.
_RESHAPES = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_"})
# What changes whether gradients flow, and what returns memory of its input with versions of its own: neither counts as
# a new version of the input.
_COUNTS_NO_VERSION = frozenset({"detach_", "requires_grad_", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})
_MEMORY = frozenset({"untyped_storage", "storage", "_typed_storage", "__dlpack__", "data_ptr"})
# What may change a tensor, or let other code write it, without a kernel that writes: `p.data = x`, `p.numpy()[0] = 1`.
_WITHOUT_KERNEL = _MEMORY | {
    "__set__",
    "requires_grad_",
    "set_",
    "numpy",
    "__array__",
    "share_memory_",
    "register_hook",
}


class TorchCalls:
    """What one trace does with the torch calls of a model.

    Args:
        recorder: makes the nodes.
        results: follows what the calls return.
        writes: takes what may write tensors of the model, in a trace for real.
        foreign: saves what is written and was not made in this run.

    Attributes:
        value_log: what was read of values.
        generator: the state of torch's random generator.
        kernels: observes kernels that run outside of all recorded calls.
        tensor_reads: answers what is asked of tensors.
        unrecorded: the signal for a kernel that ran on a traced value outside of every recorded call.
    """

    def __init__(
        self, recorder: Recorder, results: Results, writes: ModelWrites | None, foreign: ForeignTensors
    ) -> None:
        self._recorder = recorder
        self._writes = writes
        self._results = results
        self._foreign = foreign
        self.value_log = ValueLog()
        self.generator = TorchGenerator()
        self.kernels = Kernels(
            self._on_unrecorded_kernel,
            None if writes is None else writes.on_write,
            recorder.note_dynamic_shape,
            self._note_result,
        )
        recorder.stand_ins.shapes = self.kernels.shapes
        self.tensor_reads = TensorReads(recorder, results, self.value_log, self.execute, self.make_alias)
        self.unrecorded: Untraceable | None = None
        # Whether an opened module has given a tensor other memory.
        self._storage_was_replaced = False
        # Memory of tensors that the model may know as one object, and the trace as several.
        self._aliased_memory = NotedSet[int]()
        # How the switches of the process are set.
        self._switches = switches()

    @property
    def recent_writes(self) -> RecentWrites:
        """What saves the values of tensors that are written since a mark."""
        return self._foreign.recent

    @property
    def parts(self) -> tuple[Any, ...]:
        """What notes something that `mark` and `forget` take back."""
        notes = self.value_log, self.kernels.shapes, self._results, self._aliased_memory
        return notes if self._writes is None else (*notes, self._writes)

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call: run it and, outside modules that are kept whole, record it."""
        recorder, name = self._recorder, function.__name__
        if name == "__get__":
            if not recorder.opaque_call.is_inside:
                recorder.earlier.refuse(args[0])
            return self.tensor_reads.attribute(cast(Any, function).__self__.__name__, function, args[0])
        if recorder.opaque_call.is_inside:
            result = self.execute(function, args, kwargs)
            recorder.opaque_call.note_answer(result, is_value=facts_of(name).reads_values)
            return result
        recorder.earlier.refuse(args, kwargs)
        # Tensor.set_, and what it assigns itself: torch loses an error that is raised here.
        if name == "set_" or (name == "__set__" and _is_of_backward_hooks(function) and args[1] is None):
            self._storage_was_replaced = self._storage_was_replaced or name == "set_"
            return function(*args, **kwargs)
        if name == "__set__" and self._assigns_itself(function, *args):
            return None
        if name == "__set__" and cast(Any, function).__self__.__name__ == "requires_grad":
            function, name = torch.Tensor.requires_grad_, "requires_grad_"
        self.check_unrecorded()
        if function is torch._C._set_grad_enabled:
            recorder.grad_modes.record(args[0])
            recorder.grad_modes.is_enabled = args[0]
            return function(*args)
        self._refuse(name, function, first_argument(args, kwargs))
        if name in _OF_ARRAYS and args:
            args = (array_of_scalar(args[0]), *args[1:])
        if args and is_array_of_numbers(args[0]):
            made = None
            if name in _OF_ARRAYS:
                made = recorder.numbers.arrays.as_tensor(args[0], is_shared=function is not torch.tensor)
            if made is None and function is torch.as_tensor:
                return self._constant_of_array(args, kwargs)
            function, args, kwargs = _on_tensor(function, args, kwargs, made)
        if name in _READS_OF_FORM or facts_of(name).reads_values:
            return self._read(name, function, args, kwargs)
        return self._record_or_run(name, function, args, kwargs)

    def _constant_of_array(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return what `torch.as_tensor` makes of an array of numpy. It may share memory and must not be written."""
        with torch._C.DisableTorchFunction():
            constant = torch.as_tensor(*args, **kwargs)
        self._recorder.numbers.arrays.note_constant(args[0], constant)
        return constant

    def _read(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that tells Python something of a tensor: its rank, its length, or its values."""
        if name == "__len__":
            self._recorder.numbers.on_conversion()
            return self.tensor_reads.pinned(len, args, {}, function(*args))
        if name in _READS_OF_FORM:
            self.tensor_reads.note_rank(first_argument(args, kwargs))
            return function(*args, **kwargs)
        return self.tensor_reads.read_value(name, function, args, kwargs)

    def _record_or_run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call of what is followed; run one of constants alone."""
        recorder = self._recorder
        if name == "element_size" and recorder.is_of_graph(args):
            self.tensor_reads.decide_dtype(args[0])
        if facts_of(name).writes_first or "out" in kwargs:
            recorder.written_at.add((recorder.scope.module_path, line_of(user_frame())))
            self._refuse_foreign(targets_of_write(args, kwargs))
        given = args if not kwargs else (*args, *kwargs.values())
        if not recorder.is_followed(given):
            return self._on_constants(function, args, kwargs)
        return self._record(function, args, kwargs)

    # -- what is refused ---------------------------------------------------------------------------------------------

    def _refuse(self, name: str, function: Callable[..., Any], tensor: Any) -> None:
        """Raise where a call with `tensor` as its first argument does what no graph can hold."""
        if name == "__set__":
            what = cast(Any, function).__self__.__name__
            hint = " (tensor.data.copy_(value) writes it in place)" if what == "data" else ""
            raise Untraceable(f"'{what}' of a tensor is assigned{hint}")
        if name in _MEMORY and self._recorder.is_of_graph((tensor,)):
            raise Untraceable(f"forward accesses the storage of a tensor ({name})")
        if name in ("resize_", "resize_as_"):
            raise Untraceable(f"a tensor is resized in place ({name})")
        if name in _COUNTS_NO_VERSION:
            self._recorder.write_log.untracked_memory.add(memory_of(tensor))
        if name == "backward":
            raise Untraceable("forward calls backward, which adds to the gradients of the model's parameters,")
        if facts_of(name).changes_gradients and id(tensor) in self._recorder.owned:
            raise Untraceable(f"forward calls {name} of a parameter or buffer of the model")
        if name in _RESHAPES and memory_of(tensor) in self._aliased_memory:
            raise Untraceable(f"the shape of a tensor with aliases is changed in place ({name})")

    def _assigns_itself(self, function: Callable[..., Any], tensor: torch.Tensor, value: Any) -> bool:
        """Say whether this assigns its own data to a tensor, as `weight.data *= mask` does after the write."""
        if cast(Any, function).__self__.__name__ != "data" or not isinstance(value, torch.Tensor):
            return False
        if not tensor.layout is value.layout is torch.strided:
            return False
        is_real, stand_in = self._recorder.is_real, self._recorder.stand_ins.of
        one, other = (tensor, value) if is_real else (stand_in(tensor), stand_in(value))
        forms = [(each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (one, other)]
        return forms[0] == forms[1] and memory_of(one) == memory_of(other)

    def check_switches(self) -> None:
        """Raise where forward has set a switch of torch, or entered a dispatch mode, which no graph does."""
        kernels = self.kernels
        if kernels.is_under_another if kernels.depth else not kernels.is_on_top():
            raise Untraceable("forward enters a TorchDispatchMode,")
        if switches() != self._switches:
            # What would put it back may come later in forward, which ends here.
            raise Untraceable(f"forward sets a switch of torch: {put_back(self._switches)},")

    def _refuse_foreign(self, targets: tuple[Any, ...]) -> None:
        recorder = self._recorder
        for target in targets:
            if not isinstance(target, torch.Tensor) or recorder.is_of_graph((target,)) or recorder.is_unseen(target):
                continue
            if recorder.follow_new_parameter(target) is not None:
                continue
            if is_functorch_wrapped_tensor(target):
                raise Untraceable("a function of torch.func (vmap, grad) writes a tensor")
            what = f"a tensor of shape {tuple(target.shape)}, which is neither a parameter nor a buffer of the model,"
            raise Untraceable(f"forward writes in place into {what}")

    def check_unrecorded(self) -> None:
        """Raise where something ran that a graph would miss."""
        if self.unrecorded is not None:
            raise self.unrecorded

    def check_module(self) -> None:
        """Raise if a call in the module whose forward is over did something that a graph would miss."""
        self.check_unrecorded()
        if self._storage_was_replaced:
            self._storage_was_replaced = False
            raise UnsupportedSideEffect("forward gives a tensor other memory (Tensor.set_)")

    def check_memory(self) -> None:
        """Raise where a followed tensor has other memory than it had."""
        # Tensor.set_ does not pass through the function mode.
        for tensor, memory in self._recorder.write_log.memories:
            if memory_of(tensor) != memory:
                raise UnsupportedSideEffect("forward gives a tensor other memory (Tensor.set_)")

    def refuse_other_threads(self) -> None:
        """Note that forward has another thread compute something. It is raised later, in this thread."""
        what = "forward hands work to another thread or process, which cannot be recorded,"
        self.unrecorded = self.unrecorded or Untraceable(what)

    # -- running -----------------------------------------------------------------------------------------------------

    def execute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call on stand-ins, or for real where this trace is one."""
        recorder, name = self._recorder, function.__name__
        if name == "backward":
            recorder.require_own_parameters()  # to whose gradients it adds
        if not recorder.is_real and torch._C._is_any_autocast_enabled():
            raise NeedsRealValues  # the meta device does not know of autocast
        draws_inside = False
        if recorder.opaque_call.is_inside:  # of a node of its own the graph knows
            draws_inside = draws_now(name, args, kwargs)
            recorder.opaque_call.draws = recorder.opaque_call.draws or draws_inside
        written = recorder.stand_ins.written_of_model(function, args, kwargs)
        if written:
            recorder.opaque_call.note_model_write(map(memory_of, written))
        self._save_foreign(function, args, kwargs)
        if recorder.is_real:
            args, kwargs = plain_numbers((args, kwargs))  # some kernels convert numbers, which would fix them
            check_states_of_packed(function, args)
            result = function(*args, **kwargs)
            if facts_of(name).reads_values:
                self.value_log.note(name, result)
            return result
        if facts_of(name).reads_values or name in _MEMORY:
            known = recorder.stand_ins.has_values
            is_unknown = any(isinstance(value, torch.Tensor) and not known(value) for value in args)
            if is_unknown and name in _MEMORY:
                raise NeedsRealValues  # of a stand-in it would be 0
            answer = self.value_log.next(name) if is_unknown or self.value_log.are_expected else None
            if is_unknown:
                return answer
        if draws_inside:  # what a module that is kept whole draws is no value
            with self.kernels.drawing():
                result = recorder.stand_ins.run(function, args, kwargs, may_draw=True)
        else:
            result = recorder.stand_ins.run(function, args, kwargs)
        self._foreign.note_made(result, (args, kwargs))
        if recorder.opaque_call.is_inside:
            self._note_made_inside(args, kwargs, result)
        if facts_of(name).reads_values:
            self.value_log.note(name, result)
        if name == "type" and isinstance(result, str):
            kind = recorder.device.type
            return result.replace("torch.meta.", "torch." if kind == "cpu" else f"torch.{kind}.")
        return result

    def _save_foreign(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save what a call may change that is not of this run; raise where it is a tensor that the replica shares."""
        name, first = function.__name__, first_argument(args, kwargs)
        if name in _WITHOUT_KERNEL and isinstance(first, torch.Tensor):
            if self._writes is not None:
                self._writes.refuse_shared(first)
            self._foreign.save_form(first)
        elif not self._recorder.is_real and (targets := tensors_written(function, args, kwargs)):
            self._foreign.save(targets)  # where it is real, kernels tell
            known = self._recorder.stand_ins.has_values
            self.recent_writes.save(each for each in targets if isinstance(each, torch.Tensor) and known(each))

    def _note_result(self, given: list[torch.Tensor], result: Any) -> None:
        """Take note of what a kernel of a run for real has returned."""
        self._foreign.note_made(result, given)
        if self._recorder.opaque_call.is_inside:
            self._note_made_of(given, result)

    def _note_made_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take note of what a call has computed from inputs that have values although the trace is not for real."""
        if any(not each.is_meta for each in tensors_in(result)):
            self._note_made_of(tensors_in((args, kwargs)), result)

    def _note_made_of(self, given: list[torch.Tensor], result: Any) -> None:
        opaque_call = self._recorder.opaque_call
        if any(map(opaque_call.has_made, given)) or self._recorder.is_of_graph(tuple(given)):
            opaque_call.note_made(result)

    def _execute_in_order(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The numbers that a graph draws follow from the state of the generator, which it must find as the model does.
        name = function.__name__
        is_draw = draws_now(name, args, kwargs)
        if is_draw:
            self.check_generator()
        result = self.execute(function, args, kwargs)
        if is_draw:
            self.generator.note()
        return result

    def start(self) -> None:
        """Let seeding be seen from now on, whatever the state of the generator is."""
        self.kernels.start()
        self.generator.note()

    def check_generator(self) -> None:
        """Raise where forward has put torch's generator into another state than that of the last draw."""
        if self.generator.was_set():
            raise UnsupportedSideEffect(SETS_GENERATOR)

    # -- recording ---------------------------------------------------------------------------------------------------

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        frame = recorder.model_frame()
        self.check_switches()
        if frame is not None:
            recorder.note_code(frame, "torch is called")
        arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        name = function.__name__
        result = self._execute_in_order(function, args, kwargs)
        first = first_argument(args, kwargs)
        if isinstance(result, torch.Tensor) and isinstance(first, torch.Tensor) and not facts_of(name).writes_first:
            if result is first:
                result = self.make_alias(result, frame)
            elif facts_of(name).may_return_input and recorder.call_record is not None:
                recorder.call_record.returned_inputs[id(result)] = first  # as the call may do with another input
        op, target, arguments, stem = as_written(function, arguments, keywords, frame)
        node = recorder.add_node(op, target, arguments, keywords, stem, frame)
        result = self._results.follow(result, node, frame)
        if name in ("squeeze", "squeeze_"):
            # How many dimensions go depends on sizes.
            self.tensor_reads.pinned(torch.Tensor.dim, (result,), {}, result.dim())
        return result

    def make_alias(self, tensor: torch.Tensor, frame: FrameType | None) -> torch.Tensor:
        """Return the same memory as another object, for a call that returns its input, or for another input does not.

        The second call, which is compared with this one, gets one object for both.
        """
        if tensor.layout != torch.strided and tensor.requires_grad:
            raise Untraceable(
                "a call returns its input, a sparse tensor that requires gradients, of which no alias can be made"
            )
        self._aliased_memory.add(memory_of(tensor))
        with torch._C.DisableTorchFunction():
            is_strided = tensor.layout == torch.strided
            alias = torch.ops.aten.alias.default(tensor) if is_strided else tensor.detach()
        self._recorder.note_alias(alias, tensor, frame)
        return alias

    def _on_constants(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # No input of the model is involved. A call that makes or writes tensors is recorded, without a name, as they
        # may be written later and must be made anew in each call; what any other gives is a plain value.
        recorder = self._recorder
        self.check_switches()
        given = tensors_in((args, kwargs))
        versions = versions_of(given)
        result = self._execute_in_order(function, args, kwargs)
        is_written = facts_of(function.__name__).writes_first or "out" in kwargs or versions_of(given) != versions
        if not is_written and not tensors_in(result):
            return result
        arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        frame = recorder.model_frame()
        op, target, arguments, stem = as_written(function, arguments, keywords, frame)
        node = recorder.add_unnamed_node(op, target, arguments, keywords, stem)
        recorder.note_dynamic_shape_of(node)
        return self._results.follow(result, node, frame)

    def _on_unrecorded_kernel(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """Note a kernel that runs outside of all recorded calls, where that matters.

        It is raised later: code in C++ on the way would make another error of it. The constructors of early versions of
        torch, which it does not tell of either, call one kernel and return its result; this is recorded.
        """
        recorder = self._recorder
        if recorder.opaque_call.is_inside or self.unrecorded is not None:
            return None
        stem = _OF_CONSTRUCTORS.get(function)
        if stem is not None and all(recorder.is_of_graph((tensor,)) for tensor in tensors):
            with self.kernels.recorded():
                result = function(*args, **kwargs)
                arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
                node = recorder.add_node("call_function", function, arguments, keywords, stem, None)
                return self._results.follow(result, node, None)
        is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        if is_random or any(recorder.is_of_graph((tensor,)) or recorder.is_unseen(tensor) for tensor in tensors):
            self.unrecorded = Untraceable(f"{function} runs in compiled or scripted code, which cannot be recorded,")
        return None


_OF_ARRAYS = frozenset({"tensor", "as_tensor"})
_READS_OF_FORM = frozenset({"dim", "ndimension", "__len__"})
# The kernels of `torch.Tensor(x)`, `Variable(x)` and `torch.FloatTensor(2, 3)`, and what their nodes are called.
_OF_CONSTRUCTORS = {
    torch.ops.aten.alias.default: "Tensor",
    torch.ops.aten.detach.default: "Variable",
    torch.ops.aten.empty.memory_format: "empty",
}


def _is_of_backward_hooks(function: Any) -> bool:
    return function.__self__.__name__ == "_backward_hooks"


def _on_tensor(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: torch.Tensor | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that does with a tensor what this one does with an array of numpy, its first argument.

    `made` is a tensor of the traced numbers in that array; None where it has none.
    """
    if function is torch.tensor:
        # What this makes may be written. torch.tensor itself warns of tensors, as which a graph holds arrays.
        return torch.asarray, (tensor_of(args[0]) if made is None else made,), {**kwargs, "copy": True}
    return function, args if made is None else (made, *args[1:]), kwargs
