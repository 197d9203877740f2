"""torch.fx's subgraph rewriter and matchers, as code bases use them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, replace_pattern, symbolic_trace
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher
from torch.fx.subgraph_rewriter import Match, ReplacedPatterns, replace_pattern_with_filters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, weight):
        y = x * torch.sigmoid(x)
        z = torch.cat([weight, weight]).sum() + self.norm(self.linear(y))
        return z * torch.sigmoid(z) + F.dropout(z, 0.3, training=False)


def inputs():
    return torch.linspace(-1, 1, 8).view(2, 4), torch.ones(2)


def swish(x):
    return x * torch.sigmoid(x)


def silu(x):
    return F.silu(x)


def case_replace_pattern():
    module = symbolic_trace(Model().eval())
    matches = replace_pattern(module, swish, silu)
    return (
        str(module.graph), module(*inputs()), len(matches), [isinstance(match, Match) for match in matches],
        [(match.anchor.name, [(a.name, b.name) for a, b in match.nodes_map.items()]) for match in matches],
    )  # fmt: skip


def case_replace_pattern_with_modules():
    class Pattern(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.linear(x))

    class Replacement(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.linear(x))

    module = symbolic_trace(Model().eval())
    matches = replace_pattern(module, Pattern(), Replacement())
    return str(module.graph), module(*inputs()), len(matches)


def case_replace_pattern_with_graphs():
    pattern, replacement = symbolic_trace(swish).graph, Graph()
    x = replacement.placeholder("x")
    replacement.output(replacement.call_function(F.silu, (x,)))
    module = symbolic_trace(Model().eval())
    replaced = replace_pattern_with_filters(module, pattern, replacement)
    return str(module.graph), [isinstance(match, ReplacedPatterns) for match in replaced], [
        [node.name for node in match.replacements] for match in replaced
    ]  # fmt: skip


def case_filters():
    def first_argument_is_an_input(match, original, pattern):
        return any(node.op == "placeholder" for node in match.placeholder_nodes)

    module = symbolic_trace(Model().eval())
    replaced = replace_pattern_with_filters(module, swish, silu, [first_argument_is_an_input])
    return str(module.graph), len(replaced)


def case_ignored_literals():
    def dropout(x):
        return F.dropout(x, 0.5, training=False)

    counts = []
    for ignore_literals in (False, True):
        module = symbolic_trace(Model().eval())
        counts.append(len(replace_pattern_with_filters(module, dropout, lambda x: x + 1, None, ignore_literals)))
    return counts, module(*inputs())


def case_replacement_callback():
    def callback(match, original, pattern):
        return symbolic_trace(silu if len(match.nodes_map) > 2 else swish).graph

    module = symbolic_trace(Model().eval())
    replace_pattern_with_filters(module, swish, replacement_callback=callback)
    return str(module.graph), module(*inputs())


def case_no_match():
    module = symbolic_trace(Model().eval())
    return replace_pattern(module, lambda x: torch.sin(x), lambda x: x), str(module.graph)


def case_matcher():
    module = symbolic_trace(Model().eval())
    matcher = SubgraphMatcher(symbolic_trace(swish).graph, match_output=False, ignore_literals=True)
    matches = matcher.match(module.graph)
    return (
        len(matches), [isinstance(match, InternalMatch) for match in matches],
        [(match.anchors, match.placeholder_nodes, match.returning_nodes) for match in matches],
        [[(a.name, b.name) for a, b in match.nodes_map.items()] for match in matches],
    )  # fmt: skip
