"""Assembles a rank's pipeline from its settings: the ranks meet, then stages, channels and executors are made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from pypipe.errors import ConfigurationError
from pypipe.program import Channel, Kind, Program, count_slots
from pypipe.runtime.data_parallel.wrappers import Wrapper, find_wrappers
from pypipe.runtime.rendezvous import agreement
from pypipe.runtime.rendezvous.collectives import Gatherer
from pypipe.runtime.rendezvous.config import Config
from pypipe.runtime.rendezvous.equal_parameters import describe_parameters
from pypipe.runtime.rendezvous.equal_ties import Tied
from pypipe.runtime.rendezvous.exchange import refuse
from pypipe.runtime.rendezvous.state_names import NameClash, find_clash, sketch
from pypipe.runtime.step.exchanges import Exchanges
from pypipe.runtime.step.executor import Executor
from pypipe.runtime.step.fitting import Fitted
from pypipe.runtime.step.model_copies import ModelCopies
from pypipe.runtime.step.refused import refused_copy, refused_mesh, refused_module
from pypipe.runtime.step.settings import Settings
from pypipe.runtime.step.stage_execution import StageExecution
from pypipe.runtime.step.tied_parameters import Ties, describe_ties, tie_channels
from pypipe.runtime.transport.channel import ReceiveChannel, SendChannel
from pypipe.runtime.transport.connection import Connection, connect
from pypipe.runtime.transport.local import LocalChannel

__all__ = ["Running", "assemble"]


@dataclass
class Running:
    """What there is on one rank once the ranks have met.

    Attributes:
        rank: this one.
        connection: to the other ranks.
        gatherer: of what the ranks tell each other between steps.
        slots: for each channel, how many there are.
        synchronous: whether a transfer may block both of its ranks, as on GPUs.
        fitted: the programs by their number of microbatches, with what stages do together with their replicas.
        stages: this rank's, by their number in the program.
        modules: by the same numbers, those whose parameters each stage trains: its own, and on the last one the loss
            function, where that is a module.
        wrapped: which wrappers each of this rank's modules had.
        executors: by number of microbatches and by whether they train.
        copies: where the pipeline holds two of the model.
        ties: where parameters of several stages are one weight.
        clash: of names in `state_dict`s, if there is one.
        holds_first, holds_last: whether one of the stages is the first or the last of its chain.
    """

    rank: int
    connection: Connection
    gatherer: Gatherer
    slots: Mapping[Channel, int]
    synchronous: bool
    fitted: dict[int, Fitted]
    stages: dict[int, StageExecution]
    modules: dict[int, list[nn.Module]]
    wrapped: list[list[int]]
    executors: dict[tuple[int, bool], Executor]
    copies: ModelCopies | None
    ties: Ties | None
    clash: NameClash | None
    holds_first: bool
    holds_last: bool

    def program_of(self, n_microbatches: int) -> Program | None:
        """What step() runs for this number of microbatches."""
        fitted = self.fitted[n_microbatches]
        verified = fitted.training or fitted.forward_only
        return verified.program if verified else None

    def add(self, n_microbatches: int, fitted: Fitted) -> bool:
        """Makes what runs another number of microbatches; False if that takes more slots than there are.

        The programs are the same on every rank, and so is the answer.
        """
        if self.synchronous:
            fitted = fitted.made_synchronous()
        if any(number > self.slots.get(channel, 0) for channel, number in fitted.slots.items()):
            return False
        program = fitted.programs[0].program
        fitted = self.fitted[n_microbatches] = _with_stage_actions(fitted, program, self.connection.configs)
        for training, verified in ((False, fitted.forward_only), (True, fitted.training)):
            if verified is not None:
                self.executors[n_microbatches, training] = Executor(
                    verified.program, self.rank, self.stages, self.connection.recorder, self.connection.issue
                )
        return True


def assemble(settings: Settings, n_microbatches: int, others: Mapping[int, Fitted]) -> Running:
    """Meets the other ranks and makes what runs.

    Args:
        settings: what this rank was built with.
        n_microbatches: M of the call.
        others: what is to be run with the same slots, by number of microbatches; that of the call is among them.

    Raises:
        ConfigurationError: the ranks' settings or stages do not fit together; the same on all of them.
        PeerLost: a rank's process has ended.
        PipelineTimeout: a rank did not come.
    """
    program = settings.program
    wrappers = _find_wrappers(settings)
    links = {channel: program.link_of(channel) for channel in settings.fitted.slots} if program is not None else {}
    is_synchronous = False
    slots: Mapping[Channel, int] = {}

    def slots_of(synchronous: bool) -> Mapping[Channel, int]:
        nonlocal is_synchronous, slots
        is_synchronous = synchronous
        fitted = [each.made_synchronous() if synchronous else each for each in others.values()]
        slots = count_slots([verified for each in fitted for verified in each.programs])
        return slots

    connection = connect(
        settings.world,
        settings.device,
        links,
        slots_of,
        _config(settings, wrappers, n_microbatches, others),
        agreement.comparison(program, settings.fitted.mismatch),
        settings.timeout,
        checksum="checksum" in settings.checks,
        further=lambda configs: tie_channels(program, _ties(configs)) if program is not None else {},
    )
    assert program is not None  # the comparison has seen to it
    rank = settings.world.rank
    held = agreement.held_stages(program, rank, [piece for piece, _ in settings.pieces])
    stages = _make_stages(settings, program, connection, held, wrappers)
    trained = {stage: _trained(settings, *settings.pieces[position]) for stage, position in held.items()}
    exchanges = Exchanges(connection.senders, connection.receivers, connection.issue)
    ties = copies = None
    if any(config.ties for config in connection.configs):
        whole = [stage for stage, position in held.items() if any(not each.shards for each in wrappers[position])]
        ties = Ties(program, rank, trained, _ties(connection.configs), exchanges, whole)
    if len(program.chains) > 1:
        modules = {stage: settings.pieces[position][1] for stage, position in held.items()}
        replicated = [stage for stage, position in held.items() if wrappers[position]]
        tied = ties.parameters if ties is not None else ()
        copies = ModelCopies(program, rank, modules, exchanges, settings.loss_module, replicated, tied)
    running = Running(
        rank,
        connection,
        Gatherer(settings.world, connection.prefix),
        slots,
        is_synchronous,
        {},
        stages,
        trained,
        identities(wrappers),
        {},
        copies,
        ties,
        find_clash(settings.pieces, settings.renames, _state_names(connection.configs)),
        any(program.previous_stage(stage) is None for stage in held),
        any(program.next_stage(stage) is None for stage in held),
    )
    for count, fitted in others.items():
        running.add(count, fitted)
    return running


def identities(wrappers: Sequence[Sequence[Wrapper]]) -> list[list[int]]:
    """What tells whether each module's wrappers are still the same ones."""
    return [[wrapper.identity() for wrapper in found] for found in wrappers]


def _config(
    settings: Settings,
    wrappers: Sequence[Sequence[Wrapper]],
    n_microbatches: int,
    others: Mapping[int, Fitted],
) -> Config:
    """What this rank tells the others of itself."""
    program = settings.program
    copied = program is not None and len(program.chains) > 1
    return replace(
        settings.config,
        stages=[piece for piece, _ in settings.pieces],
        n_microbatches=n_microbatches,
        program=_digest(others.values()) if program is not None else None,
        loss_fn=settings.loss is not None,
        scale_grads=settings.scale_grads,
        check=sorted(settings.checks),
        shapes="static" if settings.static else "dynamic",
        state_names=[
            sketch(module, rename) for (_, module), rename in zip(settings.pieces, settings.renames, strict=True)
        ],
        data_parallel=[[bool(found), any(each.shards for each in found)] for found in wrappers],
        copies=[describe_parameters(*_trained(settings, piece, module)) for piece, module in settings.pieces]
        if copied
        else [],
        ties=[
            list(tied) for tied in describe_ties((piece, _trained(settings, piece, m)) for piece, m in settings.pieces)
        ],
    )


def _digest(fitted: Iterable[Fitted]) -> str:
    """One word for all programs, and so for the slots that they take."""
    digests = sorted(verified.program.digest() for each in fitted for verified in each.programs)
    return digests[0] if len(set(digests)) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _trained(settings: Settings, piece: int, module: nn.Module) -> list[nn.Module]:
    """A stage's module, and on the last one the loss function, where that has parameters."""
    loss = settings.loss_module
    is_last = piece == settings.config.num_stages - 1
    return [module, loss] if is_last and loss is not None else [module]


def _ties(configs: Sequence[Config]) -> list[list[Tied]]:
    return [config.tied for config in configs]


def _state_names(configs: Sequence[Config]) -> list[tuple[int, str]]:
    return [entry for config in configs for entry in zip(config.stages, config.state_names, strict=True)]


def _make_stages(
    settings: Settings,
    program: Program,
    connection: Connection,
    held: dict[int, int],
    wrappers: Sequence[Sequence[Wrapper]],
) -> dict[int, StageExecution]:
    rank = settings.world.rank
    local = _local_channels(program, rank)
    for channel, sender in connection.senders.items():
        sender.static = settings.static and channel.kind is not Kind.W
    for channel, receiver in connection.receivers.items():
        receiver.static = settings.static and channel.kind is not Kind.W
    senders: dict[Channel, SendChannel | LocalChannel] = {**connection.senders, **local}
    receivers: dict[Channel, ReceiveChannel | LocalChannel] = {**connection.receivers, **local}
    stages = {}
    for stage, position in held.items():
        piece, module = settings.pieces[position]
        before, after = program.previous_stage(stage), program.next_stage(stage)
        stages[stage] = StageExecution(
            module,
            f"rank {rank}, stage {piece}",
            last=after is None,
            loss=settings.loss,
            scale_grads=settings.scale_grads,
            two_copies=len(program.chains) > 1,
            splits=any(action.kind is Kind.I and action.stage == stage for action in program.ranks[rank]),
            wrappers=wrappers[position],
            get_mesh=settings.get_mesh[position],
            receive_forward=None if before is None else receivers.get(Channel(Kind.F, before, stage)),
            send_forward=None if after is None else senders.get(Channel(Kind.F, stage, after)),
            receive_backward=None if after is None else receivers.get(Channel(Kind.B, after, stage)),
            send_backward=None if before is None else senders.get(Channel(Kind.B, stage, before)),
        )
        stages[stage].find_nan = "nan" in settings.checks
    return stages


def _find_wrappers(settings: Settings) -> list[list[Wrapper]]:
    """What wraps the parameters of each of this rank's modules.

    Raises:
        ConfigurationError: something that cannot be used in a stage.
    """
    wrappers = [find_wrappers(module) for _, module in settings.pieces]
    everywhere = [wrapper.identity() for found in wrappers for wrapper in found]
    others = settings.world.others()
    for (piece, module), found in zip(settings.pieces, wrappers, strict=True):
        problem = refused_module(module, others)
        if problem is None:
            problem = next((text for wrapper in found if (text := wrapper.problem(others)) is not None), None)
        if problem is None:
            problem = refused_mesh(module, others)
        copied = settings.program is not None and len(settings.program.chains) > 1
        if copied and any(wrapper.shards for wrapper in found):
            problem = (
                "fully_shard in a stage of a schedule that adds up the gradients of two copies of each parameter: "
                "use DistributedDataParallel there, or ScheduleDualPipeV"
            )
        if copied and problem is None:
            problem = refused_copy(_trained(settings, piece, module))
        if any(everywhere.count(wrapper.identity()) > 1 for wrapper in found):
            problem = (
                "one DistributedDataParallel or fully_shard is in two stages of this rank, so it cannot tell when "
                "the gradients of one are complete: wrap the stages apart"
            )
        if problem is not None:
            text = f"rank {settings.world.rank}, stage {piece}: {problem}"
            refuse(settings.world, text)
            raise ConfigurationError(text)
    return wrappers


def _with_stage_actions(fitted: Fitted, program: Program, configs: Sequence[Config]) -> Fitted:
    """The programs, with what the stages of all ranks do together with their replicas."""
    reduced: set[int] = set()
    sharded: set[int] = set()
    for rank, config in enumerate(configs):
        for stage, position in agreement.held_stages(program, rank, config.stages).items():
            reduces, shards = config.data_parallel[position]
            if reduces:
                reduced.add(stage)
            if shards:
                sharded.add(stage)
    return fitted.with_stage_actions(reduced=reduced, sharded=sharded)


def _local_channels(program: Program, rank: int) -> dict[Channel, LocalChannel]:
    """The boundaries between two stages of this rank."""
    channels = {}
    for stage, holder in enumerate(program.placement):
        after = program.next_stage(stage)
        if holder == rank and after is not None and program.placement[after] == rank:
            channels[Channel(Kind.F, stage, after)] = LocalChannel()
            channels[Channel(Kind.B, after, stage)] = LocalChannel()
    return channels
