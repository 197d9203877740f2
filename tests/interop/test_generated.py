from __future__ import annotations

import pytest
import torch

from featx.interop.generated import hidden_name, put_modes_back


def forward(*lines: str, parameters: str = "self, x") -> str:
    return "\n".join([f"def forward({parameters}):", *["    " + line for line in lines]])


@pytest.mark.parametrize(
    ("source", "inputs", "expected"),
    [
        (forward("y = f(x)", "return y"), {"x": "x"}, None),
        (forward("x_1 = x", "y = f(x_1)"), {"x": "x_1"}, None),
        (forward("x_1 = x", "x = f(x_1)", "return x"), {"x": "x_1"}, None),
        (forward("x_1 = x", "y = x(x_1)"), {"x": "x_1"}, "x"),
        (forward("y = x", "x = y", parameters="self, x, y"), {"x": "y", "y": "x"}, "y"),
        (forward("len_1 = len", "return len_1", parameters="self, len"), {"len": "len"}, None),
        (forward("len_1 = len", "y = 'len'", "return len(y)", parameters="self, len"), {"len": "len"}, "len"),
        (forward("y = max(1, 2)", "max_1 = max", parameters="self, max"), {"max": "max_1"}, "max"),
    ],
)
def test_hidden_names_are_found(source: str, inputs: dict[str, str], expected: str | None) -> None:
    assert hidden_name(source, inputs) == expected


def run(*lines: str) -> None:
    body = [part for line in lines for part in (line, "\n")]
    source = forward(*"".join(put_modes_back(body)).split("\n"), parameters="")
    namespace = {"torch": torch}
    exec(source, namespace)
    namespace["forward"]()


ENTER = "region = torch.amp.autocast_mode._enter_autocast('cpu', torch.bfloat16, True, True)"
LEAVE = "left = torch.amp.autocast_mode._exit_autocast(region)"


@pytest.mark.parametrize(
    "lines",
    [
        ("torch._C._set_grad_enabled(False)",),
        (ENTER, LEAVE + ";  region = left = None"),
        (ENTER + ";  region = None",),
        (ENTER, ENTER.replace("region", "other"), LEAVE.replace("region", "other")),
        ("region_mode = 1", ENTER),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_as_before(lines: tuple[str, ...], fails: bool) -> None:
    if fails:
        with pytest.raises(ZeroDivisionError):
            run(*lines, "1 / 0")
    else:
        run(*lines)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_caller_that_has_gradients_off_keeps_them_off() -> None:
    with torch.no_grad():
        run("torch._C._set_grad_enabled(True)", "assert torch.is_grad_enabled()")
        assert not torch.is_grad_enabled()
