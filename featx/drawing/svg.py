"""Let Graphviz lay out a picture in dot, as SVG."""

from __future__ import annotations

import shutil
import subprocess

from featx.errors import DrawingError

# Fills in the dark, for the classes that `dot.py` writes; a picture in a page follows the reader's mode.
_DARK = {
    "io": "#1d3b28", "layer": "#1c3350", "norm": "#153a3a", "activation": "#45331a", "attention": "#44222f",
    "pool": "#32274d", "math": "#2a3038", "shape": "#20252b", "dropout": "#20252b", "module": "#262c54",
    "constant": "#38341f", "number": "#171b20", "check": "#171b20", "folder": "#171b20",
}  # fmt: skip


def render_svg(dot: str) -> str:
    """Return the picture as SVG that stands in light and dark pages.

    Raises:
        DrawingError: the program dot is not there, or fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            "an SVG is laid out by Graphviz's program 'dot', which is not found; install Graphviz (apt-get install "
            "graphviz, brew install graphviz, conda install graphviz), or save as .html, which needs nothing"
        )
    done = subprocess.run([program, "-Tsvg"], input=dot, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        raise DrawingError(f"Graphviz's program 'dot' failed: {done.stderr.strip() or done.returncode}")
    head, svg, rest = done.stdout.partition("<svg")
    opening, end, body = rest.partition(">")
    return f"{head}{svg}{opening}{end}\n{_style()}{body}"


def _style() -> str:
    fills = "".join(
        f" .{kind} > g > a > :is(path, polygon) {{ fill: {fill}; stroke: #59626d }}" for kind, fill in _DARK.items()
    )
    return (
        "<style>@media (prefers-color-scheme: dark) { text { fill: #e3e7ec }"
        " .edge path { stroke: #7f8a97 } .edge polygon { fill: #7f8a97; stroke: #7f8a97 }"
        f"{fills} .cluster path {{ fill: #ffffff0a; stroke: #454d57 }}"
        " .marked > g > a > path { stroke: #ff8552 } }</style>"
    )
