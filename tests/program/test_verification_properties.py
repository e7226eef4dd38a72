"""The verifier against a slow and simple oracle: on mutated programs, and on random users' programs."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pypipe.program import Action, Kind, Program, ProgramError, gpipe, lower, one_f_one_b, verify

SENDS = {Kind.SEND_F: (1, Kind.F, Kind.RECV_F), Kind.SEND_B: (-1, Kind.B, Kind.RECV_B)}
RECEIVES = {Kind.RECV_F: (-1, Kind.SEND_F), Kind.RECV_B: (1, Kind.SEND_B)}


def is_sound(program: Program) -> bool:
    """Whether a lowered program may run, found out by counting and by running it action by action."""
    return has_right_actions(program) and has_agreeing_links(program) and has_slots(program) and runs_to_end(program)


def crosses(program: Program, stage: int, other: int) -> bool:
    return 0 <= other < program.n_stages and program.placement[stage] != program.placement[other]


def has_right_actions(program: Program) -> bool:
    everything = Counter(action for actions in program.ranks for action in actions)
    has_backward = any(action.kind in (Kind.B, Kind.I, Kind.W) for action in everything)
    wanted: list[Counter[Action]] = [Counter() for _ in program.ranks]
    for stage, rank in enumerate(program.placement):
        for microbatch in range(program.n_microbatches):
            kinds = [Kind.F]
            if has_backward:
                is_split = Action(stage, Kind.I, microbatch) in everything
                kinds += [Kind.I, Kind.W] if is_split else [Kind.B]
            if crosses(program, stage, stage + 1):
                kinds += [Kind.SEND_F, Kind.RECV_B] if has_backward else [Kind.SEND_F]
            if crosses(program, stage, stage - 1):
                kinds += [Kind.RECV_F, Kind.SEND_B] if has_backward else [Kind.RECV_F]
            wanted[rank].update(Action(stage, kind, microbatch) for kind in kinds)
    return wanted == [Counter(actions) for actions in program.ranks]


def link_messages(program: Program, *, sent: bool) -> dict[tuple[int, int, Kind], list[tuple[int, int]]]:
    """For source rank, target rank and kind: source stage and microbatch of each transfer in order."""
    links = defaultdict(list)
    for actions in program.ranks:
        for stage, kind, microbatch in ((a.stage, a.kind, a.microbatch) for a in actions):
            if sent and kind in SENDS:
                source, target, carried = stage, stage + SENDS[kind][0], SENDS[kind][1]
            elif not sent and kind in RECEIVES:
                source, target = stage + RECEIVES[kind][0], stage
                carried = SENDS[RECEIVES[kind][1]][1]
            else:
                continue
            links[program.placement[source], program.placement[target], carried].append((source, microbatch))
    return dict(links)


def has_agreeing_links(program: Program) -> bool:
    return link_messages(program, sent=True) == link_messages(program, sent=False)


def has_slots(program: Program) -> bool:
    """Whether no RECV stands where its channel has as many messages as are ever alive at once."""
    for (_, target_rank, kind), messages in link_messages(program, sent=False).items():
        actions = program.ranks[target_rank]
        step = 1 if kind is Kind.F else -1

        def find(stage: int, microbatch: int, *kinds: Kind, actions: tuple[Action, ...] = actions) -> int:
            wanted = [Action(stage, kind, microbatch) for kind in kinds]
            return max(position for position, action in enumerate(actions) if action in wanted)

        has_backward = any(action.kind in (Kind.B, Kind.W) for action in actions)
        spans = []
        for source, microbatch in messages:
            stage = source + step
            posted = find(stage, microbatch, Kind.RECV_F if kind is Kind.F else Kind.RECV_B)
            used = find(stage, microbatch, *((Kind.F,) if kind is Kind.F else (Kind.B, Kind.I)))
            released = find(stage, microbatch, *((Kind.B, Kind.W) if has_backward else (Kind.F,)))
            spans.append([source, posted, used, released])
        for index, span in enumerate(spans):
            span[2] = min(later[2] for later in spans[index:])
        for source in {span[0] for span in spans}:
            mine = [span for span in spans if span[0] == source]
            positions = range(len(actions))
            needed = max(sum(used <= at <= released for _, _, used, released in mine) for at in positions)
            if any(sum(posted <= at <= released for _, posted, _, released in mine) > needed for at in positions):
                return False
    return True


def runs_to_end(program: Program) -> bool:
    """Whether each rank can do its actions in order, when a SEND waits for its RECV to be posted."""
    done: set[Action] = set()
    at = [0] * program.n_ranks

    def may_run(action: Action) -> bool:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch

        def did(kind: Kind, other: int = stage) -> bool:
            if kind is Kind.B and Action(other, Kind.I, microbatch) in done:
                return True
            return Action(other, kind, microbatch) in done

        def has(kind: Kind, message: Kind, send: Kind, source: int) -> bool:
            if not 0 <= source < program.n_stages:
                return True
            return did(message) and did(send, source) if crosses(program, stage, source) else did(kind, source)

        if kind in SENDS:
            step, producer, receive = SENDS[kind]
            return did(producer) and did(receive, stage + step)
        if kind in RECEIVES:
            return True
        if kind is Kind.F:
            return has(Kind.F, Kind.RECV_F, Kind.SEND_F, stage - 1)
        if kind is Kind.W:
            return did(Kind.I)
        return did(Kind.F) and has(Kind.B, Kind.RECV_B, Kind.SEND_B, stage + 1)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program.ranks):
            while at[rank] < len(actions) and may_run(actions[at[rank]]):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    return all(at[rank] == len(actions) for rank, actions in enumerate(program.ranks))


def is_verified(program: Program) -> bool:
    try:
        verify(program)
    except ProgramError as error:
        assert error.rank is not None
        assert f"rank {error.rank}, position {error.position}, {error.action}" in str(error)
        return False
    return True


def split_backwards(program: Program) -> Program:
    halves = (Kind.I, Kind.W)
    lists = [
        [Action(a.stage, k, a.microbatch) for a in actions for k in (halves if a.kind is Kind.B else (a.kind,))]
        for actions in program.ranks
    ]
    return replace(program, name=f"{program.name}, split", ranks=tuple(map(tuple, lists)))


@st.composite
def users_programs(draw: st.DrawFn) -> Program:
    """Any order that any placement allows: at each turn some rank does some action whose inputs are there."""
    n_ranks, n_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_stages = draw(st.integers(1, 4))
    placement = tuple(draw(st.integers(0, n_ranks - 1)) for _ in range(n_stages))
    split = draw(st.booleans())
    backward = Kind.I if split else Kind.B
    todo = {
        Action(stage, kind, microbatch)
        for stage in range(n_stages)
        for kind in ((Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B))
        for microbatch in range(n_microbatches)
    }
    lists: list[list[Action]] = [[] for _ in range(n_ranks)]

    def needs(action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            return [Action(stage - 1, Kind.F, microbatch)]
        if action.kind is Kind.W:
            return [Action(stage, Kind.I, microbatch)]
        return [Action(stage, Kind.F, microbatch), Action(stage + 1, backward, microbatch)]

    while todo:
        action = draw(st.sampled_from(sorted(a for a in todo if not todo.intersection(needs(a)))))
        todo.remove(action)
        lists[placement[action.stage]].append(action)
    return Program("user's", n_microbatches, placement, tuple(map(tuple, lists)))


fixed_programs = st.builds(
    lambda builder, n_ranks, n_microbatches, change: change(builder(n_ranks, n_microbatches)),
    st.sampled_from([gpipe, one_f_one_b]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([lambda program: program, split_backwards, Program.forward_only]),
)


def mutate(program: Program, data: st.DataObject) -> Program:
    """Drop, duplicate or move one action, or swap two, in the list of one rank."""
    rank = data.draw(st.sampled_from([r for r, actions in enumerate(program.ranks) if actions]))
    actions = list(program.ranks[rank])
    positions = st.integers(0, len(actions) - 1)
    one, other = data.draw(positions), data.draw(positions)
    match data.draw(st.sampled_from(["drop", "duplicate", "move", "swap"])):
        case "drop":
            del actions[one]
        case "duplicate":
            actions.insert(other, actions[one])
        case "move":
            actions.insert(other, actions.pop(one))
        case "swap":
            actions[one], actions[other] = actions[other], actions[one]
    return replace(program, ranks=(*program.ranks[:rank], tuple(actions), *program.ranks[rank + 1 :]))


@settings(deadline=None, max_examples=300)
@given(fixed_programs, st.data())
def test_a_mutated_lowered_program_is_rejected_unless_it_is_sound_all_the_same(
    program: Program, data: st.DataObject
) -> None:
    lowered = lower(program)
    assert is_sound(lowered), lowered.text()
    assert is_verified(lowered), lowered.text()
    mutated = mutate(lowered, data)
    sound = is_sound(mutated)
    event(f"sound: {sound}")
    assert is_verified(mutated) == sound, mutated.text()


@settings(deadline=None, max_examples=300)
@given(fixed_programs, st.data())
def test_a_mutated_compute_program_is_rejected_unless_its_lowering_is_sound(
    program: Program, data: st.DataObject
) -> None:
    mutated = mutate(program, data)
    try:
        lowered = lower(mutated)
    except ProgramError:
        event("refused by lower")
        assert not is_complete_and_locally_ordered(mutated), mutated.text()
        return
    event("lowered")
    assert is_complete_and_locally_ordered(mutated), mutated.text()
    assert is_verified(lowered) == is_sound(lowered), lowered.text()


def is_complete_and_locally_ordered(program: Program) -> bool:
    """Whether the compute actions alone are right, when results of other ranks are always there."""
    everything = [action for actions in program.ranks for action in actions]
    has_backward = any(action.kind is not Kind.F for action in everything)
    for stage in range(program.n_stages):
        for microbatch in range(program.n_microbatches):
            order = "".join(a.kind.label for a in everything if (a.stage, a.microbatch) == (stage, microbatch))
            if order not in (("FB", "FIW") if has_backward else ("F",)):
                return False
    return True


@settings(deadline=None, max_examples=300)
@given(users_programs())
def test_any_order_that_respects_dependencies_lowers_to_agreeing_links_and_bounded_slots(
    program: Program,
) -> None:
    lowered = lower(program)
    assert has_right_actions(lowered), lowered.text()
    assert has_agreeing_links(lowered), lowered.text()
    assert has_slots(lowered), lowered.text()
    assert lowered.compute_only() == program


@settings(deadline=None, max_examples=300)
@given(users_programs(), st.data())
def test_verifier_and_oracle_agree_on_users_programs_and_their_mutations(program: Program, data: st.DataObject) -> None:
    lowered = lower(program)
    sound = is_sound(lowered)
    event(f"lowering sound: {sound}")
    assert is_verified(lowered) == sound, lowered.text()
    mutated = mutate(lowered, data)
    assert is_verified(mutated) == is_sound(mutated), mutated.text()


@settings(deadline=None, max_examples=100)
@given(users_programs())
def test_a_program_fails_to_verify_only_where_sends_would_need_buffering(program: Program) -> None:
    try:
        verify(lower(program))
    except ProgramError as error:
        assert "deadlock" in str(error)
        assert "SEND" in str(error)


def test_the_oracle_itself_tells_right_from_wrong() -> None:
    lowered = lower(one_f_one_b(2, 2))
    assert is_sound(lowered)
    assert not is_sound(replace(lowered, ranks=lowered.ranks[::-1]))
    assert not is_sound(one_f_one_b(2, 2))
    with pytest.raises(ProgramError):
        verify(replace(lowered, ranks=lowered.ranks[::-1]))
