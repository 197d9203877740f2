"""The operators of Python that a proxy records, by their names in the module operator, as format strings."""

from featx.ir.python_operators import ARITHMETIC, COMPARISONS, UNARY

# torch.fx has the division of Python 2, too.
_ARITHMETIC = {**ARITHMETIC, "div": "/"}


def _binary(symbols: dict[str, str]) -> dict[str, str]:
    return {name: f"{{}} {symbol} {{}}" for name, symbol in symbols.items()}


REFLECTABLE = {**_binary(_ARITHMETIC), "getitem": "{}[{}]"}
MAGIC = {**_binary(COMPARISONS), **{name: f"{symbol}{{}}" for name, symbol in UNARY.items()}, **REFLECTABLE}
INPLACE = {
    **{f"i{name.rstrip('_')}": f"{{}} {symbol}= {{}}" for name, symbol in ARITHMETIC.items()},
    "setitem": "{}[{}] = {}",
}
