"""Programs that nobody would write: any placement, any order of actions that dependencies allow."""

from __future__ import annotations

import functools
import random

from pypipe.program import Action, Kind, Program, ProgramError, lower, verify


def _draw(n_ranks: int, n_stages: int, n_microbatches: int, source: random.Random) -> Program:
    """Every rank does at each turn something that is ready, or nothing."""
    placement = [*range(n_ranks), *(source.randrange(n_ranks) for _ in range(n_stages - n_ranks))]
    source.shuffle(placement)
    split = [source.random() < 0.5 for _ in range(n_stages)]
    ranks: list[list[Action]] = [[] for _ in range(n_ranks)]
    done: set[Action] = set()
    left = {Action(s, Kind.F, m) for s in range(n_stages) for m in range(n_microbatches)}
    for s in range(n_stages):
        for m in range(n_microbatches):
            left |= {Action(s, Kind.I, m), Action(s, Kind.W, m)} if split[s] else {Action(s, Kind.B, m)}

    def is_ready(action: Action) -> bool:
        s, m = action.stage, action.microbatch
        if action.kind is Kind.W:
            return Action(s, Kind.I, m) in done
        if action.kind is Kind.F:
            return s == 0 or Action(s - 1, Kind.F, m) in done
        after = {Action(s + 1, Kind.B, m), Action(s + 1, Kind.I, m)}
        return Action(s, Kind.F, m) in done and (s == n_stages - 1 or bool(after & done))

    eager = source.random()
    while left:
        ended = []
        for rank in range(n_ranks):
            ready = sorted(action for action in left if placement[action.stage] == rank and is_ready(action))
            if ready and source.random() < 0.9:
                backwards = [action for action in ready if action.kind is not Kind.F]
                chosen = source.choice(backwards if backwards and source.random() < eager else ready)
                ranks[rank].append(chosen)
                ended.append(chosen)
        done.update(ended)
        left.difference_update(ended)
    return Program("random", n_microbatches, tuple(placement), tuple(map(tuple, ranks)))


@functools.cache
def random_program(n_ranks: int, n_stages: int, n_microbatches: int, seed: int) -> Program:
    """The first one that the verifier accepts."""
    source = random.Random(f"{n_ranks} {n_stages} {n_microbatches} {seed}")
    while True:
        program = _draw(n_ranks, n_stages, n_microbatches, source)
        try:
            verify(lower(program))
            verify(lower(program.forward_only()))
            return program
        except ProgramError:
            continue


def one_rank(n_stages: int, n_microbatches: int, *, split: bool) -> Program:
    """All stages on one rank, two microbatches at a time; W as late as can be."""
    stages = range(n_stages)
    actions: list[Action] = []
    late: list[Action] = []
    for m in range(n_microbatches + 1):
        if m < n_microbatches:
            actions += [Action(s, Kind.F, m) for s in stages]
        if m > 0:
            actions += [Action(s, Kind.I if split else Kind.B, m - 1) for s in reversed(stages)]
            late += [Action(s, Kind.W, m - 1) for s in stages if split]
    return Program("one rank", n_microbatches, (0,) * n_stages, ((*actions, *late),))
