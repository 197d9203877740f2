"""What is tried with each library: one function per row, each with its small model; see peers.py."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers_libraries import Extractor, Library, No
from peers_models import Branch, Dropper, Pause, bert, resnet, vit
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's documentation has it
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


def hooked(model: nn.Module, names: list[str], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return what modules give in a copy of the model, by forward hooks that copy."""
    model, found = copy.deepcopy(model), {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: found.update({name: output.clone()})
        )
    model(*args, **kwargs)
    return [found[name] for name in names]


def equal(found: Any, expected: Any) -> bool:
    """Say whether two lists of tensors are equal bit for bit."""
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check(found: Any, expected: Any, otherwise: str = "other values") -> None:
    """Raise where the values differ."""
    if not equal(found, expected):
        raise No(otherwise)


def outputs(library: Library) -> str:
    """Several outputs of one pass, by module path."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    names = ["layer1.0.conv2", "layer2", "layer3"]
    try:
        check(library.extract(model, names, x)(x), hooked(model, names, x))
    except Exception:
        names = names[1:] if library.has_own_models_only else ["layer1.0.conv2", "layer2.1.bn2", "layer3.1.conv1"]
        check(library.extract(resnet(), names, x)(x), hooked(resnet(), names, x))
        return "partly: stages of its own models" if library.has_own_models_only else "partly: modules without children"
    return "yes"


def operations(library: Library) -> str:
    """An operation: the addition inside of layer1.0."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    identity, bn2 = hooked(model, ["maxpool", "layer1.0.bn2"], x)
    answer = library.operation(model, x)
    check([answer.value], [bn2 + identity])
    return answer.word


def cut(library: Library) -> str:
    """Computes only what is needed: FLOPs for layer2, against those up to layer2."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2)
    needed, everything = flops(stem, x), flops(model, x)
    answer = library.cut(resnet(), "layer2", x)
    check(answer.value(x), hooked(model, ["layer2"], x))
    found = flops(answer.value, x)
    return answer.word if found == needed else f"no: {(found - needed) / (everything - needed):.0%} of the rest runs"


def flops(run: Callable[..., Any], x: Tensor) -> int:
    """Count the FLOPs of a call."""
    with FlopCounterMode(display=False) as counter:
        run(x)
    return counter.get_total_flops()


def overwritten(library: Library) -> str:
    """A value that the model overwrites in place later: bn1, before its ReLU."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    answer = library.overwritten(model, x)
    check([answer.value], hooked(model, ["bn1"], x), "overwritten, no error")
    return answer.word


def gradients(library: Library) -> str:
    """Gradients with respect to a feature: of a logit, with respect to layer2."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    kept: list[Tensor] = []
    plain = copy.deepcopy(model)
    plain.layer2.register_forward_hook(lambda _, inputs, value: kept.append(value))
    expected = torch.autograd.grad(plain(x)[0, 0], kept[0])[0]
    answer = library.gradient(model, x)
    if isinstance(answer.value, tuple):
        value, product = answer.value
        check([product[0]], [(value * expected)[0]])
        return answer.word
    check([answer.value], [expected])
    return answer.word


def transformer(library: Library) -> str:
    """A vision transformer of timm, after block 1."""
    model, x = vit(), torch.rand(2, 3, 32, 32)
    answer = library.block(model, x)
    check([answer.value], hooked(model, ["blocks.1"], x))
    return answer.word


def text(library: Library) -> str:
    """A BERT of transformers, made with a batch without padding, called with a padded one."""
    model, names = bert(), ["encoder.layer.0.intermediate", "encoder.layer.1"]
    full = {"input_ids": torch.randint(1, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    padded = {name: torch.cat([value, torch.zeros_like(value[:, :2])], dim=1) for name, value in full.items()}
    padded = {name: value[[0, 1, 0]] for name, value in padded.items()}
    padded["attention_mask"][1, 4:] = 0
    expected = [hooked(model, names, **batch) for batch in (full, padded)]
    extractor = library.extract(model, names, full)
    for batch, values in zip((full, padded), expected, strict=True):
        check(extractor(**batch), values)
    return "yes"


def branches(library: Library) -> str:
    """A model whose Python decides by values: the other branch."""
    torch.manual_seed(0)
    model, x = Branch(), torch.rand(2, 4)
    one, other = hooked(model, ["last"], x), hooked(model, ["last"], -x)
    extractor, word = library.extract(copy.deepcopy(model), ["last"], x), "yes"
    check(extractor(x), one)
    try:
        found = extractor(-x)
    except Exception:
        answer = library.flexible(model, ["last"], x)
        found, word = answer.value(-x), answer.word
    check(found, other, "silently the wrong branch")
    return word


def modes(library: Library) -> str:
    """Train and eval mode switched after creation: batch norm, and F.dropout."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    _check_modes(library, model, "layer2", x)
    if not library.has_own_models_only:
        torch.manual_seed(0)
        _check_modes(library, Dropper().eval(), "last", torch.rand(2, 16))
    return "yes"


def _check_modes(library: Library, model: nn.Module, name: str, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    extractor = library.extract(model, [name], x)
    for training in (False, True, False):
        (extractor.thing if isinstance(extractor.thing, nn.Module) else model).train(training)
        torch.manual_seed(1)
        found = extractor(x)
        torch.manual_seed(1)
        twin = plain.train(training)
        seen: list[Tensor] = []
        handle = twin.get_submodule(name).register_forward_hook(lambda _, i, value, seen=seen: seen.append(value))
        twin(x)
        handle.remove()
        check(found, seen, f"other values in {'train' if training else 'eval'} mode")


def sizes(library: Library) -> str:
    """Other batch and image sizes: a resnet, and a vision transformer with dynamic_img_size."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    other = torch.rand(3, 3, 96, 80)
    expected, extractor = hooked(model, ["layer3"], other), library.extract(model, ["layer3"], x)
    extractor(x)
    check(extractor(other), expected)
    try:
        model = vit(dynamic_img_size=True)
        other = torch.rand(3, 3, 48, 64)
        expected = hooked(model, ["blocks.1"], other)
        check(library.extract(model, ["blocks.1"], torch.rand(1, 3, 32, 32))(other), expected)
    except Exception as error:
        return f"partly: resnet; vit: {type(error).__name__}"
    return "yes"


class _Fused(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def attention(library: Library) -> str:
    """Attention probabilities while the attention stays fused."""
    model, x = vit(), torch.rand(2, 3, 32, 32)
    unfused = copy.deepcopy(model)
    unfused.blocks[1].attn.fused_attn = False
    expected = hooked(unfused, ["blocks.1.attn.attn_drop"], x)[0]
    answer = library.probabilities(model, x)
    torch.testing.assert_close(answer.value, expected)
    return answer.word


def edits(library: Library) -> str:
    """Edit a value and take gradients through the edit: layer1.0.conv2 times a factor."""
    x = torch.rand(2, 3, 64, 64)
    results = []
    for run in (library.edit, Library.edit):
        factor = torch.tensor(0.5, requires_grad=True)
        owner = library if run == library.edit else _Plain()
        answer = run(resnet(), x, factor) if owner is library else run(owner, resnet(), x, factor)
        results.append((answer, torch.autograd.grad(answer.value[0, 0], factor)[0]))
    check([results[0][0].value, results[0][1]], [results[1][0].value, results[1][1]])
    return results[0][0].word


class _Plain(Library):
    def extract(self, model: nn.Module, names: Any, example: Any) -> Extractor:
        """Return the model."""
        return Extractor(model, lambda model, x: [model(x)])


def middle(library: Library) -> str:
    """Start in the middle: give the value of layer2, get the logits."""
    model, x, value = resnet(), torch.rand(2, 3, 64, 64), torch.rand(2, 128, 8, 8)
    answer = library.start(copy.deepcopy(model), x, value)
    check([answer.value], [model.fc(model.avgpool(model.layer4(model.layer3(value))).flatten(1))])
    return answer.word


def listing(library: Library) -> str:
    """A list of values with shapes, strides, parameters and FLOPs."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1)
    count = flops(nn.Sequential(stem, model.layer2), x) - flops(stem, x)
    parameters = sum(each.numel() for each in model.layer2.parameters())
    found = library.listing(model, x)
    truth = {"shape": (1, 128, 8, 8), "stride": 8, "parameters": parameters, "FLOPs": count, "name": "layer2"}
    truth |= {"channels": 128, "multiply-adds": count // 2}
    found = {name: value for name, value in found.items() if value is not None}
    convention = "FLOPs" in found and 0 < abs(found["FLOPs"] - count) < count / 100
    if convention:
        found["FLOPs"] = count
    wrong = [name for name, value in found.items() if value != truth[name]]
    good = [name for name in found if name not in wrong]
    if len(good) == 4 and not wrong:
        return "yes: FLOPs by its own convention" if convention else "yes"
    return f"partly: {', '.join(good)}" + "".join(f"; {name} differ: {found[name]}, {truth[name]}" for name in wrong)


def keys(library: Library) -> str:
    """State dict keys as in the model."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    thing = library.extract(model, ["layer2"], x).thing
    if library.is_function or not isinstance(thing, nn.Module):
        return "n/a: no module"
    found, expected = list(thing.state_dict()), set(resnet().state_dict())
    return "yes" if expected.issuperset(found) else f"no: {next(name for name in found if name not in expected)}"


def compiled(library: Library) -> str:
    """`torch.compile(fullgraph=True)`, with backend aot_eager."""
    extractor, x = library.extract(resnet(), ["layer2"], torch.rand(1, 3, 64, 64)), torch.rand(1, 3, 64, 64)
    if isinstance(extractor.thing, nn.Module) and not library.is_function:
        return _converted(library, lambda thing, x: torch.compile(thing, fullgraph=True, backend="aot_eager"))
    check(torch.compile(extractor, fullgraph=True, backend="aot_eager")(x), hooked(resnet(), ["layer2"], x))
    return "yes"


def exported(library: Library) -> str:
    """`torch.export`."""
    return _converted(library, lambda thing, x: torch.export.export(thing, (x,)).module(), needs_module=True)


def scripted(library: Library) -> str:
    """`torch.jit.script`."""

    def convert(thing: Any, x: Tensor) -> Any:
        return torch.jit.script(library.scriptable(resnet(), "layer2", x))

    return _converted(library, convert, needs_module=True)


def pickled(library: Library) -> str:
    """`pickle`."""
    return _converted(library, lambda thing, x: pickle.loads(pickle.dumps(thing)))


def copied(library: Library) -> str:
    """`copy.deepcopy`."""
    return _converted(library, lambda thing, x: copy.deepcopy(thing))


def _converted(library: Library, convert: Callable[[Any, Tensor], Any], *, needs_module: bool = False) -> str:
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    extractor = library.extract(model, ["layer2"], x)
    if library.is_function or (needs_module and not isinstance(extractor.thing, nn.Module)):
        return "n/a: a function" if library.is_function else "n/a: no module"
    y = torch.rand(1, 3, 64, 64)
    expected = hooked(resnet(), ["layer2"], y)
    if not equal(extractor.run(convert(extractor.thing, x), y), expected):
        check(extractor.run(convert(extractor.thing, x).eval(), y), expected)
        return "partly: the result is in train mode"
    return "yes"


_READER = """\
import sys, torch
sys.path.insert(0, {parent!r})
import written
x, expected = torch.load({values!r})
module = written.Written().eval()
found = module(x)
found = list(found.values())[-1] if isinstance(found, dict) else found[-1]
assert torch.equal(found, expected)
print([name for name in {names!r} if name in sys.modules])
"""


def code(library: Library) -> str:
    """Code that stands alone: written to a folder, and run in a process without the library."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    names = ["featx", "torchvision", "timm", "torchextractor", "surgeon_pytorch", "torchlens", "nnsight", "captum"]
    with tempfile.TemporaryDirectory() as parent:
        answer = library.write(model, x, Path(parent) / "written")
        values = f"{parent}/values.pt"
        torch.save((x, hooked(model, ["layer2"], x)[0].detach()), values)
        source = _READER.format(parent=parent, values=values, names=names)
        ran = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True, timeout=100)
    if ran.returncode:
        raise No("the code fails: " + ran.stderr.strip().splitlines()[-1].partition(":")[0])
    return answer.word if ran.stdout.strip() == "[]" else f"partly: needs {ran.stdout.strip()}"


def patterns(library: Library) -> str:
    """Patterns and classes in a request: `layer[34]` and `nn.BatchNorm2d`."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    count = 2 + sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    answer = library.select(model, x)
    if answer.value not in (None, count):
        raise No(f"{answer.value} of {count}")
    return answer.word


def pooling(library: Library) -> str:
    """Pooling and layout in the extractor: layer4 pooled, layer3 with the channels last."""
    model, x = resnet(), torch.rand(2, 3, 64, 64)
    layer4, layer3 = hooked(model, ["layer4", "layer3"], x)
    answer = library.pooled(model, x)
    if answer.value is not None:
        check(answer.value, [layer4.mean((2, 3)), layer3.permute(0, 2, 3, 1)])
    return answer.word


def pyramid(library: Library) -> str:
    """Maps at strides 4 to 32 without naming layers."""
    answer = library.pyramid(torch.rand(1, 3, 64, 64))
    strides, maps = answer.value
    if list(strides) != [4, 8, 16, 32] or [each.shape[-1] for each in maps] != [16, 8, 4, 2]:
        raise No("other maps")
    return answer.word


_FUNCTIONS = [
    (owner, name, getattr(owner, name))
    for owner, names in ((torch, "add conv2d"), (F, "relu linear"), (torch.Tensor, "__add__ __iadd__ view"))
    for name in names.split()
]


def untouched(library: Library) -> str:
    """The model and torch stay untouched: state, modes, attributes, hooks, functions, after creation and a call."""
    model, x = resnet(), torch.rand(1, 3, 64, 64)
    model.avgpool.train()  # a mixture of modes, which is to stay
    if library.has_own_models_only:
        return "n/a: it builds another one"
    before = _state_of(model)
    extractor = library.extract(model, ["layer2"], x)
    extractor(x)
    after = _state_of(model)
    before["functions of torch"] = [True] * len(_FUNCTIONS)
    changed = [what for what in before if before[what] != after[what]]
    return "yes" if not changed else f"no: {', '.join(changed)}"


def _state_of(model: nn.Module) -> dict[str, Any]:
    modules = list(model.modules())
    ignored = {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    return {
        "state": [(name, value.sum().item()) for name, value in model.state_dict().items()],
        "training flags": [module.training for module in modules],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules],
        "attributes": [sorted(set(vars(module)) - ignored) for module in modules],
        "functions of torch": [getattr(owner, name) is before for owner, name, before in _FUNCTIONS],
        "classes": [type(module) for module in modules],
    }


def threads(library: Library) -> str:
    """Another thread uses the model while an extractor of it is made and called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Pause(), nn.Linear(8, 8), Pause(), nn.Linear(8, 8)).eval()
    if library.has_own_models_only:
        return "n/a: it builds another one"
    x, y, names = torch.rand(2, 8), torch.rand(2, 8), ["0", "2", "4"]
    expected, theirs = hooked(model, names, x), hooked(model, ["4"], y)
    problems: list[str] = []
    done = threading.Event()

    def use() -> None:
        while not done.is_set():
            try:
                if not torch.equal(model(y), theirs[0]):
                    problems.append("its outputs differ")
            except Exception as error:
                problems.append(f"it gets {type(error).__name__}")

    other = threading.Thread(target=use)
    other.start()
    try:
        for _ in range(5):
            extractor = library.extract(model, names, x)
            for _ in range(3):
                if not equal(extractor(x), expected):
                    problems.append("features are of the other's input")
    finally:
        done.set()
        other.join()
    return "yes" if not problems else f"no: {'; '.join(sorted(set(problems)))}"


ROWS: list[Callable[[Library], str]] = [
    outputs, operations, cut, overwritten, gradients, transformer, text, branches, modes, sizes, attention, edits,
    middle, listing, keys, compiled, exported, scripted, pickled, copied, code, patterns, pooling, pyramid, untouched,
    threads,
]  # fmt: skip
