"""Backbones: the maps of a model at chosen strides, or after chosen blocks, for heads that need nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.features.building.build import Options, build
from featx.features.building.feature_tracer import check_model
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracingOptions
from featx.features.describing.info import FeatureInfo, FeatureInfos
from featx.features.describing.node_rows import traced_rows
from featx.features.describing.stages import Stage, Stages, stages_of
from featx.features.dual import DualGraphModule
from featx.features.freezing import BatchNorm, freeze_norms, freeze_parameters, keep_frozen_norms, unfreeze
from featx.features.necks import BackboneWithNeck
from featx.features.requests.edits import Edit
from featx.features.requests.feature import Feature
from featx.features.requests.request import Request
from featx.features.requests.select import select
from featx.ir.ancestors import with_ancestors
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.libraries import network_of_detector
from featx.tracing.example.tracer import CheckSizes

Layout = Literal["NCHW", "NHWC", "NLC"]
_DEFAULT_BLOCKS = 4


class Backbone(DualGraphModule):
    """An extractor of maps, with what heads ask of a backbone: `channels`, `strides`, `out_channels` and freezing.

    It is made by `create_backbone`.
    """

    __jit_unused_properties__: ClassVar[list[str]] = [*DualGraphModule.__jit_unused_properties__, "out_channels"]

    @property
    def out_channels(self) -> Any:
        """The number of channels where it is the same for all maps, as torchvision's detectors ask; else a list."""
        channels = self.feature_info.channels()
        return channels[0] if len(set(channels)) == 1 else channels

    def freeze(self, until: str | int | None = None) -> Backbone:
        """Train no more what a map depends on, by default everything, and return this backbone.

        The parameters get `requires_grad=False`; they are those of the model, with which the backbone shares them.
        Batch norm stays in eval mode, also after `train()` and `requires_grad_(True)`, until `unfreeze`. O(nodes).

        Args:
            until: a key of the result, a stride, or the name of a node of the model such as `"layer2"`.

        Raises:
            RequestError: the backbone has no such map, or a request or an edit looks into a batch norm before it.
            NodeNameError: the backbone has no such node.
            ArgumentTypeError: `until` is something else.
        """
        targets = self._targets_until(until)
        self._check_norms(targets)
        freeze_parameters(self, targets)
        around = tuple(f"{path}." for path in targets)
        freeze_norms(self, [name for name, _ in self.named_modules() if f"{name}.".startswith(around)])
        return self

    def unfreeze(self) -> Backbone:
        """Train again what this backbone has frozen, and return it: `backbone.unfreeze().freeze(until=8)`.

        Batch norm returns to the mode that it would be in. What was frozen before `freeze`, `freeze_batch_norm` and
        `frozen_batch_norm` stays so; `requires_grad_(True)` trains that too.
        """
        unfreeze(self)
        return self

    def freeze_batch_norm(self) -> Backbone:
        """Let all batch norms stay in eval mode until `unfreeze`, train their parameters no more, and return this.

        They normalize by their running statistics, which of a network that was never trained are 0 and 1.

        Raises:
            RequestError: a request or an edit looks into a batch norm, whose statistics the graph writes then.
        """
        self._check_norms(self.meta.get("opened_norms", ()))
        freeze_norms(self, [name for name, _ in self.named_modules()])
        return self

    def with_neck(self, neck: nn.Module) -> BackboneWithNeck:
        """Return this backbone followed by a module that takes its result, such as torchvision's feature pyramid.

        The neck runs once, on zeros of the shapes of the maps, so that the number of its channels is known.

        Raises:
            ArgumentTypeError: `neck` is no module.
            RequestError: it does not take the maps, or returns something else than maps.
        """
        return BackboneWithNeck(self, neck)

    def train(self, mode: bool = True) -> Backbone:
        """Switch to the train graph or the eval graph, and the submodules to that mode, but for frozen batch norms."""
        super().train(mode)
        keep_frozen_norms(self)
        return self

    def _check_norms(self, targets: Iterable[str]) -> None:
        """Raise where what is frozen belongs to a batch norm of which only the parts are called."""
        opened: list[str] = self.meta.get("opened_norms", [])
        inside = next((norm for path in targets for norm in opened if f"{path}.".startswith(f"{norm}.")), None)
        if inside is not None:
            raise RequestError(
                f"the batch norm '{inside}' cannot stay in eval mode, because something inside it is asked for or "
                f"edited; ask for '{inside}' itself"
            )

    def _targets_until(self, until: str | int | None) -> list[str]:
        found: dict[str, None] = {}
        for graph in {id(graph): graph for graph in (self.graph, self.train_graph, self.eval_graph)}.values():
            returned = graph.output_node().args[0]
            keys = [info.key for info in self.feature_info]
            nodes: dict[str, Node] = returned if isinstance(returned, dict) else dict(zip(keys, returned, strict=True))
            if until is None:
                last = list(nodes.values())
            elif isinstance(until, bool) or not isinstance(cast(object, until), (str, int)):
                raise ArgumentTypeError(
                    f"until must be a key of the result, a stride or the name of a node, got {until!r:.80}"
                )
            elif until in nodes:
                last = [nodes[str(until)]]
            elif isinstance(until, int):
                matching = [info.key for info in self.feature_info if info.stride == until]
                if not matching:
                    raise RequestError(f"no map has stride {until}; the strides are {self.feature_info.reduction()}")
                last = [nodes[matching[-1]]]
            else:
                _check_not_inside(until, graph)
                last = list(select(graph, {until: until}, self._get_name()).values())
            needed = with_ancestors(last)
            found.update((str(node.target), None) for node in needed if node.op in ("call_module", "get_attr"))
        return list(found)


def _check_not_inside(name: str, graph: Graph) -> None:
    """Raise where the node of this name would lie inside a module that the graph calls as a whole."""
    around = next((each for each in parents_of(name) if any(graph.find_nodes(op="call_module", target=each))), None)
    if around is not None:
        raise RequestError(
            f"'{name}' lies inside '{around}', which this backbone calls as a whole; freeze until '{around}' or what "
            f"is ahead of it, or give requires_grad=False to the parameters of '{name}' yourself"
        )


def create_backbone(
    model: nn.Module,
    strides: int | Sequence[int] | Mapping[int, str] | None = None,
    blocks: int | Sequence[int] | Mapping[int, str] | None = None,
    *,
    layout: Layout = "NCHW",
    prefix_tokens: bool = False,
    as_list: bool = False,
    frozen_batch_norm: bool = False,
    edits: Mapping[Any, Edit] | None = None,
    example_inputs: Any = None,
    tracer_kwargs: Mapping[str, Any] | None = None,
    concrete_args: dict[str, Any] | None = None,
    check_sizes: CheckSizes = "full",
    adaptive: bool = False,
) -> Backbone:
    """Return the maps of a model at some strides, or after some of its blocks, as a module without its head.

    The maps are found: those of the stages that the model declares (timm, transformers' backbones), or else, for each
    stride, the last value of it that the model computes at the outermost level. A vision transformer has blocks that
    all have the same stride; its tokens become maps. Values are those of the model, bit for bit, and weights are
    shared with it. It costs two traces, see `create_feature_extractor`.

    Args:
        model: a model of images.
        strides: the stride of each map against the image; 1 is the image itself where the model has no such map. In a
            dict their values are the keys of the result; else these are "0", "1" and so on, as torchvision's detectors
            have them. By default all strides of 2 and more.
        blocks: numbers of blocks, of those from which all maps have the same stride, or of the stages that the model
            declares, as timm's `out_indices`; negative ones count from the end. One number means so many of them,
            evenly spread, the last one among them. By default 4, where there are blocks. In a dict, with keys.
        layout: "NCHW" or "NHWC" for maps, "NLC" for the tokens of patches alone.
        prefix_tokens: return class and register tokens too, under the key of their map with `_prefix` after it.
        as_list: return a list in place of a dict.
        frozen_batch_norm: keep batch norm in eval mode, and train none of its weights, as `Backbone.freeze_batch_norm`
            does. These are the model's own.
        edits: as for `create_feature_extractor`.
        example_inputs: as for `create_feature_extractor`.
        tracer_kwargs: as for `create_feature_extractor`.
        concrete_args: as for `create_feature_extractor`.
        check_sizes: as for `create_feature_extractor`.
        adaptive: trace the model again for images of a size for which no graph so far holds, which takes as long as
            making the backbone, in place of raising `SpecializationError`. The backbone keeps the model for that.

    Raises:
        RequestError: the model has no map of a stride, no such block, or no maps at all; or only one is found, which it
            does not declare, and neither `strides` nor `blocks` asks for it.
        ArgumentTypeError: `model` is not a module, or an argument has the wrong type.
        TraceError: the model cannot be traced; the message says where and what to do.
    """
    check_model(model)
    _check_choice(strides, blocks, layout)
    network = network_of_detector(model)
    if network is not None:
        raise RequestError(
            f"{type(model).__name__} resizes its images, so that its maps have no stride against them; make the "
            f"backbone of its network: create_backbone(model.{network})"
        )
    how = TracingOptions(
        tracer_kwargs=tracer_kwargs, concrete_args=concrete_args, example_inputs=example_inputs, opens_stacks=True
    )
    tracing = ModelTracing(model, how)
    with tracing.in_mode(False):
        rows = traced_rows(tracing)
    stages = stages_of(model, rows, tracing.inputs.image)
    image = None if tracing.inputs.image is None else tracing.inputs.image.name
    if not stages.all:
        raise _no_maps(type(model).__name__, image, tracing.inputs.missing)
    chosen = _chosen(stages, image, strides, blocks, type(model).__name__)
    features: dict[str, tuple[Feature, ...]] = {}
    for key, stage in chosen.items():
        features[key] = (_feature(key, stage, layout, apart=prefix_tokens and stage.name != image),)
    names = {stage.name: key for key, stage in chosen.items()}
    request = Request(names, features, {}, {})
    options = Options(
        tracer_kwargs=tracer_kwargs,
        concrete_args=concrete_args,
        check_sizes=check_sizes,
        suppress_diff_warning=True,
        edits=edits,
        keeps_cases=adaptive,
        kind=Backbone,
        is_list=as_list,
    )
    backbone = cast("Backbone", build(model, {True: request, False: request}, options, tracing.inputs.used))
    for mode, infos in backbone.meta["feature_info"].items():
        backbone.meta["feature_info"][mode] = FeatureInfos(
            [_declared(info, chosen.get(info.key), layout, is_edited=edits is not None) for info in infos]
        )
    backbone._show_infos()
    parts = dict(backbone.named_modules())
    norms = [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
    backbone.meta["opened_norms"] = [name for name in norms if name in parts and not isinstance(parts[name], BatchNorm)]
    return backbone.freeze_batch_norm() if frozen_batch_norm else backbone


def _feature(key: str, stage: Stage, layout: Layout, *, apart: bool) -> Feature:
    if stage.to_map is not None:
        return Feature(key, apply=InLayout(stage.to_map, layout))
    return Feature(
        key, layout=layout, of_layout=stage.layout, prefix_tokens="apart" if apart else "drop",
        of_stride=stage.stride if stage.is_declared else None,
    )  # fmt: skip


def _declared(info: FeatureInfo, stage: Stage | None, layout: Layout, *, is_edited: bool) -> FeatureInfo:
    if stage is None:
        return info
    if stage.to_map is not None:
        info = replace(info, layout=layout, channels=stage.channels)
    is_measured = is_edited and info.stride is not None  # an edit may have scaled the map
    return info if is_measured else replace(info, stride=stage.stride)


class InLayout(nn.Module):
    """Makes a map of tokens by `to_map`, which returns NHWC, and brings it into a layout."""

    def __init__(self, to_map: Callable[[torch.Tensor], torch.Tensor], layout: Layout) -> None:
        super().__init__()
        self._to_map = to_map
        self._layout = layout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the map."""
        result = self._to_map(tokens)
        if self._layout == "NLC":
            return result.flatten(1, 2)
        return result.permute(0, 3, 1, 2) if self._layout == "NCHW" else result


def _check_choice(strides: Any, blocks: Any, layout: object) -> None:
    """Raise where these arguments can mean nothing for any model."""
    if strides is not None and blocks is not None:
        raise RequestError("give strides or blocks, not both")
    if strides is not None:
        _strides_with_keys(strides)
    if blocks is not None and type(blocks) is not int:
        _with_keys(blocks, "blocks")
    if layout not in get_args(Layout):
        raise ArgumentTypeError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r:.80}")


def _no_maps(model: str, image: str | None, missing: str | None) -> RequestError:
    """Return the error for a model of which no value is known to be a map."""
    if missing is not None:
        known = f"shapes are not known, as {missing}. Give example_inputs with which it runs. "
    elif image is None:
        known = "no image is known among its inputs; give example_inputs with one. "
    else:
        known = f"no value has one stride against '{image}', as maps of videos and volumes have not. "
    return RequestError(
        f"{model} is not known to have maps: {known}featx.nodes(model) shows all values, and create_feature_extractor "
        "takes their names"
    )


def _chosen(stages: Stages, image: str | None, strides: Any, blocks: Any, model: str) -> dict[str, Stage]:
    """Return the chosen stages by the key of the result."""
    if strides is None and blocks is None:
        if not stages.are_blocks:
            maps = [each for each in stages.all if each.stride > 1]
            if not maps:
                raise RequestError(f"all maps of {model} have the size of the image; give strides=1 for the last one")
            if len(maps) == 1 and not stages.are_declared:
                raise RequestError(
                    f"{model} has one map that is known, '{maps[0].name}' of stride {maps[0].stride}, and no blocks; "
                    f"give strides={maps[0].stride} if that is meant. featx.nodes(model) shows all values, and "
                    "create_feature_extractor takes their names"
                )
            return {str(place): stage for place, stage in enumerate(maps)}
        blocks = min(_DEFAULT_BLOCKS, len(stages.all))
    if strides is not None:
        return _at_strides(stages, image, _strides_with_keys(strides), model)
    count = len(stages.all)
    if isinstance(blocks, int):
        if not 1 <= blocks <= count:
            raise RequestError(f"{model} has {count} blocks, so {blocks} of them cannot be chosen")
        blocks = [round((place + 1) * count / blocks) - 1 for place in range(blocks)]
    found: dict[str, Stage] = {}
    for number, key in _with_keys(blocks, "blocks").items():
        if not -count <= number < count:
            raise RequestError(
                f"{model} has {count} blocks; there is none of number {number}. Blocks are those that return a map, or "
                "tokens of which none stand after the patches of the image; create_feature_extractor returns any value"
            )
        if stages.all[number] in found.values():
            raise RequestError(f"blocks has number {number}, which is the same as another one")
        found[key] = stages.all[number]
    return found


def _at_strides(stages: Stages, image: str | None, strides: Mapping[int, str], model: str) -> dict[str, Stage]:
    by_stride = {stage.stride: stage for stage in stages.all}
    if 1 not in by_stride and image is not None:
        by_stride[1] = Stage(image, 1, "NCHW")
    missing = [stride for stride in strides if stride not in by_stride]
    if missing:
        known = sorted({stage.stride for stage in stages.all})
        hint = f" Its {len(stages.all)} blocks can be had by blocks=(...)." if stages.are_blocks else ""
        raise RequestError(f"{model} has no map of stride {missing[0]}; it has {', '.join(map(str, known))}.{hint}")
    return {key: by_stride[stride] for stride, key in strides.items()}


def _strides_with_keys(strides: Any) -> dict[int, str]:
    return _with_keys([strides] if isinstance(strides, int) else strides, "strides")


def _with_keys(numbers: Any, argument: str) -> dict[int, str]:
    if isinstance(numbers, Mapping):
        keys = dict(cast("Mapping[Any, Any]", numbers))
    elif isinstance(numbers, Sequence) and not isinstance(numbers, str):
        keys = {number: str(place) for place, number in enumerate(cast("Sequence[Any]", numbers))}
        if len(keys) < len(numbers):
            raise RequestError(f"{argument} has a number twice: {list(cast('Sequence[Any]', numbers))}")
    else:
        raise ArgumentTypeError(f"{argument} must be numbers, or a dict from numbers to keys, got {numbers!r:.80}")
    if not keys:
        raise RequestError(f"{argument} is empty")
    if any(type(number) is not int for number in keys) or any(not isinstance(key, str) for key in keys.values()):
        raise ArgumentTypeError(f"{argument} must be numbers, or a dict from numbers to keys, got {numbers!r:.80}")
    if len(set(keys.values())) < len(keys):
        raise RequestError(f"{argument} gives one key to two maps")
    return keys
