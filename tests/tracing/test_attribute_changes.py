"""What the calls of modules change of them is put back where they are recorded in another way."""

from __future__ import annotations

import torch
from torch import nn

from featx.tracing.model_state.attribute_changes import AttributeChanges


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.one, self.two = nn.ReLU(), nn.Tanh()
        self.calls = 0


def test_parts_that_noted_calls_have_replaced_are_put_back() -> None:
    module = Parts()
    weight, one, two = module.weight, module.one, module.two
    changes = AttributeChanges(module.modules())
    mark = changes.mark()
    for _ in range(2):
        module.weight = nn.Parameter(torch.ones(2))
        module.one, module.two = module.two, module.one
        module.three = nn.ReLU()
        module.calls += 1
        changes.note_call(module)
    changes.reset(module, mark)
    assert module.weight is weight
    assert (module.one, module.two, module.calls) == (one, two, 0)
    assert not hasattr(module, "three")
    assert changes.replaced_part(module) is None
    assert changes.changed_attribute(module) is None


def test_what_was_noted_before_the_mark_stays() -> None:
    module = Parts()
    changes = AttributeChanges(module.modules())
    module.weight = noted = nn.Parameter(torch.ones(2))
    changes.note_call(module)
    mark = changes.mark()
    module.weight = nn.Parameter(torch.ones(2))
    changes.note_call(module)
    changes.reset(module, mark)
    assert module.weight is noted
