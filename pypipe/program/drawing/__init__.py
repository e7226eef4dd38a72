"""Drawing: timelines, simulated or measured, as text, SVG, an HTML page and a Chrome trace."""

from .chrome import chrome_trace, read_chrome_trace
from .html import html
from .panels import Panel, splits_backward
from .svg import svg
from .terminal import grid, terminal

__all__ = ["Panel", "chrome_trace", "grid", "html", "read_chrome_trace", "splits_backward", "svg", "terminal"]
