"""Write a pass by hand: put each batch norm into the convolution before it.

    python examples/transforms/fuse_conv_bn.py

`featx.passes.fuse_conv_bn` is the one to use: it knows more kinds of layers and looks out for shared ones.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import featx


def fuse(gm: featx.GraphModule) -> int:
    """Put batch norms of `gm`, which is in eval mode, into their convolutions; return how many. O(nodes).

    The fused convolutions are new modules of `gm`; the model that was traced keeps its own.
    """
    assert not gm.training, "running statistics are constants in eval mode only"
    modules = dict(gm.named_modules())
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    times = {node.target: sum(other.target == node.target for other in calls) for node in calls}
    fused = 0
    for norm in calls:
        conv = norm.args[0]
        if not isinstance(modules[norm.target], nn.BatchNorm2d) or not isinstance(conv, featx.Node):
            continue
        is_conv = conv.op == "call_module" and isinstance(modules[conv.target], nn.Conv2d)
        if not is_conv or len(conv.users) > 1 or times[conv.target] > 1 or times[norm.target] > 1:
            continue  # somebody else sees what the convolution alone gives
        replace_submodule(gm, conv.target, fuse_conv_bn_eval(modules[conv.target], modules[norm.target]))
        norm.replace_all_uses_with(conv)
        gm.graph.erase_node(norm)
        fused += 1
    gm.delete_all_unused_submodules()
    return fused


def replace_submodule(gm: featx.GraphModule, path: str, module: nn.Module) -> None:
    """Let `gm` have `module` at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(gm.get_submodule(parent), name, module)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    ).eval()
    image = torch.randn(1, 3, 16, 16)
    gm = featx.trace(model, image)
    print(f"{fuse(gm)} fused:\n{gm.code}")
    print(f"largest difference: {(gm(image) - model(image)).abs().max():.1e}")


if __name__ == "__main__":
    main()
