"""A schedule's name as papers, torch's classes and the command line spell it: ZB-V, ScheduleZBVZeroBubble, zbv."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "spelled"]

# Plain forms of names that are not a registered one's own: what torch.distributed.pipelining and the papers say.
_ALIASES = {
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved_zb",
    "interleavedzb1p": "interleaved_zb",
    "loopedbreadthfirst": "looped_bfs",
    "breadthfirst": "looped_bfs",
    "bfs": "looped_bfs",
    "zb1p": "zb_h1",
    "zb2p": "zb_h2",
    "zbvzerobubble": "zbv",
    "zerobubblev": "zbv",
    "pipedreamflush": "1f1b",
    "onefoneb": "1f1b",
}


def spelled(name: str, known: Iterable[str]) -> str | None:
    """Find the registered name that is meant: case, hyphens, underscores, spaces and "Schedule" do not count.

    Args:
        name: in any spelling, such as "ZB-V" or "Schedule1F1B".
        known: the registered names.

    Returns:
        One of `known`, or None.
    """
    names = list(known)
    if name in names:
        return name
    plain = _plain(name)
    by_plain = {_plain(each): each for each in names}
    found = by_plain.get(plain)
    return found if found is not None else next((each for each in names if each == _ALIASES.get(plain)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest a registered name: "; did you mean 'zbv'?", or nothing where none is near."""
    by_plain = {_plain(each): each for each in known} | {
        plain: alias for plain, alias in _ALIASES.items() if alias in known
    }
    near = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.6)
    return f"; did you mean {by_plain[near[0]]!r}?" if near else ""


def _plain(name: str) -> str:
    plain = "".join(character for character in name.casefold() if character.isalnum())
    return plain.removeprefix("schedule") or plain
