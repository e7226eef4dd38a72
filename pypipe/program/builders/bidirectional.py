"""Schedules that feed microbatches in at both ends of the ranks: DualPipe, and its V-shaped half, DualPipeV."""

from __future__ import annotations

from pypipe.errors import ConfigurationError
from pypipe.program.actions import Action
from pypipe.program.builders.lists import PhaseList, keep_microbatches
from pypipe.program.builders.registry import register
from pypipe.program.builders.v_shaped import v_placement
from pypipe.program.programs import Chain, Program


@register("dualpipe")
def dualpipe(n_ranks: int, n_microbatches: int) -> Program:
    """DualPipe: two copies of the model, one in each direction; the F of one runs beside the B of the other.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1 and figure 5; the order of
    phases is that of https://github.com/deepseek-ai/DualPipe. There M is even and 2P or more; here M is any
    number: the first chain takes the larger half of the microbatches, and phases that have no microbatch are empty.
    A rank keeps at most P + 1 activations, and the parameters of two stages.

    Args:
        n_ranks: P, even; rank r holds stage r of the first chain and stage 2P - 1 - r of the second.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1, or P is odd.
    """
    if n_ranks % 2:
        raise ConfigurationError(
            f"dualpipe needs an even number of ranks, not {n_ranks}: its two directions meet between two ranks; "
            "dualpipev takes any number"
        )
    n_first = (n_microbatches + 1) // 2
    n_built = max(n_first, n_ranks)
    lists = []
    for rank in range(n_ranks):
        forth, back = rank, 2 * n_ranks - 1 - rank
        near, far = (forth, back) if rank < n_ranks // 2 else (back, forth)
        actions = _phases(min(rank, n_ranks - 1 - rank), n_ranks // 2, n_built, near, far)
        lists.append(
            tuple(
                action if action.stage == forth else Action(action.stage, action.kind, action.microbatch + n_first)
                for action in actions
                if action.microbatch < (n_first if action.stage == forth else n_microbatches - n_first)
            )
        )
    chains = (
        Chain(range(n_ranks), range(n_first)),
        Chain(range(n_ranks, 2 * n_ranks), range(n_first, n_microbatches)),
    )
    return Program("dualpipe", n_microbatches, v_placement(n_ranks), tuple(lists), chains)


@register("dualpipev")
def dualpipev(n_ranks: int, n_microbatches: int) -> Program:
    """DualPipeV: one half of DualPipe's ranks, with one copy of the model laid out as a V.

    Source: https://github.com/deepseek-ai/DualPipe (from Qi et al., "cut-in-half", arXiv 2405.15362). There M is 2P
    or more; here M is any number, and phases that have no microbatch are empty. A rank keeps at most 2P + 1
    activations of its halves.

    Args:
        n_ranks: P; rank r holds the stages r and 2P - 1 - r.
        n_microbatches: M.

    Raises:
        ConfigurationError: P or M is below 1.
    """
    n_built = max(n_microbatches, 2 * n_ranks)
    lists = []
    for rank in range(n_ranks):
        actions = _phases(rank, n_ranks, n_built, rank, 2 * n_ranks - 1 - rank)
        lists.append(keep_microbatches(actions, n_microbatches))
    return Program("dualpipev", n_microbatches, v_placement(n_ranks), tuple(lists))


def _phases(place: int, n_places: int, n_microbatches: int, near: int, far: int) -> list[Action]:
    """List the phases of one rank; "F0B1" of the source is a forward and then a backward here.

    Args:
        place: the rank's distance from the end where its near stage's microbatches come in.
        n_places: the ranks from that end to the turn (DualPipeV) or the middle (DualPipe).
        n_microbatches: those that pass each of the two stages; 2 * n_places or more.
        near: the stage that is nearer to the start of its chain.
        far: the other stage.
    """
    phases = PhaseList()
    beyond = n_places - 1 - place
    for _ in range(2 * beyond):
        phases.forward(near)
    for _ in range(place + 1):
        phases.forward(near)
        phases.forward(far)
    for _ in range(beyond):
        phases.input_half(far)
        phases.weight_half()
        phases.forward(far)
    for _ in range(n_microbatches - 2 * n_places + place + 1):
        phases.forward(near)
        phases.backward(far)
        phases.forward(far)
        phases.backward(near)
    for _ in range(beyond):
        phases.backward(far)
        phases.forward(far)
        phases.backward(near)
    # From the middle of this phase on, backwards are split: their W fill the bubble at the end.
    for index in range(2 * (place + 1)):
        stage = near if index % 2 else far
        if index > place:
            phases.input_half(stage)
        else:
            phases.backward(stage)
    for _ in range(beyond):
        phases.weight_half()
        phases.input_half(near)
    while phases.n_waiting():
        phases.weight_half()
    return phases.actions
