"""Actions and their text form."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypipe.program import Action, Kind

PER_STAGE = [Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD]
actions = st.one_of(
    st.builds(
        Action,
        st.integers(0, 999),
        st.sampled_from([kind for kind in Kind if kind not in PER_STAGE]),
        st.integers(0, 9999),
    ),
    st.builds(Action, st.integers(0, 999), st.sampled_from(PER_STAGE), st.just(0)),
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("0B13", Action(0, Kind.B, 13)),
        ("1I2", Action(1, Kind.I, 2)),
        ("1W2", Action(1, Kind.W, 2)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("3RECV_F0", Action(3, Kind.RECV_F, 0)),
        ("3SEND_B0", Action(3, Kind.SEND_B, 0)),
        ("2RECV_B0", Action(2, Kind.RECV_B, 0)),
        ("2UNSHARD", Action(2, Kind.UNSHARD, 0)),
        ("2RESHARD", Action(2, Kind.RESHARD, 0)),
        ("12REDUCE_GRAD", Action(12, Kind.REDUCE_GRAD, 0)),
    ],
)
def test_an_action_is_written_as_torch_writes_it(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action
    assert Action.parse(f" {text}\n") == action


@given(actions)
def test_every_action_survives_its_text_form_and_pickling(action: Action) -> None:
    assert Action.parse(str(action)) == action
    copy = pickle.loads(pickle.dumps(action))
    assert copy == action
    assert hash(copy) == hash(action)


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "2F-1", "2 F0", "2SEND0", "2F0,", "2F1.0", "2REDUCE_GRAD0", "UNSHARD"],
)
def test_a_text_that_is_no_action_is_refused_with_the_form_to_use(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an action: write stage, kind and microbatch, such as 2F0") as error:
        Action.parse(text)
    assert repr(text) in str(error.value)


TEXTS = ["0F1", "0B0", "0I0", "0W0", "0SEND_F0", "0RECV_F0", "0SEND_B0", "0RECV_B0", "0UNSHARD", "0REDUCE_GRAD", "1F0"]


def test_actions_sort_by_stage_then_kind_then_microbatch() -> None:
    ordered = [Action.parse(text) for text in TEXTS]
    assert sorted([*ordered[4:], *ordered[:4]]) == ordered


def test_each_kind_is_compute_or_send_or_receive_or_for_the_stage_as_a_whole() -> None:
    for kind in Kind:
        assert kind.is_compute + kind.is_send + kind.is_receive + kind.is_per_stage == 1
        assert kind.is_transfer == (kind.is_send or kind.is_receive)
        assert kind.label == kind.value
    assert [kind.label for kind in Kind if kind.is_compute] == ["F", "B", "I", "W"]
