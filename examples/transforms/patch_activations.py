"""Patch activations: replace the value at a node by a function of it, and see what that does to the output.

python examples/transforms/patch_activations.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import featx

Patch = Callable[[Tensor], Tensor]


class Patched(nn.Module):
    """A patch as a module, so that it can hold tensors (a direction, a mean) that move with the model."""

    def __init__(self, patch: Patch) -> None:
        super().__init__()
        self.patch = patch

    def forward(self, value: Tensor) -> Tensor:
        return self.patch(value)


def patched(gm: featx.GraphModule, patches: Mapping[str, Patch]) -> featx.GraphModule:
    """Return a copy of `gm`, sharing its weights, in which what follows a node sees the patch of its value.

    Args:
        gm: a traced model; it stays as it is.
        patches: functions by the qualified name of a node, as `featx.get_graph_node_names` lists them.

    Raises:
        NodeNameError: there is no node of that name.
    """
    nodes = featx.select(gm.graph, {name: name for name in patches}, type(gm).__name__)
    graph, copies = featx.Graph(), dict[featx.Node, featx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    copy = featx.GraphModule(gm, graph)
    for index, (name, node) in enumerate(nodes.items()):
        value = copies[node]
        copy.add_submodule(f"patch_{index}", Patched(patches[name]))
        with copy.graph.inserting_after(value):
            patch = copy.graph.call_module(f"patch_{index}", (value,))
        value.replace_all_uses_with(patch, delete_user_cb=lambda user, patch=patch: user is not patch)
    return copy


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    gm = featx.trace(model, x)
    print(f"as it is:               {gm(x).tolist()}")
    for name in ("1", "3"):
        ablated = patched(gm, {name: torch.zeros_like})
        print(f"with '{name}' set to zero:   {ablated(x).tolist()}")


if __name__ == "__main__":
    main()
