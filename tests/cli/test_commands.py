"""The command line: what each command prints and writes, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import featx
from featx.cli.commands import make_app
from featx.cli.errors import UserError
from featx.cli.models import load_model
from featx.drawing.components import principal_components


def run(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), [str(each) for each in arguments])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        values = np.random.default_rng(number).integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


HELP = (
    "import sys; from featx.cli.commands import make_app; sys.argv[1:] = {}\n"
    "try: make_app()()\n"
    "except SystemExit: print(sorted({{'torch', 'numpy', 'pyarrow'}} & {{*sys.modules}}))"
)


@pytest.mark.parametrize("arguments", [["--help"], ["extract", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    found = subprocess.run([sys.executable, "-c", HELP.format(arguments)], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


# -- nodes, cost, draw, code ---------------------------------------------------------------------------------------


def test_a_depth_holds_beside_a_type_and_is_not_0() -> None:
    lines = done("nodes", "torchvision:resnet18", "--depth", 1, "--type", "Conv2d").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["conv1"]
    for command in ("nodes", "cost"):
        assert run(command, "torchvision:resnet18", "--depth", 0).exit_code == 2


@pytest.mark.slow
def test_nodes() -> None:
    lines = done("nodes", "torchvision:resnet18").splitlines()
    assert lines[0].split()[:3] == ["name", "type", "shape"]
    assert any(line.split()[:2] == ["layer4", "Sequential"] for line in lines)
    assert "--all" in lines[-1]
    assert "layer1.0.add" in done("nodes", "torchvision:resnet18", "--all")
    matching = done("nodes", "torchvision:resnet18", "--match", "layer?").splitlines()[2:]
    assert [line.split()[0] for line in matching] == ["layer1", "layer2", "layer3", "layer4"]


@pytest.mark.slow
def test_nodes_as_json() -> None:
    rows = json.loads(done("nodes", "torchvision:resnet18", "--json", "--type", "Conv2d"))
    assert len(rows) == 20
    assert rows[0]["name"] == "conv1"
    assert rows[0]["shape"] == [2, 64, 112, 112]


@pytest.mark.slow
def test_cost() -> None:
    assert "11.7 M parameters" in done("cost", "torchvision:resnet18")
    modules = json.loads(done("cost", "torchvision:resnet18", "--json"))
    report = featx.cost(torchvision.models.resnet18(weights=None).eval())
    assert modules[0]["flops"] == report.total.flops


@pytest.mark.slow
def test_draw(tmp_path: Path) -> None:
    assert done("draw", "torchvision:resnet18", "-o", tmp_path / "a.html") == f"wrote {tmp_path / 'a.html'}\n"
    assert "layer4" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_code(tmp_path: Path) -> None:
    source = done("code", "torchvision:resnet18", "--nodes", "layer1=C2", "-n", "layer2")
    assert source.startswith("def forward(self, x")
    assert "'C2': layer1" in source
    assert "fc" in done("code", "torchvision:resnet18")
    done("code", "torchvision:resnet18", "-n", "layer1", "--seed", 3, "-o", tmp_path / "code")
    program = (
        "import sys, torch; sys.path.insert(0, '.'); from code import ResNetFeatures as R;"
        "torch.save(R()(torch.ones(1, 3, 64, 64))['layer1'], 'value.pt')"
    ).replace("from code", "from written")
    (tmp_path / "code").rename(tmp_path / "written")
    subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, check=True)
    torch.manual_seed(3)
    model = torchvision.models.resnet18(weights=None).eval()
    x = model.maxpool(model.relu(model.bn1(model.conv1(torch.ones(1, 3, 64, 64)))))
    assert torch.equal(torch.load(tmp_path / "value.pt"), model.layer1(x))


# -- features ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_features(photos: Path, tmp_path: Path) -> None:
    output, picture = tmp_path / "f.safetensors", tmp_path / "f.png"
    arguments = ["features", "torchvision:resnet18", photos, "-n", "layer3=C4", "-n", "layer?", "--seed", 1]
    printed = done(*arguments, "-o", output, "--picture", picture, "--size", 64, "--batch", 2)
    assert "C4" in printed
    found = load_file(output)
    assert list(found) == ["C4", "layer1", "layer2", "layer4"]
    torch.manual_seed(1)
    model = torchvision.models.resnet18(weights=None).eval()
    assert found["C4"].shape == (3, 256, 4, 4)
    # The transform of the weights cuts 224 pixels out of 256.
    images = torch.stack([as_declared(path, crop_size=64, resize_size=73) for path in sorted(photos.glob("*.png"))])
    expected = torch.nn.Sequential(*list(model.children())[:7])(images)
    assert torch.allclose(found["C4"], expected, atol=1e-5)
    with Image.open(picture) as opened:
        assert opened.size == (8 + 200 * 5, 8 + 200 * 3)  # the image and four maps, of three images


def as_declared(path: Path, **sizes: int) -> torch.Tensor:
    """Do what the weights of resnet18 declare."""
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms(**sizes)
    with Image.open(path) as image:
        return transform(image.convert("RGB"))


@pytest.mark.slow
def test_features_are_pooled_and_written_as_npz(photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "f.npz"
    shapes = json.loads(
        done(
            "features",
            "torchvision:resnet18",
            photos / "0.png",
            "-n",
            "layer4",
            "--pool",
            "avg",
            "-o",
            output,
            "--json",
        )
    )
    assert shapes == {"layer4": [1, 512]}
    with np.load(output) as arrays:
        assert arrays["layer4"].shape == (1, 512)
        assert arrays["images"].tolist() == [str(photos / "0.png")]


@pytest.mark.sweep
def test_features_of_timm_use_its_transform(photos: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    output = tmp_path / "f.safetensors"
    done("features", "timm:resnet10t", photos, "-n", "layer4", "--pool", "avg", "--seed", 0, "-o", output)
    torch.manual_seed(0)
    model = timm.create_model("resnet10t").eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in sorted(photos.glob("*.png"))])
    expected = model.forward_features(images).mean((2, 3))
    assert torch.allclose(load_file(output)["layer4"], expected, atol=1e-5)


def test_principal_components_are_those_of_numpy() -> None:
    maps = torch.randn(2, 5, 3, 4)
    found = principal_components(maps)
    values = maps.permute(0, 2, 3, 1).reshape(-1, 5).numpy()
    values = values - values.mean(0)
    _, vectors = np.linalg.eigh(values.T @ values)
    for number in range(3):
        scores = values @ vectors[:, -1 - number]
        scaled = (scores - scores.min()) / (scores.max() - scores.min())
        own = found[:, number].reshape(-1).numpy()
        assert np.allclose(own, scaled, atol=1e-4) or np.allclose(1 - own, scaled, atol=1e-4)
    assert principal_components(torch.randn(1, 2, 3, 3))[:, 2].eq(0).all()


# -- models --------------------------------------------------------------------------------------------------------


def test_a_function_of_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_of_a_test.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())\nnumber = int\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "Conv2d" in done("nodes", "own_models_of_a_test:small", "--all")
    assert "Did you mean 'small'?" in failed("nodes", "own_models_of_a_test:smal")
    assert "gives a int, and no nn.Module" in failed("nodes", "own_models_of_a_test:number")
    assert str(tmp_path) not in sys.path


def test_errors_of_a_function_name_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_model.py").write_text("def make():\n    raise ValueError('no such weights')\n")
    (tmp_path / "failing_file.py").write_text("import torch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert "makes no model: ValueError: no such weights, in" in failed("nodes", "failing_model:make")
    assert "failing_model.py:2" in failed("nodes", "failing_model:make")
    assert "'failing_file' cannot be imported: ZeroDivisionError" in failed("nodes", "failing_file:make")


@pytest.mark.slow
def test_weights_of_a_file(tmp_path: Path, photos: Path) -> None:
    torch.manual_seed(5)
    model = torchvision.models.resnet18(weights=None).eval()
    save_file(model.state_dict(), str(tmp_path / "w.safetensors"))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        output = tmp_path / f"{name}.npz"
        done("features", "torchvision:resnet18", photos, "-n", "layer1", "--weights", tmp_path / name, "-o", output)
        with np.load(output) as arrays:
            images = torch.stack([as_declared(path) for path in sorted(photos.glob("*.png"))])
            x = model.maxpool(model.relu(model.bn1(model.conv1(images))))
            assert np.allclose(arrays["layer1"], model.layer1(x).detach().numpy(), atol=1e-5)
    arguments = ["torchvision:resnet18", photos, "-n", "fc", "-o", tmp_path / "w.pt" / "f.npz"]
    assert "there is no folder" in run("features", *arguments).stderr
    torch.save(torchvision.models.resnet34().state_dict(), tmp_path / "other.pt")
    assert "does not fit the model" in failed("nodes", "torchvision:resnet18", "--weights", tmp_path / "other.pt")
    (tmp_path / "notes.pt").write_text("no weights")
    assert "is no file of weights" in failed("nodes", "torchvision:resnet18", "--weights", tmp_path / "notes.pt")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["module.", "model.", "module._orig_mod."])
def test_weights_of_a_wrapped_model(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(5)
    model = torchvision.models.resnet18(weights=None)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"epoch": 3, "model_state_dict": state}, tmp_path / "w.pt")
    loaded = load_model("torchvision:resnet18", pretrained=False, weights=tmp_path / "w.pt", seed=None)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    state["other.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "more.pt")
    with pytest.raises(UserError, match="does not fit the model"):
        load_model("torchvision:resnet18", pretrained=False, weights=tmp_path / "more.pt", seed=None)


@pytest.mark.sweep
def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(tmp_path / "model")
    assert "encoder.stages.1" in done("nodes", f"hf:{tmp_path / 'model'}")


# -- mistakes ------------------------------------------------------------------------------------------------------


ORIENTATION = 0x0112  # of EXIF


def failed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert result.stderr.startswith("featx: ")
    assert result.stdout == ""
    return result.stderr


MISTAKES: dict[str, tuple[list[Any], str]] = {
    "no library": (["nodes", "resnet18"], "names no model; write one of torchvision:"),
    "no model": (["nodes", "torchvision:resnet19"], "Did you mean 'resnet18'"),
    "a seed that is too large": (["nodes", "timm:resnet18", "--seed", 10**30], "--seed must be an integer of 64 bits"),
    "no weights of timm": (["nodes", "timm:resnet18.none"], "timm cannot make 'resnet18.none': RuntimeError: Invalid"),
    "no timm model": (["nodes", "timm:resnet19"], "timm has no model 'resnet19'. Did you mean"),
    "the start of names": (
        ["nodes", "timm:vit_tiny"],
        "no model 'vit_tiny'. Did you mean 'vit_tiny_patch16_224' or 'vit_tiny_patch16_384' or",
    ),
    "the start of a name": (["nodes", "torchvision:wide_resnet5"], "Did you mean 'wide_resnet50_2'?"),
    "no module": (["nodes", "nowhere_at_all:f"], "there is no Python module 'nowhere_at_all'"),
    "no node": (["code", "torchvision:resnet18", "-n", "layer9"], "Did you mean 'layer4'"),
    "names": (["code", "torchvision:resnet18", "-n", "layer9"], "List all names with 'featx nodes MODEL --all'"),
    "no inputs": (["cost", "torch.nn:ReLU"], "give them by --input: forward(input"),
    "no match": (["nodes", "torchvision:resnet18", "--match", "zzz"], "no node is like that"),
    "no image": (["features", "torchvision:resnet18", "nowhere.png", "-n", "fc"], "there is no file 'nowhere.png'"),
    "no array": (["features", "torchvision:resnet18", "a.png", "-n", "fc", "-o", "a.txt"], "must end in"),
    "no picture": (
        ["features", "torchvision:resnet18", "a.png", "-n", "fc", "--picture", "a.foo"],
        "'a.foo' must end in .png or",
    ),
    "no folder": (
        ["features", "torchvision:resnet18", "a.png", "-n", "fc", "-o", "nowhere/a.npz"],
        "there is no folder 'nowhere'",
    ),
    "no drawing": (["draw", "torchvision:resnet18", "-o", "nowhere/a.html"], "there is no folder 'nowhere'"),
    "no file": (["nodes", "torchvision:resnet18", "--weights", "nowhere.pt"], "there is no file 'nowhere.pt'"),
    "both": (["nodes", "torchvision:resnet18", "--weights", "a.pt", "--pretrained"], "or --weights, not both"),
    "twice": (["code", "torchvision:resnet18", "-n", "fc,fc"], "--nodes has fc twice"),
    "a number": (["nodes", "math:pi"], "'math:pi' is of float, and neither a model nor what makes one"),
    "arguments": (["nodes", "torch.nn:Linear"], "'torch.nn:Linear' has to make a model without arguments: "),
    "wrong input": (["nodes", "torchvision:resnet18", "--input", "3x64x64"], "fails on --input 3x64x64: ValueError: "),
    "wrong input of cost": (["cost", "torch.nn:Flatten", "--input", "4"], "fails on --input 4: IndexError: "),
    "no dtype": (["nodes", "torch.nn:Flatten", "--input", "4:int9"], "2x9:int64; got '4:int9'"),
    "own": (["nodes", "collections:Counter", "--pretrained"], "load its weights itself"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_in_a_line(name: str) -> None:
    arguments, message = MISTAKES[name]
    assert message in failed(*arguments)


def test_empty_source_is_not_the_current_folder(tmp_path: Path) -> None:
    found = run("extract", "torchvision:squeezenet1_0", "--nodes", "features", "", tmp_path / "out")
    assert found.exit_code == 1
    assert "the source is an empty text" in found.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    assert f"'{tmp_path / 'a.png'}' cannot be read" in failed(
        "features", "torchvision:resnet18", tmp_path / "a.png", "-n", "fc"
    )
    (tmp_path / "empty").mkdir()
    assert "no images in" in failed("features", "torchvision:resnet18", tmp_path / "empty", "-n", "fc")


@pytest.mark.slow
def test_a_mistake_in_a_name_is_told_before_all_images_are_read(photos: Path) -> None:
    (photos / "9.png").write_bytes(b"no image")
    arguments = ["features", "torchvision:resnet18", photos, "--size", 32, "-n"]
    assert "No node 'layer9'" in failed(*arguments, "layer9")
    assert "9.png' cannot be read as an image" in failed(*arguments, "layer1")


@pytest.mark.slow
def test_an_image_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    exif = image.getexif()
    exif[ORIENTATION] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    found = [
        load_file(output)["layer1"]
        for output in (tmp_path / "turned.safetensors", tmp_path / "upright.safetensors")
        if done(
            "features",
            "torchvision:resnet18",
            output.with_suffix(".png"),
            "-n",
            "layer1",
            "--size",
            32,
            "--seed",
            0,
            "-o",
            output,
        )
    ]
    assert torch.equal(*found)


def test_a_model_that_takes_no_images(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_texts.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Embedding(10, 4))\n"
    )
    result = run("features", "of_texts:make", "--nodes", "0", photos, "--size", 16)
    assert result.exit_code == 1
    assert "featx: " in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_picture_of_what_is_no_map(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("an earlier one")
    output = ["-o", tmp_path / "a.npz", "--picture", tmp_path / "a.png"]
    result = run("features", "torchvision:resnet18", "--nodes", "layer1", "--pool", "avg", photos, *output)
    assert result.exit_code == 1
    assert "--picture shows maps, and none of layer1 is one" in result.stderr
    assert (tmp_path / "a.png").read_text() == "an earlier one"


@pytest.mark.slow
def test_several_nodes_with_commas(photos: Path, tmp_path: Path) -> None:
    arguments = ["-n", "layer2=C3,layer[34]=*", photos, "-o", tmp_path / "a.npz"]
    text = done("features", "torchvision:resnet18", *arguments)
    assert [line.split()[:2] for line in text.splitlines()[1:4]] == [["C3", "layer2"], ["3", "layer3"], ["4", "layer4"]]


def test_the_version() -> None:
    assert done("--version").startswith("featx 0.")


@pytest.mark.slow
def test_usage() -> None:
    assert run("nodes").exit_code == 2
    assert run("features", "torchvision:resnet18").exit_code == 2
    help_text = run("--help").output
    assert all(command in help_text for command in ("nodes", "cost", "draw", "code", "features", "completion"))


@pytest.mark.slow
def test_python_m_featx() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "featx", "nodes", "torchvision:nothing"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert found.stderr.startswith("featx: torchvision has no model 'nothing'")


def test_without_typer_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys; found = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *a: None if name == 'typer' else found(name, *a);"
        "from featx.cli.entry import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "pip install 'featx[cli]'" in found.stderr


# -- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inputs_of_a_model_of_ones_own_are_given_by_their_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_two.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)\n"
        "    def forward(self, x, y):\n"
        "        return self.last(self.first(x) + y)\n"
        "make = Two\n"
    )
    monkeypatch.chdir(tmp_path)
    inputs = ["--input", "3x4", "--input", "3,6"]
    rows = {row["name"]: row for row in json.loads(done("nodes", "of_two:make", *inputs, "--json"))}
    assert rows["first"]["shape"] == [3, 6]
    assert "3x2" in done("nodes", "of_two:make", *inputs)
    assert "first" in done("cost", "of_two:make", *inputs)
    assert "self.last(add)" in done("code", "of_two:make", *inputs)
    assert "self.first(x)" in done("code", "of_two:make", "-n", "first", *inputs)
    done("draw", "of_two:make", *inputs, "-o", "two.html")
    assert "2x9:int64; got '3x'" in failed("nodes", "of_two:make", "--input", "3x")
    hint = "no inputs for forward(x, y) are known; give --input once for each of its inputs, as in --input 1x3x64x64"
    assert hint in done("nodes", "of_two:make")
    result = run("nodes", "of_two:make", "--json")
    assert json.loads(result.stdout)
    assert hint in result.stderr


@pytest.mark.slow
def test_random_weights_are_told_and_the_same_each_time(photos: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for output in outputs:
        result = run("features", "torchvision:resnet18", photos, "-n", "layer1", "--size", 32, "-o", output)
        assert "weights: random, seed 0; --pretrained loads trained ones" in result.stderr
    assert torch.equal(*(load_file(output)["layer1"] for output in outputs))
