"""The libraries of peers_libraries.py that run the model itself: by hooks or by wrapped functions."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from peers_libraries import Answer, Extractor, Library, No, probabilities_of
from torch import Tensor, nn


class Torchextractor(Library):
    """torchextractor: an Extractor wraps the model and registers hooks."""

    name = package = "torchextractor"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Wrap the model."""
        import torchextractor

        return Extractor(torchextractor.Extractor(model, list(names)), _maps_of(names))

    def overwritten(self, model: nn.Module, x: Tensor) -> Answer:
        """Give a function that copies."""
        import torchextractor

        def copy(module: nn.Module, inputs: Any, output: Tensor, name: str, maps: dict[str, Any]) -> None:
            maps[name] = output.clone()

        found = torchextractor.Extractor(model, ["bn1", "layer1"], capture_fn=copy)(x)[1]
        return Answer(found["bn1"], "by hand: clone() in capture_fn; without it overwritten")

    def select(self, model: nn.Module, x: Tensor) -> Answer:
        """Give a function that filters."""
        import torchextractor

        def wanted(module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.BatchNorm2d) or fnmatch.fnmatch(name, "layer[34]")

        found = torchextractor.Extractor(model, module_filter_fn=wanted)(x)[1]
        return Answer(len(found), "yes: a function that filters")

    def scriptable(self, model: nn.Module, name: str, example: Any) -> nn.Module:
        """Write a forward with the inputs of the model, as the README says."""
        import torchextractor

        class Fixed(torchextractor.Extractor):
            def forward(self, x: Tensor) -> Any:
                return self.model(x), self.feature_maps

        return Fixed(model, [name])

    def pooled(self, model: nn.Module, x: Tensor) -> Answer:
        """Give a function that captures."""
        import torchextractor

        def capture(module: nn.Module, inputs: Any, output: Tensor, name: str, maps: dict[str, Any]) -> None:
            maps[name] = output.mean((2, 3)) if name == "layer4" else output.permute(0, 2, 3, 1)

        found = torchextractor.Extractor(model, ["layer3", "layer4"], capture_fn=capture)(x)[1]
        return Answer([found["layer4"], found["layer3"]], "by hand: in capture_fn")

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """List the names of modules."""
        import torchextractor

        return {"name": "layer2" if "layer2" in torchextractor.list_module_names(model) else None}


def _maps_of(names: Sequence[str]) -> Any:
    def run(thing: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        found = thing(*args, **kwargs)[1]
        return [found[name] for name in names]

    return run


class Surgeon(Library):
    """surgeon-pytorch: Inspect registers hooks for each call."""

    name = "surgeon"
    package = "surgeon-pytorch"

    def __init__(self) -> None:
        self.other = Extract()

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Make an Inspect."""
        import surgeon_pytorch

        thing = surgeon_pytorch.Inspect(model, layer=list(names), keep_output=False)
        return Extractor(thing, lambda thing, *args, **kwargs: list(thing(*args, **kwargs)))

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """List the names of modules."""
        import surgeon_pytorch

        return {"name": "layer2" if "layer2" in surgeon_pytorch.get_layers(model) else None}


class Extract(Library):
    """The other interface of surgeon-pytorch."""

    name = "Extract"
    package = "surgeon-pytorch"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Make an Extract; what a module without a node gives is its last node."""
        import surgeon_pytorch

        nodes = surgeon_pytorch.get_nodes(model)
        inside = {name: [node for node in nodes if node == name or node.startswith(f"{name}.")] for name in names}
        last = {name: found[-1] if found else name for name, found in inside.items()}
        thing = surgeon_pytorch.Extract(model, node_out={node: name for name, node in last.items()})

        def run(thing: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
            values = thing(*args, **kwargs)
            return [values[name] for name in names]

        return Extractor(thing, run)

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Give `node_in`; both calls of the ReLU have this name."""
        import surgeon_pytorch

        return Answer(surgeon_pytorch.Extract(model, node_in="layer2.1.relu", node_out="fc")(value))


class Torchlens(Library):
    """torchlens: a trace of a call, with all values in it; functions, and no extractor."""

    name = package = "torchlens"
    is_function = True

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Trace at each call."""
        import torchlens

        def run(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
            log = torchlens.trace(model, args, kwargs or None)
            return [_value(log, name) for name in names]

        return Extractor(model, run)

    def cut(self, model: nn.Module, name: str, example: Tensor) -> Answer:
        """Stop there."""
        import torchlens

        def run(model: nn.Module, x: Tensor) -> list[Tensor]:
            site = torchlens.module(name)
            return [_value(torchlens.trace(model, x, save=site, halt=site), name)]

        return Answer(Extractor(model, run), "yes: halt=")

    def operation(self, model: nn.Module, x: Tensor) -> Answer:
        """Ask for the first addition."""
        import torchlens

        log = torchlens.trace(model, x)
        label = next(label for label in log.layer_labels if label.startswith("iadd"))
        return Answer(log[label].out, "yes: by a label, such as iadd_1_14")

    def gradient(self, model: nn.Module, x: Tensor) -> Answer:
        """Save gradients."""
        import torchlens

        log = torchlens.trace(model, x, capture=torchlens.options.CaptureOptions(save_grads=True))
        log.log_backward(_value(log, "fc")[0, 0])
        return Answer(log["layer2"].grad, "yes: log_backward")

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Intervene."""
        import torchlens

        def edited(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return value * factor

        log = torchlens.trace(model, x, intervene=torchlens.when(torchlens.module("layer1.0.conv2"), edited))
        return Answer(_value(log, "fc"))

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Replay what follows from a replaced value."""
        import torchlens

        options = torchlens.options.CaptureOptions(intervention_ready=True)
        fork = torchlens.trace(model, x, capture=options).fork()
        fork.set(torchlens.module("layer2"), value)
        fork.push()
        return Answer(_value(fork, "fc"), "yes: replay of a traced call")

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """Read the trace."""
        import torchlens

        log = torchlens.trace(model, x)
        module = log.modules["layer2"]
        return {
            "shape": tuple(log["layer2"].out.shape),
            "stride": log["layer2"].receptive_field.jump[0],
            "parameters": module.num_params,
            "FLOPs": int(module.total_flops_forward),
        }

    def select(self, model: nn.Module, x: Tensor) -> Answer:
        """Ask for a class, and for paths by a pattern."""
        import torchlens

        log = torchlens.trace(model, x)
        norms = [module for module in log.modules if module.class_name == "BatchNorm2d"]
        stages = [module for module in log.modules if fnmatch.fnmatch(module.address, "layer[34]")]
        return Answer(len(norms) + len(stages), "by hand: a filter over the modules of the trace")


def _value(log: Any, name: str) -> Tensor:
    import torchlens

    try:
        return log[name].out
    except torchlens.AmbiguousOpLookupError:  # the path of the last module names the output of the model too
        return log[log.output_layers[0]].out


class Nnsight(Library):
    """nnsight: Python that runs inside of the model's forward, in a with statement."""

    name = package = "nnsight"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Wrap the model."""
        import nnsight

        def run(net: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
            with net.trace(*args, **kwargs):
                found = nnsight.save([])
                for name in names:
                    found.append(net.get(name).output)
            return list(found)

        return Extractor(nnsight.NNsight(model), run)

    def cut(self, model: nn.Module, name: str, example: Tensor) -> Answer:
        """Stop."""
        import nnsight

        def run(net: Any, x: Tensor) -> list[Tensor]:
            with net.trace(x) as tracer:
                found = net.get(name).output.save()
                tracer.stop()
            return [found]

        return Answer(Extractor(nnsight.NNsight(model), run), "yes: tracer.stop()")

    def overwritten(self, model: nn.Module, x: Tensor) -> Answer:
        """Copy the value."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            kept = net.bn1.output.clone().save()
        return Answer(kept, "by hand: clone(); without it overwritten")

    def operation(self, model: nn.Module, x: Tensor) -> Answer:
        """Ask for what the second call of the ReLU gets: `out += identity` has no name in `source`."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            found = net.layer1[0].source.self_relu_1.inputs[0][0].clone().save()
        return Answer(found, "yes: .source; an augmented assignment only as the input of the next call")

    def probabilities(self, model: Any, x: Tensor) -> Answer:
        """Compute them from the inputs of the fused call."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            inputs = net.blocks[1].attn.source.F_scaled_dot_product_attention_0.inputs.save()
        return Answer(probabilities_of(*inputs[0][:2]), "by hand: from the inputs of the fused call")

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Assign."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            net.layer1[0].conv2.output = net.layer1[0].conv2.output * factor
            logits = net.output.save()
        return Answer(logits)

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Skip the modules ahead, one by one."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            for name in ("conv1", "bn1", "relu", "maxpool", "layer1"):
                net.get(name).skip(x)
            net.layer2.skip(value)
            logits = net.output.save()
        return Answer(logits, "by hand: skip() of each module ahead")

    def select(self, model: nn.Module, x: Tensor) -> Answer:
        """Loop over modules, each stage after what is inside of it: values come in the order of the run."""
        names = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
        for stage in ("layer3", "layer4"):
            names.insert(max(place for place, name in enumerate(names) if name.startswith(stage)) + 1, stage)
        return Answer(len(self.extract(model, names, x)(x)), "by hand: in the order of the run")

    def pooled(self, model: nn.Module, x: Tensor) -> Answer:
        """Write it into the block."""
        import nnsight

        net = nnsight.NNsight(model)
        with net.trace(x):
            layer3 = net.layer3.output.permute(0, 2, 3, 1).save()
            layer4 = net.layer4.output.mean((2, 3)).save()
        return Answer([layer4, layer3], "by hand: Python in the block")


class Captum(Library):
    """captum: LayerActivation and its relatives."""

    name = package = "captum"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Make a LayerActivation of modules; inputs by keyword go through a function."""
        from captum.attr import LayerActivation

        layers = [model.get_submodule(name) for name in names]
        if isinstance(example, dict):
            keys = list(example)
            thing = LayerActivation(lambda *args: model(**dict(zip(keys, args, strict=True))), layers)
            return Extractor(thing, lambda thing, **kwargs: thing.attribute(tuple(kwargs.values())))
        return Extractor(LayerActivation(model, layers), lambda thing, *args: thing.attribute(args))

    def gradient(self, model: nn.Module, x: Tensor) -> Answer:
        """Take the product that captum has, and divide it."""
        from captum.attr import LayerActivation, LayerGradientXActivation

        value = LayerActivation(model, model.layer2).attribute(x)
        product = LayerGradientXActivation(model, model.layer2).attribute(x, target=0)
        return Answer((value, product), "partly: LayerGradientXActivation gives their product")

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Try a hook: the value is edited, without gradients."""
        answer = super().edit(model, x, factor)
        if not answer.value.requires_grad:
            raise No("no gradients")
        return answer


class Torchinfo(Library):
    """torchinfo: a summary of a call."""

    name = package = "torchinfo"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Look for values in the summary."""
        import torchinfo

        found = torchinfo.summary(model, input_data=example, verbose=0)
        assert not any(
            isinstance(value, torch.Tensor) for layer in found.summary_list for value in vars(layer).values()
        )
        raise No

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """Read the summary."""
        import torchinfo

        found = torchinfo.summary(model, input_data=x, verbose=0, depth=5)
        start = next(place for place, layer in enumerate(found.summary_list) if layer.var_name == "layer2")
        stop = next(place for place, layer in enumerate(found.summary_list) if layer.var_name == "layer3")
        row, inside = found.summary_list[start], found.summary_list[start:stop]
        macs = sum(layer.macs for layer in inside if layer.class_name == "Conv2d")
        return {"shape": tuple(row.output_size), "parameters": row.num_params, "multiply-adds": macs}
