"""optimize: an extractor that is as fast as the hardware allows, with a known error."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, cast

from torch import nn

from featx.errors import ArgumentTypeError, OptimizationError
from featx.examples import Example, as_example
from featx.features.adaptive import AdaptiveExtractor
from featx.features.dual import DualGraphModule
from featx.optimization.build import Builder, Extractor
from featx.optimization.hardware import device_of
from featx.optimization.module import OptimizedExtractor
from featx.optimization.plan import Plan
from featx.optimization.progress import Progress
from featx.optimization.recipe import Recipe
from featx.optimization.search import Search
from featx.saved_tensor import SavedTensor
from featx.tree import tensors_in

_TOLERANCE = 1e-2


def optimize(
    extractor: nn.Module,
    example_inputs: Any = None,
    *,
    tolerance: float | None = None,
    budget: float = 120.0,
    checks: Mapping[str, Any] | None = None,
    int8: bool = False,
    plan: Plan | str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> OptimizedExtractor:
    """Return a module that computes what `extractor` does, as fast as this hardware can within a tolerance.

    What may help is tried and timed in turn with the exact extractor, in this process: editing the graph (folded batch
    norms and layer scales, merged linear layers, removal of what does nothing in eval mode), channels last, bfloat16,
    float16, torch.compile, OpenVINO if it is installed, other numbers of threads, and computing a batch in parts. The
    fastest one whose error is within `tolerance` for each feature is returned; it is never slower than the exact
    extractor, which is returned as it is where nothing gains. The error of a feature is `|found - exact| / |exact|` in
    the Euclidean norm, that of the worst sample, on the example, on noise, and for images on photos. Other inputs may
    give larger errors.

    The extractor and its model stay as they are. The result has copies of the weights, and trains no more. Memory: up
    to four more copies of the weights while it is searched for, and two by OpenVINO.

    Args:
        extractor: what `create_feature_extractor` or `create_backbone` returns, in eval mode.
        example_inputs: a tensor, a tuple of arguments or a dict of inputs by name, of the size and on the device of
            later use; by default random values, and indices that are 0, in the form of the example that the extractor
            was made with. Errors are those for such values then: give inputs as you have them.
        tolerance: the largest relative error that a feature may have, by default 1e-2. 0 tries only what gives bit for
            bit the same. With a plan it is that of the plan, or the largest error that the plan may have.
        budget: seconds after which nothing more is begun; the last ones are for the final comparison. To compile a
            large model once may take a minute, and what has begun is ended.
        checks: further inputs on which errors count, by what they are: `{"my photos": batch}`.
        int8: also try linear layers in int8, for which torchao is needed.
        plan: what an earlier call has found, or the file that it was saved to: it is applied, and nothing is measured.
            Its errors are those that were measured then, with the weights of then.
        progress: show a line on the standard error stream.

    Returns:
        The module, with the keys and dtypes of the extractor. `print(module.plan)` shows what was tried.

    Raises:
        ArgumentTypeError: it is no extractor, or there is no example.
        OptimizationError: the extractor is in train mode, or gives other values in a second call; or the plan was made
            for other hardware or another extractor, has a larger error than `tolerance`, or cannot be read.
    """
    found = _checked(extractor)
    _check_arguments(tolerance, budget, checks, plan)
    example = _example(found, example_inputs)
    if plan is not None:
        return _applied(found, example, plan if isinstance(plan, Plan) else Plan.load(plan), tolerance)
    others = {name: as_example(inputs) for name, inputs in (checks or {}).items()}
    shown = Progress(budget, is_shown=progress)
    called = "the example" if example_inputs is not None else "random values in the form of the example"
    with _buffers_kept(found):
        module, made = Search(
            found, example, called, others, _TOLERANCE if tolerance is None else float(tolerance), budget, int8=int8,
            progress=shown,
        ).run()  # fmt: skip
    module.plan = made
    return module


def apply_recipe(extractor: nn.Module, recipe: Recipe, dtypes: dict[str, list[str]]) -> OptimizedExtractor:
    """Return a module that runs by a recipe, whatever hardware that was found on.

    Args:
        extractor: in eval mode.
        recipe: what is done.
        dtypes: those of the tensors in each feature.
    """
    found = _checked(extractor)
    return Builder(found, _example(found, None), dtypes).build(recipe)


def _applied(extractor: Extractor, example: Example, plan: Plan, tolerance: float | None) -> OptimizedExtractor:
    plan.check(extractor)
    if tolerance is not None and plan.chosen.error > tolerance:
        raise OptimizationError(
            f"the plan has an error of {plan.chosen.error:.1e}, and the tolerance is {tolerance:.1e}; optimize without "
            "the plan, or leave the tolerance out"
        )
    module = Builder(extractor, example, plan.dtypes).build(plan.recipe)
    module.plan = plan
    return module


def _check_arguments(tolerance: object, budget: object, checks: object, plan: object) -> None:
    for name, value in (("tolerance", tolerance), ("budget", budget)):
        is_number = not isinstance(value, bool) and isinstance(value, Real) and float(value) >= 0
        if not is_number and not (name == "tolerance" and value is None):
            raise ArgumentTypeError(f"{name} must be a number of at least 0, got {value!r}")
    if checks is not None and not isinstance(checks, Mapping):
        raise ArgumentTypeError(
            f"checks must be inputs by name, such as {{'my photos': batch}}, got {type(checks).__name__}"
        )
    unnamed = [name for name in cast("Mapping[Any, Any]", checks or {}) if not isinstance(name, str)]
    if unnamed:
        raise ArgumentTypeError(
            f"checks must be inputs by name, such as {{'my photos': batch}}, got {unnamed[0]!r:.80}"
        )
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        raise ArgumentTypeError(f"plan must be a Plan or the path of one that was saved, got {plan!r:.80}")


@contextmanager
def _buffers_kept(module: nn.Module) -> Generator[None]:
    """Give the buffers of a module back as they were: a model may write them in eval mode too."""
    holders = [each for each in module.modules() if each._buffers]
    kept = [
        (holder, name, buffer, SavedTensor(buffer))
        for holder in holders
        for name, buffer in holder._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for holder, name, buffer, saved in kept:
            holder._buffers[name] = buffer
            saved.restore()


def _checked(extractor: nn.Module) -> Extractor:
    if isinstance(extractor, OptimizedExtractor):
        raise ArgumentTypeError("this extractor is optimized already; give the one that it was made of")
    if not isinstance(extractor, (DualGraphModule, AdaptiveExtractor)):
        raise ArgumentTypeError(
            f"extractor must be what featx.create_feature_extractor returns, got {type(extractor).__name__}"
        )
    if extractor.training:
        raise OptimizationError(
            "the extractor is in train mode, and an optimized one computes what it does in eval mode; call eval() first"
        )
    trains = next((name for name, module in extractor.named_modules() if module.training), None)
    if trains is not None:
        raise OptimizationError(
            f"'{trains}' is in train mode, and an optimized extractor computes in eval mode; call eval() on it"
        )
    return extractor


def _example(extractor: Extractor, inputs: Any) -> Example:
    """Return inputs with values, on the device of the extractor."""
    first = extractor.extractors[0] if isinstance(extractor, AdaptiveExtractor) else extractor
    example = cast("Example | None", first.meta.get("example")) if inputs is None else as_example(inputs)
    if example is None:
        raise ArgumentTypeError("the extractor was made without an example; give example_inputs=tensor")
    device = device_of(extractor)
    if inputs is not None and any(leaf.is_meta for leaf in tensors_in((example.args, example.kwargs))):
        raise ArgumentTypeError("example_inputs are on the meta device, where nothing takes time; give real tensors")
    found = example.with_values(device)
    if any(leaf.numel() == 0 for leaf in tensors_in((found.args, found.kwargs))):
        raise ArgumentTypeError("example_inputs have a tensor without elements, which takes no time; give some samples")
    return found
