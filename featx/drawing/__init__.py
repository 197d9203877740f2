"""Turn a graph into a picture that is folded by modules: dot, SVG, or a page that opens in any browser."""
