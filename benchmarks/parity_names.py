"""Compare the node names of featx with those of torchvision's extractor, and say why they differ where they do."""

from __future__ import annotations

import difflib
import gc
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import timm
import torch
import torchvision
from models import Library, build_without_weights
from parity_records import EQUAL, MEANT, MODES, TRACED, Mode, Outcome, Record, message_of
from torch import nn
from torchvision.models import feature_extraction

import featx

Names = dict[Mode, list[str]]

_NUMBER = re.compile(r"_[0-9]+$")
_SHOWN = 3


class NameCheck:
    """Compares names, and keeps those of torchvision in files: they take far longer, and only new versions change them.

    Args:
        folder: where the names of torchvision are kept, in a folder for each set of versions.
    """

    def __init__(self, folder: Path) -> None:
        versions = (f"torch-{torch.__version__}", f"torchvision-{torchvision.__version__}", f"timm-{timm.__version__}")
        self._folder = folder / "-".join(versions)

    def run(self, record: Record) -> None:
        """Fill in `record` for the model that it names.

        featx traces a fresh model, and torchvision another one, which it changes. Both do so in both modes or not at
        all, as their public functions do.
        """
        model = build_without_weights(record.library, record.model)
        record.parameters = sum(parameter.numel() for parameter in model.parameters())
        ours, record.featx = _names_or_error(partial(featx.get_graph_node_names, tracer="symbolic"), model)
        theirs, record.torchvision = self._names_of_torchvision(record.library, record.model)
        if ours is None or theirs is None:
            return
        reasons = Reasons(model)
        record.modes = {mode: reasons.compare(ours[mode], theirs[mode]) for mode in MODES}

    def _names_of_torchvision(self, library: Library, name: str) -> tuple[Names | None, str]:
        path = self._folder / library / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        model = build_without_weights(library, name)
        found = _names_or_error(feature_extraction.get_graph_node_names, model)
        del model
        gc.collect()  # a traced model and its proxies refer to each other
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        return found


def _names_or_error(
    list_names: Callable[..., tuple[list[str], list[str]]], model: nn.Module
) -> tuple[Names | None, str]:
    try:
        train, evaluation = list_names(model, suppress_diff_warning=True)
    except Exception as error:  # whatever a model raises in a trace is the answer
        return None, message_of(error)
    return {"train": train, "eval": evaluation}, TRACED


class Reasons:
    """Explains differences of names by what the submodules and parameters of a model are called.

    torchvision numbers repeated names and first takes off what looks like such a number. So it takes a real module
    `ln_1` for a repeated `ln`, and a call of a function `flatten` takes the name of a module `flatten` that runs later.
    featx keeps real names.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {path for path, _ in model.named_modules() if path}
        tensors = [path for path, _ in (*model.named_parameters(), *model.named_buffers())]
        self._modules = modules
        self._stripped_modules = {_strip(path) for path in modules if _NUMBER.search(path)}
        self._tensors = {path.replace(".", "_") for path in tensors}
        self._stripped_tensors = {_strip(name) for name in self._tensors if _NUMBER.search(name)}

    def compare(self, ours: Sequence[str], theirs: Sequence[str]) -> Outcome:
        """Return whether names are equal, differ for reasons that are meant, or differ otherwise."""
        if ours == theirs:
            return Outcome(EQUAL, f"{len(ours)} names")
        if len(ours) != len(theirs):
            return Outcome("unexplained", _first_edits(ours, theirs))
        reasons: dict[str, list[str]] = {}
        unexplained: list[str] = []
        for own, other in zip(ours, theirs, strict=True):
            if own == other:
                continue
            reason = self._reason(own, other)
            pairs = unexplained if reason is None else reasons.setdefault(reason, [])
            pairs.append(f"`{own}`, torchvision `{other}`")
        if unexplained:
            return Outcome("unexplained", f"{len(unexplained)} of {len(ours)}: {'; '.join(unexplained[:_SHOWN])}")
        return Outcome(MEANT, "; ".join(f"{len(pairs)} times {why}: {pairs[0]}" for why, pairs in reasons.items()))

    def _reason(self, own: str, other: str) -> str | None:
        stem = _strip(other)
        real = next((name for name in (own, _strip(own)) if self._is_real(name)), None)
        if real is None or stem not in (real, _strip(real)):
            return None
        if stem in self._stripped_modules or stem.rpartition(".")[2] in self._stripped_tensors:
            return "a real name ends in a number"
        if stem in self._modules:
            return "a function has the name of a module"
        return None

    def _is_real(self, name: str) -> bool:
        return name in self._modules or name.rpartition(".")[2] in self._tensors


def _strip(name: str) -> str:
    return _NUMBER.sub("", name)


def _first_edits(ours: Sequence[str], theirs: Sequence[str]) -> str:
    edits: list[str] = []
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for tag, start, stop, own_start, own_stop in matcher.get_opcodes():
        if tag != "equal":
            edits.append(f"torchvision has {theirs[start:stop][:_SHOWN]}, featx {ours[own_start:own_stop][:_SHOWN]}")
    return f"{len(ours)} names, torchvision {len(theirs)}: {'; '.join(edits[:_SHOWN])}"
