"""Models that were traced wrongly once, as the smallest sources that showed it."""

from __future__ import annotations

import pytest
from comparison import Library, judge
from inputs import Case

pytestmark = pytest.mark.fuzzing

_HEAD = (
    "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
)


def _forward(*lines: str) -> str:
    return _HEAD + "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in lines)


def _with(attribute: str, *lines: str) -> str:
    start = f"    def __init__(self):\n        super().__init__()\n        {attribute}\n\n"
    return _forward(*lines).replace("    def forward", start + "    def forward", 1)


# A module that no graph can hold.
_COUNTING = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls


"""

_REMEMBERING = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = x if self.last is None else x + self.last
        self.last = x.detach().mean(0)
        return y


"""


def _remembering(context: str) -> str:
    return _REMEMBERING.replace("y = x if", f"with {context}:\n            y = x.float() * x.shape[0] if", 1)


_COUNTING_GLOBALLY = """TABLE = torch.tensor([0.5, 2.0])


class Block(nn.Module):
    def forward(self, x):
        TABLE.add_(1)
        return x + TABLE.sum()


"""

_TRANSPOSING = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        x.transpose_(0, 1).transpose_(0, 1)
        return y


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(self.block(x))


"""

_RETURNING_ITS_INPUT = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(1))

    def forward(self, x):
        if self.calls > 2:
            x = x * 2
        self.calls += 1
        return x, None


"""

CASES: dict[str, Case] = {
    "object written in inference mode": Case(
        _HEAD
        + "    def forward(self, box):\n        x, y = box.x, box.y\n        x = torch.tanh(x)\n"
        + "        with torch.inference_mode():\n            y.copy_(x)\n        return x\n",
        (2, 4, 6, 6),
        "box",
    ),
    "call that returns its argument": Case(_forward("y = x.to(torch.float32)", "x.fill_(0)", "return y")),
    "copy of what is contiguous": Case(_forward("y = x.contiguous()", "y *= 2", "return x, y")),
    "loop over a size": Case(_forward("n = 0", "for i in range(x.shape[0]):", "    n += i", "return x + n")),
    "loop over a remainder": Case(_forward("for _ in range(x.shape[0] % 4):", "    x = x + 1", "return x")),
    "size times a float": Case(_forward("return x * x.shape[1] ** -0.5, int(x.shape[0] * 0.7)")),
    "index by a size": Case(_forward("return x * [1.0, 2.0, 3.0][x.shape[0] % 3]")),
    "key by a size": Case(_forward("return x * {3: 5, 4: 7}.get(x.shape[0], 2)")),
    "mode of the module": Case(_forward("return x * 2 if self.training else F.dropout(x, 0.5, self.training)")),
    "question for gradients": Case(_forward("return x + 1 if torch.is_grad_enabled() else x - 1")),
    "gradients switched on around nothing": Case(
        _with("self.linear = nn.Linear(4, 4)", "with torch.enable_grad():", "    pass", "return self.linear(x)")
    ),
    "gradients switched on inside": Case(
        _with("self.linear = nn.Linear(4, 4)", "with torch.enable_grad():", "    y = self.linear(x)", "return x, y")
    ),
    "write without gradients": Case(
        _with(
            "self.linear = nn.Linear(4, 4)",
            "y = x * self.linear(x)",
            "with torch.no_grad():",
            "    y.masked_fill_(y > 0, 0.25)",
            "return y",
        )
    ),
    "number in a dict": Case(
        _with("self.state = {'scale': 2.0}", "self.state['scale'] += 1", "return x * self.state['scale']")
    ),
    "list that grows": Case(_with("self.seen = []", "self.seen.append(1)", "return x + len(self.seen)")),
    "value of the last input": Case(
        _with(
            "self.last = None",
            "y = x if self.last is None else x + self.last.mean()",
            "self.last = x.detach()",
            "return y",
        )
    ),
    "rank after squeeze": Case(_forward("x = x.squeeze()", "return x.expand(2, *x.shape)")),
    "other memory": Case(_forward("y = x[..., 1:]", "x.set_(x.clone())", "return x, y")),
    "other memory of a result": Case(_forward("y = x * 2", "z = y + 1", "y.set_(z.clone())", "return y")),
    "other memory where values are needed": Case(
        _with(
            "self.state = nn.Parameter(torch.rand(4))",
            "y = x * self.state.sum()",
            "y.set_(y.clone())",
            "return y * y.sum().item()",
        )
    ),
    "buffer that is assigned where values are needed": Case(
        _HEAD.replace("class Model", _COUNTING + "class Model")
        + "    def __init__(self):\n        super().__init__()\n        self.block = Block()\n\n"
        + "    def forward(self, x):\n        return self.block(self.block(x)) * torch.rand(()).item()\n"
    ),
    "state of a child that the parent takes back": Case(
        _HEAD.replace("class Model", _REMEMBERING + "class Model")
        + "    def __init__(self):\n        super().__init__()\n        self.block = Block()\n\n"
        + "    def forward(self, x):\n        self.block.last = None\n        return self.block(x)\n"
    ),
    "global that a module inside writes": Case(
        _HEAD.replace("class Model", _COUNTING_GLOBALLY + "class Model")
        + "    def __init__(self):\n        super().__init__()\n        self.block = Block()\n\n"
        + "    def forward(self, x):\n        return self.block(x)\n"
    ),
    "vmap where values are needed": Case(
        _forward("if x.max() < 2:", "    pass", "return torch.func.vmap(lambda row: row * 2)(x)")
    ),
    "write that gradients forbid": Case(_forward("y = x.detach().requires_grad_()", "y.relu_()", "return y")),
    "write into one of several views": Case(
        _with(
            "self.linear = nn.Linear(4, 4)",
            "x = self.linear(x)",
            "for part in x.chunk(2, 1):",
            "    part.add_(x.sum().item())",
            "return x",
        )
    ),
    "write behind the back of versions": Case(
        _with("self.identity = nn.Identity()", "y = self.identity(x * 1)", "y.data.mul_(2)", "return y")
    ),
    "feature that asks for gradients and is overwritten": Case(
        _with(
            "self.identity = nn.Identity()",
            "y = self.identity(x.detach().requires_grad_())",
            "x += 1",
            "return x",
        )
    ),
    "question whether it is the same object": Case(_forward("y = x.contiguous()", "return x + 1 if y is x else y")),
    "other shape of the same object": Case(
        _with("self.identity = nn.Identity()", "y = self.identity(x)", "x.squeeze_()", "return torch.ones(*y.size())"),
        shape=(1, 4, 6, 6),
    ),
    "counter in a global": Case("CALLS = {'n': 0}\n" + _forward("CALLS['n'] += 1", "return x * CALLS['n']")),
    "counter of a class": Case(_forward("Model.calls = getattr(Model, 'calls', 0) + 1", "return x * Model.calls")),
    "error that is caught": Case(
        _forward("try:", "    return x.view(-1, 8)", "except RuntimeError:", "    return x * 2")
    ),
    "attribute that is assigned before it is read, and another that is not": Case(
        _with(
            "self.last, self.rows = None, 0",
            "y = x if self.last is None else x + self.last.mean()",
            "self.last = x.detach()",
            "self.rows = y.shape[0]",
            "return y + self.rows",
        )
    ),
    "entries of a tensor of forward's own that are set": Case(
        _forward("mask = torch.zeros(4)", "mask[:1] = 1", "return x * mask.sum()")
    ),
    "inputs that are compared as objects": Case(
        _forward("if x is y:", "    y += y", "return y").replace("self, x", "self, x, y"), signature="x, y"
    ),
    "memory that is given to a tensor twice": Case(
        _with(
            "self.norm = nn.BatchNorm1d(4)",
            "for _ in range(2):",
            "    if x.requires_grad:",
            "        x.set_(x.clone())",
            "    x = self.norm(x)",
            "return x",
        ),
        grad=True,
    ),
    "inference mode": Case(_forward("with torch.inference_mode():", "    y = x.sum()", "return x")),
    "index of the bytes of a number": Case(
        "import operator\n" + _forward("return x, operator.index(x.element_size() * x.shape[0])")
    ),
    "module that is opened at its second call only": Case(
        _with(
            "self.block, self.identity = Outer(), nn.Identity()",
            "return self.identity(self.block(self.identity(x + 1)))",
        ).replace("class Model", _TRANSPOSING + "class Model")
    ),
    "smallest of a size and a float": Case(_forward("return x, min(x.numel(), 2.5)")),
    "float that is compared with a size": Case(_forward("return x * 2 if 2.5 < x.shape[0] else x")),
    "float before a chain of comparisons": Case(_forward("return x * 2 if 2.5 < x.shape[0] + 1 < 40 else x")),
    "mode of gradients in a module that falls back": Case(
        _with(
            "self.blocks = nn.ModuleList([Block(), Block()])",
            "for block in self.blocks:",
            "    x = block(x)",
            "with torch.set_grad_enabled(self.training):",
            "    pass",
            "return x",
        ).replace("class Model", _remembering("torch.enable_grad()") + "class Model")
    ),
    "autocast in a module that falls back": Case(
        _with(
            "self.block, self.linear = Block(), nn.Linear(4, 4)",
            "with torch.autocast('cpu'):",
            "    x = self.linear(self.block(self.linear(x)))",
            "return self.linear(x.float())",
        ).replace("class Model", _remembering("torch.autocast('cpu', enabled=False)") + "class Model")
    ),
    "module that returns its input in a tuple, until it has run often": Case(
        _with(
            "self.block, self.relu = Block(), nn.ReLU(inplace=True)",
            "y = self.block(x)[0]",
            "self.relu(x)",
            "return x",
        ).replace("class Model", _RETURNING_ITS_INPUT + "class Model")
    ),
    "stride as an index": Case("import operator\n" + _forward("return x, operator.index(x.stride(0))")),
    "write to what reshape copies, or does not": Case(
        _with(
            "self.one, self.two = nn.Identity(), nn.Identity()",
            "x = self.one(x.repeat_interleave(2, dim=0)[::2])",
            "x.add_(1)",
            "x.reshape(-1)[0] = 2",
            "return self.two(x.view(x.shape[0], -1, 2))",
        )
    ),
    "float of numpy": Case("import numpy as np\n" + _forward("return x, np.sqrt(x.shape[0])")),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_case_gives_what_the_model_gives_or_refuses(name: str, library: Library) -> None:
    verdict = judge(CASES[name], library)
    assert not verdict.invalid
    assert not verdict.findings, str(verdict)
