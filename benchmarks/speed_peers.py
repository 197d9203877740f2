"""The ways of benchmarks/speed.py to get one feature: each builds a function that returns it for a batch."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from speed_cases import Case
from torch import Tensor

import featx

Run = Callable[[], Any]
Build = Callable[[Case, Tensor, float], Run]


class NotApplicableError(Exception):
    """A way is not for such a model, or not for such a device."""


def _by_hand(case: Case, x: Tensor, budget: float) -> Run:
    return lambda: case.cut_by_hand(x)


def _extractor(case: Case, x: Tensor) -> Any:
    inputs: Any = {"input_ids": x} if case.is_text else x
    return featx.create_feature_extractor(case.model, {case.node: "f"}, example_inputs=inputs).eval()


def _call(module: Any, case: Case, x: Tensor) -> Any:
    return module(input_ids=x) if case.is_text else module(x)


def _featx(case: Case, x: Tensor, budget: float) -> Run:
    extractor = _extractor(case, x)
    return lambda: _call(extractor, case, x)["f"]


def _optimized(case: Case, x: Tensor, budget: float, tolerance: float = 1e-2) -> Run:
    if tolerance < 1e-4 and case.device.type == "cuda":
        raise NotApplicableError("convolutions in TF32 round more")
    inputs: Any = {"input_ids": x} if case.is_text else x
    extractor = _extractor(case, x)
    optimized = featx.optimize(extractor, inputs, budget=budget, tolerance=tolerance, progress=False)
    print(optimized.plan, file=sys.__stderr__, flush=True)  # what else is printed meanwhile is not shown
    return lambda: _call(optimized, case, x)["f"]


def _compiled_by_hand(case: Case, x: Tensor, budget: float, dtype: torch.dtype | None = None) -> Run:
    """CUDA graphs by torch.compile, in a dtype: what a person does who knows torch, without a look at the error."""
    if case.device.type != "cuda":
        raise NotApplicableError("for a GPU")
    same = replace(case, model=copy.deepcopy(case.model).to(dtype))
    given = x.to(dtype) if x.is_floating_point() else x
    compiled = torch.compile(same.cut_by_hand, mode="reduce-overhead")
    return lambda: compiled(given).float()


def _hook(case: Case, x: Tensor, budget: float) -> Run:
    found: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        found[:] = [output[0] if isinstance(output, tuple) else output]

    module = case.model.get_submodule(case.node)

    def run() -> Tensor:
        handle = module.register_forward_hook(keep)
        try:
            _call(case.model, case, x)
        finally:
            handle.remove()
        return found[0]

    return run


def _torchvision(case: Case, x: Tensor, budget: float) -> Run:
    extractor = torchvision.models.feature_extraction.create_feature_extractor(case.model, {case.node: "f"})
    return lambda: _call(extractor, case, x)["f"]


def _timm(case: Case, x: Tensor, budget: float) -> Run:
    if case.is_text:
        raise NotApplicableError("no model of timm")
    model: Any = case.model
    if hasattr(model, "blocks"):
        options = {"indices": [case.index], "intermediates_only": True, "output_fmt": "NLC", "stop_early": True}
        return lambda: torch.cat(model.forward_intermediates(x, return_prefix_tokens=True, **options)[0][::-1], 1)
    features = timm.create_model(case.architecture, features_only=True, out_indices=(case.index,)).eval()
    features.to(case.device)
    weights = {key.replace("stages.", "stages_").replace("stem.", "stem_"): v for key, v in model.state_dict().items()}
    own = features.state_dict()
    source = model.state_dict() if set(own) <= set(model.state_dict()) else weights
    features.load_state_dict({key: source[key] for key in own})
    return lambda: features(x)[0]


def _transformers(case: Case, x: Tensor, budget: float) -> Run:
    if not case.is_text:
        raise NotApplicableError("no model of transformers")
    return lambda: case.model(input_ids=x, output_hidden_states=True).hidden_states[case.index]


def _captum(case: Case, x: Tensor, budget: float) -> Run:
    from captum.attr import LayerActivation

    attribution: Any = LayerActivation(case.model, case.model.get_submodule(case.node))

    def run() -> Any:
        found = attribution.attribute(x)
        return found[0] if isinstance(found, tuple) else found

    return run


def _torchlens(case: Case, x: Tensor, budget: float) -> Run:
    import torchlens
    from torchlens.backends.torch.wrappers import unwrap_torch

    site = torchlens.module(case.node)
    args, kwargs = ((), {"input_ids": x}) if case.is_text else (x, None)

    def run() -> Any:
        log: Any = torchlens.trace(case.model, args, kwargs, save=site, halt=site)
        unwrap_torch()  # or all calls of torch in this process are slower
        try:
            found = log[case.node].out
        except torchlens.AmbiguousOpLookupError:  # where the trace stops, the path names its output too
            found = log[log.output_layers[0]].out
        return found[0] if isinstance(found, tuple) else found

    return run


def _nnsight(case: Case, x: Tensor, budget: float) -> Run:
    import nnsight

    net: Any = nnsight.NNsight(case.model)
    kwargs = {"input_ids": x} if case.is_text else {}
    args = () if case.is_text else (x,)

    def run() -> Any:
        with net.trace(*args, **kwargs) as tracer:
            found = net.get(case.node).output.save()
            tracer.stop()
        return found[0] if isinstance(found, tuple) else found

    return run


def _exported(case: Case, x: Tensor) -> Any:
    extractor = _extractor(case, x)
    arguments: tuple[Any, ...] = () if case.is_text else (x,)
    return torch.export.export(extractor, arguments, {"input_ids": x} if case.is_text else {})


def _unflattened(case: Case, x: Tensor, budget: float) -> Run:
    program = torch.export.export(case.model, () if case.is_text else (x,), {"input_ids": x} if case.is_text else {})
    module = torch.export.unflatten(program)
    found: list[Any] = []
    module.get_submodule(case.node).register_forward_hook(
        lambda m, args, output: found.__setitem__(slice(None), [output])
    )

    def run() -> Any:
        _call(module, case, x)
        return found[0]

    return run


def _onnx_file(case: Case, x: Tensor, folder: str) -> str:
    program = torch.onnx.export(_exported(case, x), dynamo=True, verbose=False)
    path = str(Path(folder) / "model.onnx")
    assert program is not None
    program.save(path)
    return path


def _onnxruntime(case: Case, x: Tensor, budget: float) -> Run:
    import onnxruntime

    _refuse_gpu(case)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime.InferenceSession(_onnx_file(case, x, folder), options, providers=["CPUExecutionProvider"])
    name, array = session.get_inputs()[0].name, x.numpy()
    return lambda: session.run(None, {name: array})[0]


def _refuse_gpu(case: Case) -> None:
    if case.device.type != "cpu":
        raise ValueError("the build that was installed is for the CPU")


def _openvino(case: Case, x: Tensor, budget: float) -> Run:
    import openvino

    _refuse_gpu(case)

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    with tempfile.TemporaryDirectory() as folder:
        compiled = core.compile_model(core.read_model(_onnx_file(case, x, folder)), "CPU", settings)
    array = x.numpy()
    return lambda: compiled(array)[0]


PEERS: dict[str, Build] = {
    "cut by hand": _by_hand,
    "featx": _featx,
    "featx.optimize": _optimized,
    "featx.optimize, tolerance 1e-5": partial(_optimized, tolerance=1e-5),
    "torch.compile of the cut, CUDA graphs": _compiled_by_hand,
    "torch.compile of the cut, CUDA graphs, bfloat16": partial(_compiled_by_hand, dtype=torch.bfloat16),
    "hook, whole model": _hook,
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers, output_hidden_states": _transformers,
    "captum, LayerActivation": _captum,
    "torchlens, halt=": _torchlens,
    "torch.export, unflattened, hook": _unflattened,
    "onnxruntime, of featx's extractor": _onnxruntime,
    "OpenVINO, of featx's extractor": _openvino,
    "nnsight, tracer.stop()": _nnsight,  # the last one: it leaves the model so that no other can trace it
}
