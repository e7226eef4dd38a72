"""The verifier against a slow and simple oracle: on mutated programs, and on random users' programs."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from program_oracle import count_slots, is_sound, is_sound_synchronously

from pypipe.program import Action, Chain, Kind, Program, ProgramError, build, builder_names, lower, one_f_one_b, verify

COMPUTE = [kind for kind in Kind if kind.is_compute]


def is_verified(program: Program, *, synchronous: bool = False) -> bool:
    try:
        verified = verify(program, synchronous=synchronous)
    except ProgramError as error:
        assert error.rank is not None
        assert f"rank {error.rank}, position {error.position}, {error.action}" in str(error)
        return False
    assert verified.slots == count_slots(program)
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
    cut, share = draw(st.integers(0, n_stages - 1)), draw(st.integers(0, n_microbatches))
    chains: tuple[Chain, ...] = (Chain(range(n_stages), range(n_microbatches)),)
    if cut:
        first = Chain(range(cut), range(share))
        chains = first, Chain(range(cut, n_stages), range(share, n_microbatches))
    todo = set()
    split = {
        (stage, microbatch): draw(st.booleans())
        for chain in chains
        for stage in chain.stages
        for microbatch in chain.microbatches
    }
    for (stage, microbatch), is_split in split.items():
        kinds = (Kind.F, Kind.I, Kind.W) if is_split else (Kind.F, Kind.B)
        todo |= {Action(stage, kind, microbatch) for kind in kinds}
    lists: list[list[Action]] = [[] for _ in range(n_ranks)]

    def needs(action: Action) -> list[Action]:
        stage, kind, microbatch = action
        stages = next(chain.stages for chain in chains if stage in chain.stages)
        if kind is Kind.F:
            return [Action(stage - 1, Kind.F, microbatch)] if stage - 1 in stages else []
        if kind is Kind.W:
            return [Action(stage, Kind.I, microbatch)]
        after = [Action(stage + 1, back, microbatch) for back in (Kind.B, Kind.I) if stage + 1 in stages]
        return [Action(stage, Kind.F, microbatch), *after]

    while todo:
        action = draw(st.sampled_from(sorted(a for a in todo if not todo.intersection(needs(a)))))
        todo.remove(action)
        lists[placement[action.stage]].append(action)
    return Program("user's", n_microbatches, placement, tuple(map(tuple, lists)), chains)


def build_any(name: str, n_ranks: int, n_microbatches: int) -> Program:
    return build(name, n_ranks + (name == "dualpipe" and n_ranks % 2), n_microbatches)


fixed_programs = st.builds(
    lambda name, n_ranks, n_microbatches, change: change(build_any(name, n_ranks, n_microbatches)),
    st.sampled_from(builder_names()),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([lambda program: program, split_backwards, Program.forward_only]),
)


def mutate(program: Program, data: st.DataObject) -> Program:
    """Drop, duplicate or move one action, or swap two, in the list of one rank."""
    ranks = [rank for rank, actions in enumerate(program.ranks) if actions]
    if not ranks:
        return program
    rank = data.draw(st.sampled_from(ranks))
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


lowerings = st.booleans()


@settings(deadline=None, max_examples=300)
@given(fixed_programs | users_programs(), lowerings, st.data())
def test_a_mutated_lowered_program_is_rejected_unless_it_is_sound_all_the_same(
    program: Program, synchronous: bool, data: st.DataObject
) -> None:
    is_right = is_sound_synchronously if synchronous else is_sound
    lowered = lower(program, synchronous=synchronous)
    assert is_right(lowered), lowered.text()
    assert is_verified(lowered, synchronous=synchronous), lowered.text()
    mutated = mutate(lowered, data)
    sound = is_right(mutated)
    event(f"sound: {sound}")
    assert is_verified(mutated, synchronous=synchronous) == sound, mutated.text()


@settings(deadline=None, max_examples=200)
@given(fixed_programs | users_programs())
def test_either_lowering_is_judged_alike_by_verifier_and_oracle_under_the_other_rules(program: Program) -> None:
    early, ordered = lower(program), lower(program, synchronous=True)
    assert is_sound(ordered)
    assert is_verified(ordered)
    sound = is_sound_synchronously(early)
    event(f"sound: {sound}")
    assert is_verified(early, synchronous=True) == sound, early.text()


@settings(deadline=None, max_examples=200)
@given(fixed_programs | users_programs(), st.data())
def test_a_mutated_compute_program_is_refused_or_its_lowering_is_sound(program: Program, data: st.DataObject) -> None:
    mutated = mutate(program, data)
    try:
        lowered = lower(mutated)
    except ProgramError:
        event("refused by lower")
        assert not is_complete(mutated) or not runs_with_everything_buffered(mutated), mutated.text()
        return
    event("lowered")
    assert is_complete(mutated), mutated.text()
    assert is_sound(lowered), lowered.text()
    assert is_verified(lowered), lowered.text()


def is_complete(program: Program) -> bool:
    """Whether each stage and microbatch has its F and one backward or two halves, or every one its F only."""
    everything = Counter(action for actions in program.ranks for action in actions)
    is_forward_only = all(action.kind is Kind.F for action in everything)
    for chain in program.chains:
        for stage in chain.stages:
            for microbatch in chain.microbatches:
                kinds = [
                    kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W) if Action(stage, kind, microbatch) in everything
                ]
                backwards = [[]] if is_forward_only else [[Kind.B], [Kind.I, Kind.W]]
                if kinds[:1] != [Kind.F] or kinds[1:] not in backwards:
                    return False
    return set(everything.values()) <= {1}


def runs_with_everything_buffered(program: Program) -> bool:
    """Whether the ranks get to their ends when each result is everywhere as soon as it is made."""
    todo = [list(actions) for actions in program.ranks]
    missing = {action for actions in todo for action in actions}

    def needs(action: Action) -> set[Action]:
        stage, kind, microbatch = action
        before, after = program.previous_stage(stage), program.next_stage(stage)
        if kind is Kind.F:
            return set() if before is None else {Action(before, Kind.F, microbatch)}
        if kind is Kind.W:
            return {Action(stage, Kind.I, microbatch)}
        gradients = set() if after is None else {Action(after, Kind.B, microbatch), Action(after, Kind.I, microbatch)}
        return {Action(stage, Kind.F, microbatch), *gradients}

    moved = True
    while moved:
        moved = False
        for actions in todo:
            while actions and not missing & needs(actions[0]):
                missing.discard(actions.pop(0))
                moved = True
    return not any(todo)


def test_the_oracle_itself_tells_right_from_wrong() -> None:
    lowered = lower(one_f_one_b(2, 2))
    assert is_sound(lowered)
    assert not is_sound(replace(lowered, ranks=lowered.ranks[::-1]))
    assert not is_sound(one_f_one_b(2, 2))
    with pytest.raises(ProgramError):
        verify(replace(lowered, ranks=lowered.ranks[::-1]))
