"""Timelines as SVG: sound XML, the right boxes at the right places, colours that survive grey print."""

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from pypipe.program import (
    Kind,
    Program,
    add_stage_actions,
    build,
    builder_names,
    gpipe,
    one_f_one_b,
    simulate,
)
from pypipe.program.drawing import Panel, chrome_trace, html, read_chrome_trace, svg, terminal
from pypipe.program.drawing.palette import COLOURS

NAMESPACE = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> dict[str, list[tuple[float, float, float]]]:
    """By colour, the x, y and width of every action's box."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for group in ElementTree.fromstring(text).iter(f"{NAMESPACE}g"):
        for box in group.findall(f"{NAMESPACE}rect"):
            if (fill := group.get("fill")) is not None:
                x, y, width = (float(box.attrib[name]) for name in ("x", "y", "width"))
                found.setdefault(fill, []).append((x, y, width))
    return found


def test_each_action_is_a_box_of_its_kind_s_colour_with_its_length() -> None:
    found = boxes(svg(simulate(gpipe(2, 3), forward=1.0, backward=2.0)))
    assert {fill: len(each) for fill, each in found.items()} == {
        colour.fill: 6 for kind, colour in COLOURS.items() if kind.label in "FB"
    }
    forward, backward = (next(c.fill for k, c in COLOURS.items() if k.label == label) for label in "FB")
    unit = found[forward][0][2]
    assert all(width == pytest.approx(unit, abs=0.011) for _, _, width in found[forward])
    assert all(width == pytest.approx(2 * unit, abs=0.011) for _, _, width in found[backward])
    # Rank 1's first backward begins after 4 forwards of time.
    left = min(x for x, _, _ in found[forward])
    assert sorted(x for x, y, _ in found[backward] if y == max(y for _, y, _ in found[backward]))[0] == pytest.approx(
        left + 4 * unit, abs=0.05
    )


def test_the_same_timeline_always_gives_the_same_bytes_and_no_foreign_parts() -> None:
    first, second = (svg(one_f_one_b(4, 8)) for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)
    tags = {element.tag.removeprefix(NAMESPACE) for element in root.iter()}
    assert tags == {"svg", "title", "g", "rect", "text", "path"}
    assert not re.search(r"href|url\(|<image|<script|<style", first)


def test_titles_are_escaped() -> None:
    name = "<b> & \"quotes\" 'n' ]]>"
    root = ElementTree.fromstring(svg(Panel(simulate(gpipe(1, 1)), name)))
    assert name in [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert root.attrib["aria-label"].startswith(name)


@pytest.mark.parametrize("n_microbatches", [1, 16, 300])
@pytest.mark.parametrize("width", [1, 300, 760])
def test_boxes_keep_within_the_picture(n_microbatches: int, width: int) -> None:
    text = svg(one_f_one_b(3, n_microbatches), width=width)
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"]) == max(width, 300)
    for each in boxes(text).values():
        assert all(x > 0 and x + box <= float(root.attrib["width"]) for x, _, box in each)
        assert all(y + 20 < float(root.attrib["height"]) for _, y, _ in each)


def test_bars_tell_a_rank_s_stages_apart() -> None:
    from pypipe.program import Action

    actions = tuple(map(Action.parse, ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]))
    text = svg(Program("three", 1, (0, 0, 0), (actions,)))
    root = ElementTree.fromstring(text)
    paths = [path.attrib for path in root.iter(f"{NAMESPACE}path")]
    in_boxes = [path["d"].count("M") for path in paths if "fill" in path and "stroke" not in path]
    assert in_boxes == [3, 3]  # none for stage 0, one for 1, two for 2; for F and for B
    assert "earlier stage" in text
    assert "earlier stage" not in svg(gpipe(2, 2))


def lightness(colour: str) -> float:
    """CIE L* of an sRGB colour: what grey print makes of it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    y = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


def test_kinds_differ_in_grey_and_their_text_can_be_read() -> None:
    grey = {kind: lightness(colour.fill) for kind, colour in COLOURS.items() if kind.is_compute}
    assert all(abs(grey[one] - grey[other]) > 15 for one, other in combinations(grey, 2))
    # Text contrasts with its box by 4.5 to 1 at least (WCAG 2.1, 1.4.3), in luminance.
    for colour in COLOURS.values():
        light, dark = sorted((luminance(colour.fill), luminance(colour.text)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    level = (lightness(colour) + 16) / 116
    return level**3 if level > 6 / 29 else 3 * (6 / 29) ** 2 * (level - 4 / 29)


def test_what_replicas_do_once_a_step_is_drawn_in_every_way() -> None:
    program = add_stage_actions(build("zbv", 2, 4), reduced=range(4), sharded=[1, 2])
    shown = sum(action.kind is not Kind.RESHARD for actions in program.ranks for action in actions)
    boxes_of = boxes(svg(program))
    assert sum(map(len, boxes_of.values())) >= shown
    assert len(boxes_of[COLOURS[Kind.REDUCE_GRAD].fill]) == 4
    assert len(boxes_of[COLOURS[Kind.UNSHARD].fill]) == 2
    cells = terminal(program, width=200).split()
    assert {"0R", "1R", "2R", "3R", "1U", "2U"} <= set(cells)
    (read,) = read_chrome_trace(chrome_trace(program))
    assert read.timeline.program == program
    assert '"perStage":true' in html(program)


@pytest.mark.parametrize("name", builder_names())
def test_every_schedule_can_be_drawn_in_every_way(name: str) -> None:
    program = build(name, 4, 8)
    n_actions = sum(map(len, program.ranks))
    assert sum(map(len, boxes(svg(program)).values())) == n_actions
    assert len(terminal(program, width=100).splitlines()) >= 4 + 3
    (read,) = read_chrome_trace(chrome_trace(program))
    assert read.timeline.program == program
    assert html(program).count("<canvas") == 1
