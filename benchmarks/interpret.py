"""Compare Interpreter and Transformer with torch.fx's, on graphs that both traced from one model.

Run: python benchmarks/interpret.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.fx
import torchvision
from compare import describe_machine, medians, print_table
from torch import nn

import featx


def chain(value: Any) -> Any:
    """Compute 10,000 things that cost next to nothing."""
    for _ in range(5_000):
        value = -value + 1
    return value


def without_layers(model: nn.Module) -> nn.Module:
    """Put an Identity in the place of each layer, so that little is left but the calls."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if not list(child.children()):
                setattr(module, name, nn.Identity())
    return model.eval()


def swapping(library: ModuleType, base: type[Any]) -> type[Any]:
    """Return a subclass that looks at each function, as most subclasses do."""

    class Swapping(base):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(operator.neg if target is operator.inv else target, args, kwargs)

    return Swapping


# What it does with a module and an input, by what it is called in the table.
TASKS: tuple[tuple[str, Callable[[ModuleType, Any], Callable[[Any], object]]], ...] = (
    ("run again", lambda library, module: library.Interpreter(module).run),
    ("make and run", lambda library, module: lambda value: library.Interpreter(module).run(value)),
    ("run a subclass", lambda library, module: swapping(library, library.Interpreter)(module).run),
    ("boxed_run", lambda library, module: lambda value: library.Interpreter(module).boxed_run([value])),
    ("transform", lambda library, module: lambda value: library.Transformer(module).transform()),
    (
        "transform by a subclass",
        lambda library, module: lambda value: swapping(library, library.Transformer)(module).transform(),
    ),
    # What Python needs of that to compile the generated code.
    ("compile alone", lambda library, module: lambda value: compile(module.code, "code", "exec")),
)


def measure(model: Any, value: Any, rounds: int) -> Iterator[tuple[str, int, float, float]]:
    """Yield for each task its name, the number of nodes, and the times of featx and of torch.fx in us a node."""
    ours, theirs = featx.symbolic_trace(model), torch.fx.symbolic_trace(model)
    count = len(ours.graph.nodes)
    assert count == len(theirs.graph.nodes)
    times = max(1, 2_000 // count)  # so that the clock is fine enough

    def repeat(task: Callable[[Any], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                task(value)

        return run

    for name, prepare in TASKS:
        with torch.no_grad():
            first, second = medians(repeat(prepare(featx, ours)), repeat(prepare(torch.fx, theirs)), rounds)
        yield name, count, first / times / count * 1e6, second / times / count * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    models = torchvision.models
    cases = [
        ("chain", chain, 1),
        ("resnet50, Identity layers", without_layers(models.resnet50(weights=None)), torch.ones(1, 1, 1, 1)),
        ("efficientnet_b0, Identity layers", without_layers(models.efficientnet_b0()), torch.ones(1, 1, 1, 1)),
        ("resnet50 at 32 px", models.resnet50(weights=None).eval(), torch.rand(1, 3, 32, 32)),
    ]
    rows = []
    for case, model, value in cases:
        for name, count, ours, theirs in measure(model, value, rounds):
            rows.append([case, str(count), name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    print(f"{describe_machine()}; us a node\n")
    print_table(["graph", "nodes", "task", "featx", "torch.fx", "ratio"], rows)


if __name__ == "__main__":
    main()
