"""The operators of Python that a proxy records, by their names in the module operator, as format strings."""

_ARITHMETIC = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "div": "/", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^", "matmul": "@",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
_UNARY = {"pos": "+", "neg": "-", "invert": "~"}


def _binary(symbols: dict[str, str]) -> dict[str, str]:
    return {name: f"{{}} {symbol} {{}}" for name, symbol in symbols.items()}


REFLECTABLE = {**_binary(_ARITHMETIC), "getitem": "{}[{}]"}
MAGIC = {**_binary(_COMPARISONS), **{name: f"{symbol}{{}}" for name, symbol in _UNARY.items()}, **REFLECTABLE}
INPLACE = {
    **{f"i{name.rstrip('_')}": f"{{}} {symbol}= {{}}" for name, symbol in _ARITHMETIC.items() if name != "div"},
    "setitem": "{}[{}] = {}",
}
