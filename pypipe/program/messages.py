"""Messages: what crosses between ranks, numbered, so that passes over long programs index flat lists."""

from __future__ import annotations

from collections.abc import Sequence

from pypipe.program.actions import Action, Kind
from pypipe.program.programs import Channel, Program


class Messages:
    """The numbers of a program's messages.

    The output that stage s takes for microbatch m has the number s * M + m; the gradient that it takes has
    (S + s) * M + m. So `number // M` tells channels apart: s stands for the channel of outputs to stage s, S + s for
    that of gradients to it.

    Args:
        program: with or without transfers.

    Attributes:
        count: one more than the largest number, 2 * S * M.
        bases: for each kind and stage, the number of the message of microbatch 0 that its action waits for, sends or
            receives; -1 where none crosses ranks, because the neighbour is on the same rank or does not exist.
        sent: likewise, the message that a SEND must carry once the action has run.
        received: for each `number // M`, the rank that takes the channel's messages; -1 where there is no such channel.
    """

    def __init__(self, program: Program) -> None:
        n_stages, n_microbatches, placement = program.n_stages, program.n_microbatches, program.placement
        size = n_stages * n_microbatches
        self._program = program
        self.count = 2 * size
        none = [-1] * n_stages
        inputs, gradients, outputs, input_gradients = list(none), list(none), list(none), list(none)
        self.received = [-1] * (2 * n_stages)
        for stage in range(n_stages):
            before, after = program.previous_stage(stage), program.next_stage(stage)
            if before is not None and placement[before] != placement[stage]:
                inputs[stage] = stage * n_microbatches
                input_gradients[stage] = size + before * n_microbatches
                self.received[stage] = placement[stage]
            if after is not None and placement[after] != placement[stage]:
                gradients[stage] = size + stage * n_microbatches
                outputs[stage] = after * n_microbatches
                self.received[n_stages + stage] = placement[stage]
        self.bases = {
            Kind.F: inputs,
            Kind.B: gradients,
            Kind.I: gradients,
            Kind.W: none,
            Kind.RECV_F: inputs,
            Kind.RECV_B: gradients,
            Kind.SEND_F: outputs,
            Kind.SEND_B: input_gradients,
            Kind.UNSHARD: none,
            Kind.RESHARD: none,
            Kind.REDUCE_GRAD: none,
        }
        self.sent = {Kind.F: outputs, Kind.B: input_gradients, Kind.I: input_gradients, Kind.W: none}

    def channel(self, number: int) -> Channel:
        """Find the channel that carries a message."""
        stage, is_gradient = self._target(number)
        if is_gradient:
            after = self._program.next_stage(stage)
            assert after is not None  # a gradient comes from somewhere
            return Channel(Kind.B, after, stage)
        before = self._program.previous_stage(stage)
        assert before is not None
        return Channel(Kind.F, before, stage)

    def send(self, number: int) -> Action:
        """Find the SEND that puts a message on its link."""
        channel = self.channel(number)
        kind = Kind.SEND_F if channel.kind is Kind.F else Kind.SEND_B
        return Action(channel.source_stage, kind, number % self._program.n_microbatches)

    def receive(self, number: int) -> Action:
        """Find the RECV that takes a message from its link."""
        stage, is_gradient = self._target(number)
        return Action(stage, Kind.RECV_B if is_gradient else Kind.RECV_F, number % self._program.n_microbatches)

    def producer(self, number: int) -> Action:
        """Find the F, B or I that makes a message."""
        channel, microbatch = self.channel(number), number % self._program.n_microbatches
        actions = self._program.ranks[self._program.placement[channel.source_stage]]
        kinds = (Kind.F,) if channel.kind is Kind.F else (Kind.I, Kind.B)
        candidates = [Action(channel.source_stage, kind, microbatch) for kind in kinds]
        return next((action for action in candidates if action in actions), candidates[-1])

    def reason(self, number: int, at: Sequence[int]) -> str:
        """Say why a rank cannot go on without a message.

        Args:
            number: the message.
            at: for each rank, the position that it has reached.
        """
        producer = self.producer(number)
        peer = self._program.placement[producer.stage]
        there = self._program.ranks[peer][at[peer]]
        rank = self.received[number // self._program.n_microbatches]
        action = self._program.ranks[rank][at[rank]]
        return f"waits in {action} for {producer} of rank {peer}, which is at position {at[peer]}, {there}"

    def _target(self, number: int) -> tuple[int, bool]:
        channel = number // self._program.n_microbatches
        n_stages = self._program.n_stages
        return (channel - n_stages, True) if channel >= n_stages else (channel, False)
