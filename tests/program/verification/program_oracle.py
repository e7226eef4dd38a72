"""A slow and simple oracle for the verifier: it counts, and runs programs action by action, again and again."""

from collections import Counter, defaultdict

from pypipe.program import Action, Channel, Kind, Program, channel_of

__all__ = ["count_slots", "is_sound", "is_sound_synchronously"]

SENDS = {Kind.SEND_F: (1, Kind.F, Kind.RECV_F), Kind.SEND_B: (-1, Kind.B, Kind.RECV_B)}
RECEIVES = {Kind.RECV_F: (-1, Kind.SEND_F), Kind.RECV_B: (1, Kind.SEND_B)}


def is_sound(program: Program) -> bool:
    """Whether a lowered program may run, found out by counting and by running it action by action."""
    return has_right_actions(program) and has_agreeing_links(program) and runs_to_end(program)


def is_sound_synchronously(program: Program) -> bool:
    """The same where both ranks of a transfer wait in it for each other."""
    return has_right_actions(program) and is_ordered(program) and runs_synchronously(program)


def is_neighbour(program: Program, stage: int, other: int) -> bool:
    return any(stage in chain.stages and other in chain.stages for chain in program.chains)


def crosses(program: Program, stage: int, other: int) -> bool:
    return is_neighbour(program, stage, other) and program.placement[stage] != program.placement[other]


def has_right_actions(program: Program) -> bool:
    everything = Counter(action for actions in program.ranks for action in actions)
    has_backward = any(action.kind in (Kind.B, Kind.I, Kind.W) for action in everything)
    wanted: list[Counter[Action]] = [Counter() for _ in program.ranks]
    for stage, rank in enumerate(program.placement):
        for microbatch in next(chain.microbatches for chain in program.chains if stage in chain.stages):
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


def link_messages(program: Program, *, sent: bool) -> dict[tuple[int, int, Kind], list[tuple[int, Kind, int]]]:
    """For source rank, target rank and kind: what each transfer carries, in order."""
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
            link = program.placement[source], program.placement[target], carried
            links[link].append((source, carried, microbatch))
    return dict(links)


def has_agreeing_links(program: Program) -> bool:
    return link_messages(program, sent=True) == link_messages(program, sent=False)


def is_ordered(program: Program) -> bool:
    """Whether each action of a list comes after those of the same list that it needs."""
    for actions in program.ranks:
        seen: set[Action] = set()
        mine = set(actions)
        for action in actions:
            stage, microbatch = action.stage, action.microbatch
            back, on = stage - is_neighbour(program, stage, stage - 1), stage + is_neighbour(program, stage, stage + 1)
            needed: list[tuple[int, Kind]] = []
            match action.kind:
                case Kind.F:
                    needed = [(stage, Kind.RECV_F), (back, Kind.F)]
                case Kind.B | Kind.I:
                    needed = [(stage, Kind.F), (stage, Kind.RECV_B), (on, Kind.B), (on, Kind.I)]
                case Kind.W:
                    needed = [(stage, Kind.I)]
                case Kind.SEND_F:
                    needed = [(stage, Kind.F)]
                case Kind.SEND_B:
                    needed = [(stage, Kind.B), (stage, Kind.I)]
            wanted = {Action(other, kind, microbatch) for other, kind in needed} - {action}
            if not seen.issuperset(wanted & mine):
                return False
            seen.add(action)
    return True


def count_slots(program: Program) -> dict[Channel, int]:
    """For each channel, the most messages that are between their RECV and the last action that needs them."""
    slots: dict[Channel, int] = {}
    for actions in program.ranks:
        releasing = {Kind.B, Kind.W} if any(a.kind in (Kind.B, Kind.W) for a in actions) else {Kind.F}
        for position in range(len(actions)):
            posted = [a for a in actions[: position + 1] if a.kind in RECEIVES]
            gone = {(a.stage, a.microbatch) for a in actions[:position] if a.kind in releasing}
            alive = Counter(channel_of(a) for a in posted if (a.stage, a.microbatch) not in gone)
            for channel, count in alive.items():
                slots[channel] = max(count, slots.get(channel, 0))
    return slots


def runs_synchronously(program: Program) -> bool:
    """Whether all ranks get to their ends when both ranks of a transfer wait in it for each other."""
    at = [0] * program.n_ranks

    def current(rank: int) -> Action | None:
        return program.ranks[rank][at[rank]] if at[rank] < len(program.ranks[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(program.n_ranks):
            while (action := current(rank)) is not None:
                if action.kind in RECEIVES:
                    break  # its sender moves both
                if action.kind in SENDS:
                    step, _, receive = SENDS[action.kind]
                    partner = Action(action.stage + step, receive, action.microbatch)
                    peer = program.placement[partner.stage]
                    if current(peer) != partner:
                        break
                    at[peer] += 1
                at[rank] += 1
                moved = True
    return all(current(rank) is None for rank in range(program.n_ranks))


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
            if not is_neighbour(program, stage, source):
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
