"""The opcodes of nodes."""

from __future__ import annotations

LEGAL_OPS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
