"""The links that there are. A new one is a file beside this one, and an entry here."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.errors import ConfigurationError
from pypipe.program import Link
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.transport.links.c10d import C10dTransport
from pypipe.runtime.transport.links.nccl import NcclTransport
from pypipe.runtime.transport.links.shm import ShmTransport
from pypipe.runtime.transport.links.transport import Transport

__all__ = ["CHOICES", "TRANSPORTS", "transport_of"]

TRANSPORTS: dict[str, type[Transport]] = {
    # The first that reaches both ends is chosen.
    transport.name: transport
    for transport in (ShmTransport, NcclTransport, C10dTransport)
}
CHOICES = ("auto", *TRANSPORTS)
"""What PYPIPE_LINK may say."""


def transport_of(link: Link, configs: Sequence[Config]) -> type[Transport]:
    """What carries a link; every rank decides alike.

    Raises:
        ConfigurationError: nothing can.
    """
    ends = (configs[link.source_rank], configs[link.target_rank])
    choices = {config.link for config in configs} - {"auto"}
    if len(choices) > 1:
        raise ConfigurationError(f"the ranks' PYPIPE_LINK disagree: {', '.join(sorted(choices))}; give all the same")
    choice = choices.pop() if choices else None
    fitting = (transport for transport in TRANSPORTS.values() if transport.reaches(ends))
    transport = TRANSPORTS[choice] if choice is not None else next(fitting)
    problem = transport.problem(link, ends, chosen=choice is not None)
    if problem is not None:
        raise ConfigurationError(problem)
    return transport
