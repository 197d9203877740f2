"""Classes whose constructor is recorded when a symbolic trace calls it with traced values."""

from typing import Any

from featx.tracing.nodes.proxy import find_proxy


class ProxyableClassMeta(type):
    """The metaclass of such classes: `class Pair(metaclass=ProxyableClassMeta)`.

    `Pair(x, y)` with a proxy among its arguments, at any depth of tuples, lists and dicts, is one `call_function` node
    whose target is the class, and gives a proxy; methods of it are recorded too. Any other call makes an object.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - magic
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            return super().__call__(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", cls, args, kwargs)
