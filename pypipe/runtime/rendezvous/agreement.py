"""What the ranks of a pipeline must agree on before they connect: each compares the configs of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pypipe.errors import ConfigurationError
from pypipe.program import Program
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.equal_parameters import compare_parameters
from pypipe.runtime.rendezvous.equal_ties import compare_ties

__all__ = ["comparison", "held_stages", "pieces"]

_REMEDIES = {
    "version": "install the same version of pypipe on every rank",
    "num_stages": "give every PipelineStage the same num_stages",
    "schedule": "use the same schedule class on every rank",
    "n_microbatches": "give every rank's schedule the same n_microbatches",
    "loss_fn": "give loss_fn on every rank, or on none (it is only called on the last stage)",
    "scale_grads": "give every rank's schedule the same scale_grads",
    "communicators": "give every rank the same PYPIPE_NCCL_COMMUNICATORS, or none",
    "max_ctas": "give every rank the same PYPIPE_NCCL_MAX_CTAS, or none",
    "check": "give every rank's schedule the same check=",
    "shapes": "give every rank's schedule the same shapes=",
    "program": "give every rank the same program (the same options, the same file)",
}
_SETTINGS = tuple(key for key in _REMEDIES if key != "program")


def pieces(program: Program, rank: int) -> list[int]:
    """Which pieces of the model a rank holds, in the order of the program's stages."""
    return [program.piece_of(stage) for stage, holder in enumerate(program.placement) if holder == rank]


def held_stages(program: Program, rank: int, given: Sequence[int]) -> dict[int, int]:
    """For each stage of the program on this rank, which of the given pieces it is.

    Where a rank holds both copies of a piece (DualPipe's middle rank), the first one given is the first copy.

    Args:
        program: whose placement `given` fits.
        rank: this rank.
        given: the `stage_index` of each PipelineStage, in the order in which they were given.

    Returns:
        For each stage of the program, the position in `given`.
    """
    left = list(enumerate(given))
    held = {}
    for stage, holder in enumerate(program.placement):
        if holder == rank:
            found = next(entry for entry in left if entry[1] == program.piece_of(stage))
            left.remove(found)
            held[stage] = found[0]
    return held


def comparison(program: Program | None, mismatch: str | None) -> Callable[[Sequence[Config]], None]:
    """The comparison of all configs, which raises the same ConfigurationError on every rank, or on none.

    Args:
        program: what is to run; None where num_stages does not fit the number of ranks.
        mismatch: how it does not fit; raised where the ranks agree about it.
    """

    def compare(configs: Sequence[Config]) -> None:
        _require_equal(configs, _SETTINGS)
        if mismatch is not None:
            raise ConfigurationError(mismatch)
        assert program is not None
        _require_equal(configs, ["program"])  # last: it follows from the others
        _require_placed(configs, program)
        compare_ties([config.tied for config in configs], copies=len(program.chains))
        if len(program.chains) > 1:
            compare_parameters(
                [
                    (rank, piece, copy)
                    for rank, config in enumerate(configs)
                    for piece, copy in zip(config.stages, config.copies, strict=True)
                ]
            )

    return compare


def _require_equal(configs: Sequence[Config], keys: Sequence[str]) -> None:
    """Names all keys that differ at once."""
    differing = []
    for key in keys:
        values = [getattr(config, key) for config in configs]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {_shown(value)}" for rank, value in enumerate(values))
            differing.append(f"about {key} ({listed}): {_REMEDIES[key]}")
    if differing:
        raise ConfigurationError("the ranks disagree " + ";\n".join(differing))


def _shown(value: object) -> str:
    return " and ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _require_placed(configs: Sequence[Config], program: Program) -> None:
    """Each rank has the stages that the program places on it."""
    given = [sorted(config.stages) for config in configs]
    wanted = [sorted(pieces(program, rank)) for rank in range(program.n_ranks)]
    if given == wanted:
        return
    linear = wanted == [[rank] for rank in range(program.n_ranks)]
    table = "; ".join(f"rank {rank}: {_words(stages)}" for rank, stages in enumerate(wanted))
    remedy = "usually stage_index=rank" if linear else f"{program.name} places them so: {table}"
    holders = [(stage, rank) for rank, stages in enumerate(given) for stage in stages]
    copies = len(program.chains)
    for stage, count in sorted(Counter(stage for stage, _ in holders).items()):
        if count > copies:
            ranks = sorted(rank for held, rank in holders if held == stage)
            where = "on ranks " + " and ".join(map(str, ranks)) if len(set(ranks)) > 1 else f"on rank {ranks[0]}"
            often = "once" if copies == 1 else f"{copies} times, once for each copy of the model"
            raise ConfigurationError(
                f"stage_index {stage} is given {'more than once' if copies == 1 else f'{count} times'}, {where}: "
                f"every stage is built {often} ({remedy})"
            )
    for rank, stages in enumerate(given):
        for stage in sorted((Counter(stages) - Counter(wanted[rank])).elements()):
            places = [str(there) for there, there_wanted in enumerate(wanted) if stage in there_wanted]
            raise ConfigurationError(
                f"rank {rank} holds stage {stage}, but {program.name} places stage {stage} on rank "
                f"{' and '.join(places)}: build it there ({remedy}), or give PipelineStage a group of the same ranks "
                "in another order"
            )
    for rank, stages in enumerate(given):
        missing = list((Counter(wanted[rank]) - Counter(stages)).elements())
        if missing:
            raise ConfigurationError(
                f"rank {rank} does not hold {_words(missing)}, which {program.name} places there: give that rank's "
                f"schedule a PipelineStage for each of its stages ({remedy})"
            )


def _words(stages: Sequence[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
