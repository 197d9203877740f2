"""Small models whose drawings are known by hand, and what the tests look at in a drawing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from featx.drawing.hierarchy import Folder
from featx.drawing.leaves import Leaf


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + x


class Twice(nn.Module):
    """Calls one block twice, once more after something else, and a module with a single operation in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(x))
        return self.block(self.scale(x))


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Pair(nn.Module):
    """Two modules, of which one hands two values to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.give, self.take = Give(), Take()

    def forward(self, x: Tensor) -> Tensor:
        return self.take(*self.give(x), x)


class Give(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


class Take(nn.Module):
    def forward(self, one: Tensor, other: Tensor, third: Tensor) -> Tensor:
        return (one - other).relu() + third


class Sized(nn.Module):
    """Computes with sizes, and decides by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape
        if width > 3:
            x = x.reshape(batch, width // 2, 2).flatten(1)
        first, second = (x * self.weight).chunk(2, dim=1)
        return first + second


def outline(folder: Folder) -> list[object]:
    """Return the names in a tree, nested as it is: `[label, [contents]]` for a folder."""
    return [[child.label, outline(child)] if isinstance(child, Folder) else child.label for child in folder.children]


def folder_at(root: Folder, path: str) -> Folder:
    return next(folder for folder in root.folders() if folder.path == path and folder.type_name)


def leaf_at(root: Folder, name: str) -> Leaf:
    return next(leaf for leaf in root.leaves() if leaf.name == name)
