"""Drawing: timelines, simulated or measured, as text, SVG, an HTML page and a Chrome trace."""

from pypipe.program.drawing.chrome import chrome_trace, read_chrome_trace
from pypipe.program.drawing.html import html
from pypipe.program.drawing.panels import Panel, splits_backward
from pypipe.program.drawing.svg import svg
from pypipe.program.drawing.terminal import grid, terminal

__all__ = ["Panel", "chrome_trace", "grid", "html", "read_chrome_trace", "splits_backward", "svg", "terminal"]
