"""What the page does in a browser. One Chromium serves all tests of the file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from chromium import MISSING, Chromium, find_chromium
from drawn import Block, Pair, Sized, Twice
from torch import Tensor, nn

import featx

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)
WRONG = (Path(__file__).parent / "layout.js").read_text()
Opened = Callable[..., Chromium]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Iterator[Opened]:
    """A function that draws a graph and opens the page; afterwards no script has failed and nothing was loaded."""

    def open_page(graph: featx.GraphModule | featx.Graph, **options: Any) -> Chromium:
        featx.draw(graph, **options).save(tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        return browser

    yield open_page
    assert browser.problems() == []


@pytest.fixture(scope="module")
def resnet() -> featx.GraphModule:
    return featx.trace(torchvision.models.resnet18(weights=None).eval(), torch.rand(1, 3, 64, 64))


def rows(browser: Chromium) -> list[str]:
    """Return the labels in the list at the side."""
    return browser.evaluate("[...document.querySelectorAll('.row .label')].map((label) => label.textContent)")


def boxes(browser: Chromium) -> list[str]:
    """Return the labels of the boxes on the canvas, folders too, outer ones first."""
    return browser.evaluate("""(() => {
        const found = [];
        const walk = (box) => box.items.forEach((item) => {
            found.push(window.page.model.labelOf(item.box.id));
            if (item.box.isOpen) walk(item.box);
        });
        walk(window.page.diagram.boxes.root);
        return found;
    })()""")


def click_box(browser: Chromium, label: str, *, title: bool = False) -> None:
    """Click on the middle of a box on the canvas, or on its title."""
    x, y = browser.evaluate(f"""(() => {{
        const {{ model, diagram }} = window.page;
        const ids = [...Array(model.size + model.folders.length).keys()];
        const id = ids.find((id) => model.labelOf(id) === {json.dumps(label)} && diagram.find(id));
        const place = diagram.place(id);
        const canvas = document.getElementById("canvas").getBoundingClientRect();
        return [canvas.x + place.x + place.w / 2, canvas.y + place.y + ({json.dumps(title)} ? 8 : place.h / 2)];
    }})()""")
    browser.click(x, y)


def details(browser: Chromium) -> str:
    return browser.evaluate("document.getElementById('details').innerText")


STAGES = "x conv1 bn1 relu maxpool layer1 layer2 layer3 layer4 avgpool flatten fc output".split()
# What is in the first block of a later stage.
LAST_BLOCK = "conv1 bn1 relu conv2 bn2 downsample 0 1 add relu_1".split()


def test_first_view_shows_the_stages(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    assert rows(browser) == STAGES
    assert boxes(browser) == STAGES
    assert browser.evaluate("document.title") == "ResNet"
    summary = browser.evaluate("document.getElementById('summary').textContent")
    assert summary == f"{len(resnet.graph.nodes) - 1} nodes (and 1 hidden) · 11.7 M parameters"
    assert "11.7 M" in details(browser)


def test_folder_opens_and_closes_by_a_click(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    click_box(browser, "layer2")
    inside = [*STAGES[:7], "0", "1", *STAGES[7:]]
    assert boxes(browser) == rows(browser) == inside
    click_box(browser, "1")
    assert boxes(browser)[7:15] == ["0", "1", "conv1", "bn1", "relu", "conv2", "bn2", "add"]
    click_box(browser, "layer2", title=True)
    assert boxes(browser) == rows(browser) == STAGES


def test_folder_stays_where_it_is_when_it_opens(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    place = "(() => { const { model, diagram } = window.page; const id = model.size + 1 +"
    place += " model.folders.slice(1).findIndex((row) => row[2] === 'layer3'); return diagram.place(id); })()"
    before = browser.evaluate(place)
    click_box(browser, "layer3")
    after = browser.evaluate(place)
    assert after["y"] == pytest.approx(before["y"])
    assert after["x"] + after["w"] / 2 == pytest.approx(before["x"] + before["w"] / 2)
    assert after["h"] > before["h"]


def test_twist_in_the_list_opens_a_folder(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    browser.click_on(".row.folder .twist")
    assert rows(browser)[5:8] == ["layer1", "0", "1"]
    assert browser.evaluate("document.querySelector('.row.folder').getAttribute('aria-expanded')") == "true"


def test_fold_all_and_unfold_all(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet)
    browser.click_on("#unfold-all")
    labels = boxes(browser)
    # With stages, blocks and downsamples; without the check that the input is a tensor.
    assert len(labels) == len(resnet.graph.nodes) - 1 + 4 + 8 + 3
    browser.click_on("#fold-all")
    assert boxes(browser) == STAGES


def test_details_of_a_node(opened: Opened, resnet: featx.GraphModule) -> None:
    cost = {"layer1_0_conv1": {"flops": 18_874_368, "bytes_moved": 1000}}
    browser = opened(resnet, depth=9, cost=cost)
    browser.evaluate("window.page.search('layer1.0.conv1')")
    browser.click_on(".row")
    text = details(browser)
    for part in (
        "layer1.0.conv1", "1×64×16×16", "float32", "36.9 k", "18.9 M", "bytes moved", "self.layer1.0.conv1(maxpool)",
        "Conv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)",
        "torchvision/models/resnet.py:", "layer1_0_conv1", "Reads\nmaxpool", "Read by\nlayer1.0.bn1",
    ):  # fmt: skip
        assert part in text


def test_details_of_a_folder_sum_up(opened: Opened, resnet: featx.GraphModule) -> None:
    costs = {node: {"flops": 1000, "peak": 77} for node in resnet.graph.nodes}
    browser = opened(resnet, depth=0, cost=costs)
    click_box(browser, "layer1")
    text = details(browser)
    assert "BasicBlock" not in text
    assert "Sequential" in text
    nodes = sum(node.meta.get("qualified_name", "").startswith("layer1.") for node in resnet.graph.nodes)
    assert f"nodes\n{nodes}\n" in text
    assert f"flops\n{nodes}" in text
    assert "peak" not in text
    parameters = sum(tensor.numel() for tensor in torchvision.models.resnet18(weights=None).layer1.parameters())
    assert browser.evaluate(f"Boolean(document.querySelector('[title=\"{parameters:,}\"]'))")


@pytest.mark.parametrize("by_key", [False, True], ids=["button", "key"])
def test_qualified_name_is_copied(opened: Opened, resnet: featx.GraphModule, by_key: bool) -> None:
    browser = opened(resnet, depth=2)
    click_box(browser, "maxpool")
    click_box(browser, "relu_1")
    if by_key:
        browser.press("c")
    else:
        browser.click_on(".copy")
    browser.wait("document.querySelector('.copy').textContent === 'Copied'")
    browser.evaluate("document.getElementById('query').focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", commands=["paste"])
    browser.frame()
    assert browser.evaluate("document.getElementById('query').value") == "layer1.0.relu_1"


def test_search_finds_opens_and_shows(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    browser.press("/")
    browser.type("DOWNSAMPLE conv")
    assert browser.evaluate("document.getElementById('count').textContent") == "3"
    assert rows(browser) == [f"layer{stage}.0.downsample.0" for stage in (2, 3, 4)]
    browser.press("Enter")
    browser.press("Enter")
    assert browser.evaluate("window.page.model.nameOf(window.page.state.selected)") == "layer3.0.downsample.0"
    assert "layer3.0.downsample.0" in details(browser)
    assert browser.evaluate("Boolean(window.page.diagram.find(window.page.state.selected))")
    browser.press("Escape")
    opened_stage = ["0", *LAST_BLOCK, "1"]
    assert rows(browser) == [*STAGES[:7], *opened_stage, "layer3", *opened_stage, *STAGES[8:]]


def test_search_by_shape_and_for_nothing(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    browser.press("/")
    browser.type("512x2x2 batchnorm")
    assert set(rows(browser)) == {
        f"layer4.{name}" for name in ("0.bn1", "0.bn2", "0.downsample.1", "1.bn1", "1.bn2")
    }  # fmt: skip
    browser.type(" nonsense")
    assert "Nothing has all of these words" in browser.evaluate("document.getElementById('rows').textContent")


def test_keys_walk_through_the_tree(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)

    def chosen() -> str | None:
        selected = "window.page.state.selected"
        return browser.evaluate(f"{selected} === null ? null : window.page.model.nameOf({selected})")

    for _ in range(6):
        browser.press("ArrowDown")
    assert chosen() == "layer1"
    browser.press("ArrowRight")
    assert rows(browser)[6:8] == ["0", "1"]
    browser.press("ArrowRight")
    assert chosen() == "layer1.0"
    browser.press("Enter")
    browser.press("ArrowDown")
    assert chosen() == "layer1.0.conv1"
    active = browser.evaluate("document.getElementById('rows').getAttribute('aria-activedescendant')")
    assert browser.evaluate(f"document.getElementById({active!r}).getAttribute('aria-selected')") == "true"
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert chosen() == "layer1.0"
    assert "conv1" not in rows(browser)[6:]
    browser.press("End")
    assert chosen() == "output"
    browser.press("Escape")
    assert chosen() is None


def test_sizes_and_checks_show_on_request(opened: Opened) -> None:
    browser = opened(featx.trace(Sized(), torch.ones(2, 4)))
    assert boxes(browser) == "x reshape flatten weight mul chunk getitem_2 getitem_3 add output".split()
    browser.click_on("#sizes")
    assert {"getattr", "floordiv", "gt"} <= set(boxes(browser))
    browser.click_on("#sizes")
    assert "getattr" not in boxes(browser)


def test_names_are_text(opened: Opened) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    traced = featx.symbolic_trace(Block())
    next(node for node in traced.graph.nodes if node.name == "act").meta["qualified_name"] = name
    browser = opened(traced, title=name)
    browser.evaluate("window.page.choose(2)")
    assert name in rows(browser)
    assert name in details(browser)
    assert browser.evaluate("document.querySelector('h1').textContent") == name
    assert browser.evaluate("document.images.length") == 0
    assert not browser.evaluate("Boolean(window.hacked)")


def test_dark_mode_has_its_own_colours(opened: Opened) -> None:
    browser = opened(featx.symbolic_trace(Twice()))
    colours = "[getComputedStyle(document.body).backgroundColor, window.page.diagram.colours.card]"
    light = browser.evaluate(colours)
    try:
        browser.emulate(dark=True)
        browser.wait(f"{colours}[1] !== {light[1]!r}")
        assert browser.evaluate(colours)[0] != light[0]
    finally:
        browser.emulate(dark=False)


def test_wheel_moves_and_zooms(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=9)
    state = "[window.page.diagram.scale, window.page.diagram.y]"
    scale, y = browser.evaluate(state)
    browser.send("Input.dispatchMouseEvent", type="mouseWheel", x=600, y=400, deltaX=0, deltaY=100)
    browser.wait(f"window.page.diagram.y === {y - 100}")
    browser.send("Input.dispatchMouseEvent", type="mouseWheel", x=600, y=400, deltaX=0, deltaY=-100, modifiers=2)
    browser.wait(f"window.page.diagram.scale > {scale}")


def empty_graph() -> featx.Graph:
    return featx.Graph()


def long_way(x: Tensor) -> Tensor:
    """A value that is read a long way after where it is made, and many times."""
    first = x
    for _ in range(150):
        x = torch.relu(x) + torch.sin(x)
    return x + first + torch.stack([first, x.cos(), x.sin()]).sum(0)


def traced_by_name(name: str) -> featx.GraphModule | featx.Graph:
    if name in ("googlenet", "densenet121", "resnet50"):
        options = {"init_weights": False} if name == "googlenet" else {}
        return featx.trace(torchvision.models.get_model(name, weights=None, **options).eval(), torch.rand(1, 3, 64, 64))
    if name == "swin_tiny_patch4_window7_224":
        return featx.trace(timm.create_model(name, pretrained=False).eval(), torch.rand(1, 3, 224, 224))
    return {
        "empty": empty_graph(),
        "long way": featx.symbolic_trace(long_way),
        "two values": featx.symbolic_trace(Pair()),
        "blocks": featx.symbolic_trace(nn.Sequential(Twice(), Twice())),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["empty", "long way", "two values", "blocks", "resnet50", "googlenet", "densenet121",
     "swin_tiny_patch4_window7_224"],
)  # fmt: skip
def test_boxes_keep_apart_and_lines_lead_where_they_should(opened: Opened, name: str) -> None:
    browser = opened(traced_by_name(name))
    for change in ("0", "window.page.unfoldAll()", "window.page.setSizes(true)", "window.page.foldAll()"):
        browser.evaluate(change)
        assert browser.evaluate(WRONG)["wrong"] == []


@pytest.mark.slow
def test_page_of_ten_thousand_nodes_is_laid_out_in_time(opened: Opened) -> None:
    """No time is asserted; a layout that is quadratic in the nodes would not end."""

    def chain(x: Tensor) -> Tensor:
        first = x
        for step in range(3000):
            x = torch.relu(x) + torch.sin(x)
            if step % 100 == 0:
                x = x * first
        return x

    browser = opened(featx.symbolic_trace(chain))
    assert len(boxes(browser)) == 9_032
    assert len(rows(browser)) < 100


def test_page_in_the_frame_of_a_notebook_works(browser: Chromium, tmp_path: Path) -> None:
    frame = featx.draw(featx.symbolic_trace(Twice()))._repr_html_()
    script = "window.page = true"
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><meta charset=utf-8>{frame}<script>{script}</script>")
    browser.open(tmp_path / "notebook.html")
    assert browser.problems() == []
    picture, end = tmp_path / "notebook.png", time.monotonic() + 30
    browser.screenshot(picture)
    while len(picture.read_bytes()) <= 10_000:  # an empty frame takes about 5,000, and it is drawn a little later
        assert time.monotonic() < end
        browser.screenshot(picture)


# -- ticks and thumbnails ------------------------------------------------------------------------------------------


def tick(browser: Chromium, label: str) -> None:
    """Click on the box to tick of a row in the list."""
    browser.evaluate(f"""[...document.querySelectorAll('.row')]
        .find((row) => row.querySelector('.label').textContent === {json.dumps(label)})
        .querySelector('.tick').click()""")


def call(browser: Chromium) -> str:
    return browser.evaluate("document.getElementById('ticked-call').textContent")


def test_what_is_ticked_is_a_call_that_extracts_it(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    assert browser.evaluate("document.getElementById('ticked').hidden") is True
    tick(browser, "layer4")
    tick(browser, "layer2")
    tick(browser, "conv1")
    assert call(browser) == 'featx.create_feature_extractor(model, ["conv1", "layer2", "layer4"])'
    assert browser.evaluate("document.getElementById('ticked').hidden") is False
    model = torchvision.models.resnet18(weights=None).eval()
    extractor = eval(call(browser), {"featx": featx, "model": model})
    assert list(extractor(torch.rand(1, 3, 64, 64))) == ["conv1", "layer2", "layer4"]
    tick(browser, "conv1")
    assert call(browser) == 'featx.create_feature_extractor(model, ["layer2", "layer4"])'
    browser.evaluate("document.getElementById('ticked-clear').click()")
    assert browser.evaluate("document.getElementById('ticked').hidden") is True


def test_ticks_by_key_and_in_the_details(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=0)
    click_box(browser, "bn1")
    browser.press("t")
    assert call(browser) == 'featx.create_feature_extractor(model, ["bn1"])'
    assert browser.evaluate("document.querySelector('#details .take input').checked") is True
    browser.evaluate("document.querySelector('#details .take input').click()")
    assert call(browser) == ""
    # What the model gave no name to has no box.
    click_box(browser, "output")
    assert browser.evaluate("document.querySelector('#details .take')") is None


def test_operations_inside_are_ticked_by_their_names(opened: Opened, resnet: featx.GraphModule) -> None:
    browser = opened(resnet, depth=9)
    browser.evaluate("""(() => {
        const { model } = window.page;
        const id = [...Array(model.size).keys()].find((id) => model.nameOf(id) === "layer3.0.add");
        window.page.tick(id);
    })()""")
    assert call(browser) == 'featx.create_feature_extractor(model, ["layer3.0.add"])'


def picture(browser: Chromium, label: str) -> list[int] | None:
    """Return the pixels of the picture of a node, red, green and blue of each."""
    return browser.evaluate(f"""(() => {{
        const {{ model }} = window.page;
        const ids = [...Array(model.size + model.folders.length).keys()];
        const canvas = model.pictureOf(ids.find((id) => model.labelOf(id) === {json.dumps(label)}));
        if (!canvas) return null;
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return [...data].filter((_, place) => place % 4 < 3);
    }})()""")


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Conv2d(3, 1, (1, 2), bias=False)
        self.pool = nn.AdaptiveAvgPool2d(1)
        with torch.no_grad():
            self.right.weight.copy_(torch.tensor([[-1.0, 1.0]] * 3).view(1, 3, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.right(nn.functional.pad(x, (0, 1))))


def test_each_map_has_a_picture(opened: Opened, browser: Chromium, tmp_path: Path) -> None:
    image = torch.zeros(1, 3, 8, 8)
    image[..., 4:] = 1.0
    drawing = featx.draw(Edges(), image, thumbnails=True)
    drawing.save(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert picture(browser, "x") == [0, 0, 0] * 4 + [255] * 12 + ([0, 0, 0] * 4 + [255] * 12) * 7
    found = picture(browser, "right")
    assert found is not None
    first = found[0 : 8 * 3 : 3]  # the one component of the first row: an edge up, and one down at the end
    assert len({*first[:3], *first[4:7]}) == 1
    assert {first[3], first[7]} == {0, 255}
    assert picture(browser, "pool") is None
    click_box(browser, "right")
    assert browser.evaluate("document.querySelector('#details .picture').width") == 240


def test_thumbnails_need_an_image(resnet: featx.GraphModule) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="thumbnails need a model or a GraphModule, and an image"):
        featx.draw(resnet, thumbnails=True)
    assert featx.draw(resnet, torch.rand(1, 3, 64, 64), thumbnails=True).html().count("layer4") > 0
    assert '"thumbnails":{}' in featx.draw(nn.Linear(3, 4), torch.rand(2, 3), thumbnails=True).html()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3)), (1, 3, 32)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 8, 6), nn.Flatten(2)), (1, 3, 32, 32)),
        (lambda: nn.Sequential(nn.Conv3d(3, 4, 3)), (1, 3, 8, 8, 8)),
    ],
    ids=["signal", "patches that overlap", "video"],
)
def test_what_is_no_map_of_an_image_has_no_picture(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    drawing = featx.draw(model(), torch.rand(shape), thumbnails=True)
    assert "Conv" in drawing.html()


@pytest.mark.sweep
def test_tokens_have_pictures(browser: Chromium, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, reg_tokens=2).eval()
    featx.draw(model, torch.rand(1, 3, 64, 64), thumbnails=True, depth=2).save(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert len(picture(browser, "blocks") or []) == 4 * 4 * 3
