from __future__ import annotations

import builtins
import inspect
import re

import pytest

import featx
from featx import errors

# What code written for torch.fx and torchvision catches today.
CAUGHT_TODAY = [
    (errors.GraphError, RuntimeError),
    (errors.NodeInUseError, RuntimeError),
    (errors.ForeignNodeError, RuntimeError),
    (errors.TargetError, RuntimeError),
    (errors.TargetError, AttributeError),
    (errors.ArgumentTypeError, TypeError),
    (errors.TraceError, ValueError),
    (errors.ControlFlowError, ValueError),
    (errors.ControlFlowError, TypeError),
    (errors.ModulePathError, ValueError),
    (errors.ModulePathError, NameError),
    (errors.PatternError, ValueError),
    (errors.LeftOutError, AttributeError),
    (errors.LeftOutImportError, ImportError),
    (errors.RequestError, ValueError),
    (errors.NodeNameError, ValueError),
    (errors.NodeNameError, KeyError),
]


def error_classes() -> list[type[Exception]]:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    own = [each for each in classes if each.__module__ == errors.__name__]
    return [each for each in own if issubclass(each, Exception) and not issubclass(each, Warning)]


@pytest.mark.parametrize(("error", "builtin"), CAUGHT_TODAY)
def test_error_is_caught_by_the_builtin_that_people_catch_today(
    error: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise error("message")


def test_every_error_is_a_featx_error() -> None:
    assert all(issubclass(error, errors.FeatxError) for error in error_classes())


def test_tree_at_the_top_of_the_file_draws_every_error() -> None:
    drawn = {word for word in re.findall(r"\w+Error", errors.__doc__ or "") if not hasattr(builtins, word)}
    assert drawn == {error.__name__ for error in error_classes()}


def test_every_error_is_a_public_name_of_the_package() -> None:
    assert [error.__name__ for error in error_classes() if error.__name__ not in featx.__all__] == []


def test_message_of_a_key_error_is_printed_without_quotes() -> None:
    assert str(errors.NodeNameError("No node 'layer9' in ResNet.")) == "No node 'layer9' in ResNet."
