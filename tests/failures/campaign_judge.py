"""Whether what the ranks saw of a case of the fault campaign is right."""

from __future__ import annotations

from campaign import Seen
from campaign_cases import RAISING, Case, expected, n_pieces

_OWN = {  # what the culprit raises
    **dict.fromkeys(RAISING, "ValueError"),
    "vanish": "Vanished",
    "corrupt": "CorruptionError",
    "nan": "NonFiniteError",
    "late": "PipelineTimeout",
    "stop": "PipelineTimeout",
    "leave": "",
}
_THEIRS = {
    "vanish": "PeerLost",
    "kill": "PeerLost",
    "leave": "PeerLost",
    "late": "PipelineTimeout",
    "stop": "PipelineTimeout",
}


def judge(case: Case, everyone: list[Seen | None]) -> list[str]:
    """What is wrong with what the ranks saw; None: it was killed."""
    found: list[str] = []
    alive = [(rank, seen) for rank, seen in enumerate(everyone) if seen is not None]
    at = next(seen.at for _, seen in alive if seen.at or case.fault == "leave")
    culprit = case.culprit

    def expect(holds: bool, what: str, rank: int, seen: Seen) -> None:
        if not holds:
            found.append(f"{case}, at {at}: rank {rank}: {what}: {seen.kind}: {seen.text[:1500]} [{seen.notes}]")

    for rank, seen in alive:
        expect(not seen.left, f"left over: {seen.left}", rank, seen)
        if rank == culprit:
            expect(seen.kind == _OWN[case.fault], "its own error", rank, seen)
            if case.fault in (*RAISING, "corrupt", "nan"):
                expect(at in seen.notes, "the note names the action", rank, seen)
            continue
        expect(seen.kind == _THEIRS.get(case.fault, "RemoteStageError"), "the kind of error", rank, seen)
        match case.fault:
            case "raise" | "module" | "hook" | "loss" | "corrupt" | "nan":
                expect((seen.rank, seen.action) == (culprit, at), "the first cause", rank, seen)
                expect(_OWN[case.fault] in seen.text, "the origin's own words", rank, seen)
            case "vanish" | "kill":
                expect(f"rank {culprit} is gone" in seen.text, "who is gone", rank, seen)
                expect(f"it was at {at}" in seen.text, "what it did last", rank, seen)
            case "leave":
                expect(f"rank {culprit} has left" in seen.text, "who left", rank, seen)
            case "late":
                expect(f"waits for rank {culprit}" in seen.text and "doing" in seen.text, "who is late", rank, seen)
            case "stop":
                rows = [line.split() for line in seen.text.splitlines()]
                silent = [row[0] for row in rows if row[2:5] == ["DOES", "NOT", "ANSWER"]]
                expect(silent == [str(culprit)], "who does not answer", rank, seen)
        expect("failed and cannot go on" in seen.again, "a second step() is refused", rank, seen)
    want = expected(n_pieces(case.program), case.n_microbatches)
    for rank, seen in alive:
        for what in ("before", "after"):
            for number, flat in getattr(seen, what):
                pairs = [pair for p, q in zip(flat, want[number], strict=True) for pair in zip(p, q, strict=True)]
                worst = max(abs(a - b) for a, b in pairs)
                if not worst < 1e-12:
                    found.append(f"{case}: rank {rank}, piece {number}: gradients {what} the fault differ by {worst:g}")
    return found
