"""Timelines as an HTML page: its data and structure, and in a browser, where there is one, its zoom and hover."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import pytest

from pypipe.program import Event, Timeline, gpipe, one_f_one_b, simulate
from pypipe.program.drawing import Panel, html, svg
from pypipe.program.drawing.palette import COLOURS

BROWSER = chromium.find()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt-get install chromium")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_every_event_with_its_live_activations() -> None:
    timeline = simulate(one_f_one_b(4, 8), forward=1.0, backward=2.5)
    (panel,) = data_of(html(timeline))["panels"]
    labels = [kind["label"] for kind in data_of(html(timeline))["kinds"]]
    shown = [
        [(f"{stage}{labels[kind]}{m}", start, end) for start, end, kind, stage, m, _ in row["events"]]
        for row in panel["rows"]
    ]
    assert shown == [[(str(action), start, end) for action, start, end in row] for row in timeline.ranks]
    assert [row["peak"] for row in panel["rows"]] == [4, 3, 2, 1]
    assert [max(event[5] for event in row["events"]) for row in panel["rows"]] == [4, 3, 2, 1]
    # Rank 3 keeps one at a time; rank 0's first backward sees all four.
    assert [event[5] for event in panel["rows"][0]["events"]][:5] == [1, 2, 3, 4, 4]


class Structure(HTMLParser):
    """The tags of a page, and whether they close in order."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_names_what_keys_reach() -> None:
    page = html(Panel(simulate(gpipe(2, 2)), "measured"), Panel(simulate(gpipe(2, 2)), "predicted"))
    tags = Structure(page).tags
    assert not [attrs for _, attrs in tags if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    policy = next(attrs["content"] for tag, attrs in tags if tag == "meta" and "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    canvases = [attrs for tag, attrs in tags if tag == "canvas"]
    assert [attrs["tabindex"] for attrs in canvases] == ["0", "0"]
    assert [(attrs["aria-label"] or "").split(":")[0] for attrs in canvases] == ["measured", "predicted"]
    assert page.count("<tr><th") == 2 * 3


def test_a_hostile_title_stays_text() -> None:
    title = "</script><script>alert(1)</script> @@data@@ &amp;"
    page = html(Panel(simulate(gpipe(1, 1)), title))
    Structure(page)
    assert data_of(page)["panels"][0]["title"] == title
    assert "<script>alert" not in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert BROWSER is not None
    with chromium.Page(BROWSER, tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def shown(browser: chromium.Page, tmp_path: Path) -> chromium.Page:
    """1F1B with P = 2, M = 2, times 1 and 2, measured and predicted; all of it takes 9."""
    timeline = simulate(one_f_one_b(2, 2))
    late = Timeline(timeline.program, tuple(tuple(Event(a, s * 1.5, e * 1.5) for a, s, e in r) for r in timeline.ranks))
    (tmp_path / "page.html").write_text(html(Panel(timeline, "predicted"), Panel(late, "measured")), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    return browser


def place(page: chromium.Page, panel: int, rank: int, at: float) -> tuple[float, float]:
    """Where on the screen a rank's row shows a time."""
    point = page.value(
        f"(() => {{ const line = timelines[{panel}], box = line.canvas.getBoundingClientRect();"
        f"return [box.left + line.x({at}), box.top + line.top({rank}) + ROW / 2]; }})()"
    )
    return point[0], point[1]


def text(page: chromium.Page, name: str) -> str:
    return str(page.value(f"document.getElementById('{name}').textContent"))


@needs_browser
def test_the_pointer_shows_action_times_and_live_activations(shown: chromium.Page) -> None:
    shown.mouse("mouseMoved", *place(shown, 0, 0, 4.5))
    assert text(shown, "details") == (
        "predicted, rank 0: 0B0 (backward, stage 0, microbatch 0), start 4, end 6, takes 2, "
        "live activations 2 of at most 2"
    )
    shown.mouse("mouseMoved", *place(shown, 1, 1, 2.0))
    assert text(shown, "details").startswith("measured, rank 1: 1F0 (forward, stage 1, microbatch 0), start 1.5, end 3")
    shown.mouse("mouseMoved", *place(shown, 0, 0, 3.0))
    assert text(shown, "details") == "No action is chosen."
    assert shown.complaints() == []
    assert [url.partition(":")[0] for url in shown.requested()] == ["file"]


@needs_browser
def test_boxes_have_their_kind_s_colour_where_the_data_says(shown: chromium.Page) -> None:
    for rank, at, fill in ((0, 0.1, "F"), (0, 4.2, "B"), (1, 1.1, "F"), (1, 2.3, "B")):
        pixel = shown.value(
            f"(() => {{ const line = timelines[0], x = line.x({at}), y = line.top({rank}) + 3;"
            "return [...line.context.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data]; })()"
        )
        colour = next(colour.fill for kind, colour in COLOURS.items() if kind.label == fill)
        assert "#" + bytes(pixel[:3]).hex() == colour


@needs_browser
def test_wheel_drag_keys_and_buttons_move_the_view_of_all_timelines(shown: chromium.Page) -> None:
    assert text(shown, "range") == "0 to 13.5"
    x, y = place(shown, 0, 0, 4.5)
    shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    first, last = map(float, text(shown, "range").split(" to "))
    assert 0 < first < 4.5 < last < 13.5
    assert place(shown, 0, 0, 4.5)[0] == pytest.approx(x, abs=1)  # the time under the pointer stays there
    assert place(shown, 1, 0, 4.5)[0] == pytest.approx(x, abs=1)
    shown.mouse("mousePressed", x, y, button="left", clickCount=1)
    shown.mouse("mouseMoved", x + 50, y, button="left")
    shown.mouse("mouseReleased", x + 50, y, button="left")
    assert place(shown, 0, 0, 4.5)[0] == pytest.approx(x + 50, abs=1)
    shown.key("0")  # the press has brought the focus
    assert text(shown, "range") == "0 to 13.5"
    shown.key("+")
    assert text(shown, "range") == "2.25 to 11.25"
    shown.key("[")
    assert text(shown, "range") == "0 to 9"
    shown.value("document.getElementById('all').focus()")
    shown.key("Enter")
    assert text(shown, "range") == "0 to 13.5"
    for _ in range(60):
        shown.value("zoom(2)")
    assert shown.complaints() == []


@needs_browser
def test_the_wheel_alone_scrolls_a_page_that_is_taller_than_the_window(browser: chromium.Page, tmp_path: Path) -> None:
    (tmp_path / "tall.html").write_text(html(simulate(one_f_one_b(40, 4))), encoding="utf-8")
    browser.open(tmp_path / "tall.html")
    whole = text(browser, "range")
    x, y = place(browser, 0, 10, 30)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert text(browser, "range") == whole
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=2)  # Ctrl
    assert text(browser, "range") != whole
    browser.mouse("mouseMoved", *place(browser, 0, 10, 10.5))
    assert "rank 10: 10F0" in text(browser, "details")
    assert browser.complaints() == []


@needs_browser
def test_arrow_keys_go_from_action_to_action(shown: chromium.Page) -> None:
    shown.value("timelines[0].canvas.focus()")
    for key, action in [
        ("ArrowRight", "rank 0: 0F0"),
        ("ArrowRight", "rank 0: 0F1"),
        ("ArrowRight", "rank 0: 0B0"),
        ("ArrowDown", "rank 1: 1B1"),
        ("ArrowLeft", "rank 1: 1F1"),
        ("ArrowUp", "rank 0: 0B0"),
        ("ArrowUp", "rank 0: 0B0"),
        ("Escape", "No action is chosen."),
    ]:
        shown.key(key)
        assert action in text(shown, "details"), key


@needs_browser
@pytest.mark.parametrize("width", [300, 760])
def test_all_text_of_an_svg_lies_inside_it(width: int, browser: chromium.Page, tmp_path: Path) -> None:
    timeline = simulate(one_f_one_b(12, 24), forward=1e3, backward=2e3, hop=10)
    (tmp_path / "picture.svg").write_text(svg(Panel(timeline, "1f1b", True), width=width), encoding="utf-8")
    browser.open(tmp_path / "picture.svg")
    outside = browser.value(
        "(() => { const all = document.documentElement.getBoundingClientRect();"
        "return [...document.querySelectorAll('text')].filter(each => { const box = each.getBoundingClientRect();"
        "return box.left < all.left || box.right > all.right || box.top < all.top || box.bottom > all.bottom; })"
        ".map(each => each.textContent); })()"
    )
    assert outside == []
