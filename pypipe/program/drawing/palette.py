"""The colours of the kinds of action: one set for paper and screen, and its nearest terminal colours."""

from __future__ import annotations

from dataclasses import dataclass

from pypipe.program.actions import Kind


@dataclass(frozen=True, slots=True)
class Colour:
    """How one kind of action is coloured.

    Args:
        fill: sRGB, `#rrggbb`.
        text: the colour of what is written on it: black or white.
        terminal: for even and odd rows of stages, or microbatches, the numbers of two xterm colours.
        terminal_text: of what is written on those.
    """

    fill: str
    text: str
    terminal: tuple[int, int]
    terminal_text: int


# Kinds of compute are told apart by hue by every common kind of colour vision, and by lightness alone in grey print:
# CIE L* 87, 54, 71 and 34. Orange, vermilion and the lighter blue are Okabe and Ito's (jfly.uni-koeln.de/color). What
# replicas do together once a step is grey.
COLOURS = {
    Kind.F: Colour("#bfe0f5", "#000000", (153, 117), 16),
    Kind.B: Colour("#d55e00", "#000000", (166, 172), 16),
    Kind.I: Colour("#e69f00", "#000000", (214, 220), 16),
    Kind.W: Colour("#5e3c99", "#ffffff", (61, 98), 231),
    Kind.UNSHARD: Colour("#dddddd", "#000000", (252, 252), 16),
    Kind.RESHARD: Colour("#eeeeee", "#000000", (254, 254), 16),
    Kind.REDUCE_GRAD: Colour("#555555", "#ffffff", (240, 240), 231),
}
