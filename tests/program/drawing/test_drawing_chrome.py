"""Chrome traces: what Perfetto needs is there, and what was written can be read again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_format import complaints

from pypipe.program import build, builder_names, gpipe, one_f_one_b, simulate
from pypipe.program.drawing import Panel, chrome_trace, read_chrome_trace


def events(text: str, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_each_rank_is_a_named_process_with_complete_events() -> None:
    timeline = simulate(one_f_one_b(3, 4), forward=10.0, backward=20.5, hop=1.5)
    text = chrome_trace(Panel(timeline, in_microseconds=True))
    names = {each["pid"]: each["args"]["name"] for each in events(text, "M") if each["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1", 3: "rank 2"}  # Perfetto hides process 0
    assert {each["pid"] for each in events(text, "M") if each["name"] == "thread_name"} == {1, 2, 3}
    shown = {(e["pid"], e["args"]["action"], e["ts"], e["dur"], e["args"]["stage"]) for e in events(text, "X")}
    assert shown == {
        (1 + rank, str(action), start, end - start, action.stage)
        for rank, row in enumerate(timeline.ranks)
        for action, start, end in row
    }


def test_a_trace_of_the_format_before_is_read() -> None:
    text = chrome_trace(simulate(one_f_one_b(3, 4)))
    old = json.loads(text)
    old["otherData"]["pypipe"]["format"] = 1
    for event in old["traceEvents"]:
        event["pid"] -= 1
    assert read_chrome_trace(json.dumps(old)) == read_chrome_trace(text)


def test_arrows_lead_from_inside_what_makes_a_message_to_inside_what_uses_it() -> None:
    text = chrome_trace(simulate(one_f_one_b(3, 4), forward=1.0, backward=2.0, hop=0.5))
    starts = {event["id"]: event for event in events(text, "s")}
    ends = {event["id"]: event for event in events(text, "f")}
    assert len(starts) == len(ends) == len(events(text, "s")) == 2 * 2 * 4
    slices = events(text, "X")

    def around(arrow: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = (
            each["args"]
            for each in slices
            if each["pid"] == arrow["pid"] and each["ts"] < arrow["ts"] < each["ts"] + each["dur"]
        )
        return found

    for number, start in starts.items():
        made, used = around(start), around(ends[number])
        assert made["microbatch"] == used["microbatch"]
        assert used["stage"] - made["stage"] == (1 if start["name"] == "output" else -1)
        assert ends[number]["bp"] == "e"


def test_the_counter_of_live_activations_peaks_where_the_verifier_says() -> None:
    timeline = simulate(one_f_one_b(4, 8))
    counters = events(chrome_trace(timeline), "C")
    peaks = [max(each["args"]["count"] for each in counters if each["pid"] == 1 + rank) for rank in range(4)]
    assert peaks == list(timeline.peak_activations)
    assert [each["args"]["count"] for each in counters if each["pid"] == 1][-1] == 0


@given(st.sampled_from([gpipe, one_f_one_b]), st.integers(1, 4), st.integers(1, 5), st.floats(0, 1e6), st.booleans())
def test_what_was_written_reads_as_it_was(
    builder: Any, n_ranks: int, n_microbatches: int, backward: float, microseconds: bool
) -> None:
    timeline = simulate(builder(n_ranks, n_microbatches), forward=1.1, backward=backward)
    drawn = [Panel(timeline, "a <title>", microseconds), Panel(simulate(gpipe(1, 1)), "b")]
    read = read_chrome_trace(chrome_trace(*drawn))
    assert [(panel.title, panel.in_microseconds) for panel in read] == [("a <title>", microseconds), ("b", False)]
    for panel, written in zip(read, drawn, strict=True):
        assert panel.timeline.program == written.timeline.program
        for events, expected in zip(panel.timeline.ranks, written.timeline.ranks, strict=True):
            assert [event.action for event in events] == [event.action for event in expected]
            assert [event[1:] for event in events] == [pytest.approx(event[1:]) for event in expected]


def test_several_timelines_are_processes_side_by_side() -> None:
    text = chrome_trace(Panel(simulate(gpipe(2, 1)), "one"), Panel(simulate(gpipe(2, 1)), "other"))
    names = [each["args"]["name"] for each in events(text, "M") if each["name"] == "process_name"]
    assert names == ["rank 0, one", "rank 1, one", "rank 0, other", "rank 1, other"]
    assert len({each["id"] for each in events(text, "s")}) == 4


def damaged(change: Any) -> str:
    trace = json.loads(chrome_trace(gpipe(2, 2)))
    change(trace)
    return json.dumps(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not valid JSON: line 1"),
        ("[1]", "not a trace that pypipe wrote"),
        ('{"traceEvents": []}', "not a trace that pypipe wrote"),
        (damaged(lambda t: t["otherData"]["pypipe"].update(format=99)), "format is 99"),
        (damaged(lambda t: t["otherData"]["pypipe"].update(panels=[])), "it holds no timeline"),
        (damaged(lambda t: t["otherData"]["pypipe"]["panels"][0].pop("chains")), "timeline 0 .* damaged"),
        (damaged(lambda t: t["otherData"]["pypipe"]["panels"][0].update(placement=[1, 0])), "rank 0 cannot run 0F0"),
        (damaged(lambda t: t["traceEvents"][0].update(ph="X")), "event 0 .* damaged"),
    ],
)
def test_what_is_no_such_trace_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_chrome_trace(text)


@pytest.mark.parametrize("name", builder_names())
def test_a_trace_of_every_schedule_keeps_to_the_format(name: str) -> None:
    options = {"effort": 0.01} if name == "auto" else {}
    timeline = simulate(build(name, 4, 9, **options), forward=10, backward=21.3, hop=0.7)
    trace = json.loads(chrome_trace(Panel(timeline, "a", True), Panel(timeline, "b", True)), parse_constant=pytest.fail)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert list(complaints(trace)) == []
    # The format's unit is the microsecond.
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(timeline.step_time)
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == 2 * sum(map(len, timeline.ranks))


def test_the_format_s_check_sees_what_is_wrong() -> None:
    trace = json.loads(chrome_trace(simulate(gpipe(2, 2))))
    first = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    for change in ({"ts": -1}, {"dur": None}, {"pid": "0"}, {"tid": 7}, {"ph": "Q"}, {"dur": first["dur"] * 1.5}):
        before = dict(first)
        first.update(change)
        assert list(complaints(trace)), change
        first.clear()
        first.update(before)
    assert not list(complaints(trace))
