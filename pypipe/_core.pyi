"""
The C++ core of pypipe: control sockets, links and channels. Not a public interface.
"""
from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['ActionEntry', 'ActionKind', 'ActionLog', 'Cause', 'CauseKind', 'ChannelReceiver', 'ChannelSender', 'CoreError', 'CudaGpu', 'CudaLibrary', 'Envelope', 'Hub', 'LayoutAnnouncer', 'LayoutBook', 'Message', 'NcclDirection', 'NcclEdge', 'NcclEdges', 'NcclGroup', 'NcclLibrary', 'NcclReceiveLink', 'NcclSendLink', 'NcclWatchdog', 'OutgoingLayout', 'PART_ALIGNMENT', 'RankReport', 'RankStatus', 'ReceiveLink', 'RecordFile', 'SendLink', 'ShmReceiveLink', 'ShmSendLink', 'WaitPolicy', 'check_tag', 'loaded_library', 'open_cuda', 'open_nccl', 'pack', 'read_record']
class CoreError(RuntimeError):
    fault: typing.ClassVar[str] = ''
class ActionKind:
    """
    Kinds of actions, as the program has them.
    
    Members:
    
      F
    
      B
    
      I
    
      W
    
      SEND_F
    
      RECV_F
    
      SEND_B
    
      RECV_B
    
      UNSHARD
    
      RESHARD
    
      REDUCE_GRAD
    """
    B: typing.ClassVar[ActionKind]
    F: typing.ClassVar[ActionKind]
    I: typing.ClassVar[ActionKind]
    RECV_B: typing.ClassVar[ActionKind]
    RECV_F: typing.ClassVar[ActionKind]
    REDUCE_GRAD: typing.ClassVar[ActionKind]
    RESHARD: typing.ClassVar[ActionKind]
    SEND_B: typing.ClassVar[ActionKind]
    SEND_F: typing.ClassVar[ActionKind]
    UNSHARD: typing.ClassVar[ActionKind]
    W: typing.ClassVar[ActionKind]
    __members__: typing.ClassVar[dict[str, ActionKind]]
    @typing.overload
    def __eq__(self, other: ActionKind) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: ActionKind) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class WaitPolicy:
    """
    How long (seconds) to wait, how many polls come before parking, and for how many seconds to poll when a wait should be about to end.
    """
    def __init__(self, timeout: typing.SupportsFloat | typing.SupportsIndex, spins: typing.SupportsInt | typing.SupportsIndex = 0, longest_spin: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> None:
        ...
    def prolong(self) -> bool:
        """
        Once the timeout has passed: whether to wait as long again.
        """
    @property
    def spins(self) -> int:
        ...
    @property
    def timeout(self) -> float:
        ...
class Envelope:
    """
    The tag of a message, and how much of the batch it is.
    """
    def __init__(self, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, layout: typing.SupportsInt | typing.SupportsIndex, run: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex, rows: typing.SupportsInt | typing.SupportsIndex, batch_rows: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def batch_rows(self) -> int:
        ...
    @property
    def bytes(self) -> int:
        ...
    @property
    def kind(self) -> int:
        ...
    @property
    def layout(self) -> int:
        ...
    @property
    def microbatch(self) -> int:
        ...
    @property
    def rows(self) -> int:
        ...
    @property
    def run(self) -> int:
        ...
    @property
    def stage(self) -> int:
        ...
class ActionEntry:
    """
    One action of a rank, and when it was done; see rank_status.hpp.
    """
    def __init__(self, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, step: typing.SupportsInt | typing.SupportsIndex, start: typing.SupportsInt | typing.SupportsIndex, ready: typing.SupportsInt | typing.SupportsIndex = 0, end: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
    @property
    def end(self) -> int:
        ...
    @property
    def kind(self) -> int:
        ...
    @property
    def microbatch(self) -> int:
        ...
    @property
    def ready(self) -> int:
        ...
    @property
    def stage(self) -> int:
        ...
    @property
    def start(self) -> int:
        ...
    @property
    def step(self) -> int:
        ...
class RankStatus:
    """
    What a rank is doing; its actions' times are nanoseconds ago.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex, step: typing.SupportsInt | typing.SupportsIndex, now: ActionEntry | None = None, last: ActionEntry | None = None, busy: str = '', busy_for: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> None:
        ...
    @property
    def busy(self) -> str | None:
        """
        What it says that it is busy with.
        """
    @property
    def busy_for(self) -> float:
        """
        Seconds.
        """
    @property
    def last(self) -> ActionEntry | None:
        """
        The action completed last.
        """
    @property
    def now(self) -> ActionEntry | None:
        """
        The action in progress.
        """
    @property
    def rank(self) -> int:
        ...
    @property
    def step(self) -> int:
        ...
class RankReport:
    """
    A status, and whether its rank was silent, so that this is what its record says.
    """
    def __init__(self, status: RankStatus, silent: bool = False) -> None:
        ...
    @property
    def silent(self) -> bool:
        ...
    @property
    def status(self) -> RankStatus:
        ...
class CauseKind:
    """
    Why a pipeline failed; see csrc/control/cause.hpp.
    
    Members:
    
      ERROR
    
      INTERRUPT
    
      TIMEOUT
    
      LEFT
    
      LOST
    
      LINK
    
      OVERDUE
    """
    ERROR: typing.ClassVar[CauseKind]
    INTERRUPT: typing.ClassVar[CauseKind]
    LEFT: typing.ClassVar[CauseKind]
    LINK: typing.ClassVar[CauseKind]
    LOST: typing.ClassVar[CauseKind]
    OVERDUE: typing.ClassVar[CauseKind]
    TIMEOUT: typing.ClassVar[CauseKind]
    __members__: typing.ClassVar[dict[str, CauseKind]]
    @typing.overload
    def __eq__(self, other: CauseKind) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: CauseKind) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Cause:
    """
    The first cause of a pipeline's failure; see csrc/control/cause.hpp.
    """
    @staticmethod
    def decode(bytes: bytes) -> Cause:
        ...
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __hash__(self) -> int:
        ...
    def __init__(self, kind: CauseKind, rank: typing.SupportsInt | typing.SupportsIndex, *, seen_by: typing.SupportsInt | typing.SupportsIndex | None = None, stage: typing.SupportsInt | typing.SupportsIndex | None = None, action_kind: typing.SupportsInt | typing.SupportsIndex | None = None, microbatch: typing.SupportsInt | typing.SupportsIndex | None = None, call: typing.SupportsInt | typing.SupportsIndex = 0, call_name: str = '', trains: bool = False, doing: str = '', type: str = '', message: str = '', traceback: str = '', ranks: typing.SupportsInt | typing.SupportsIndex = 0, limit: typing.SupportsFloat | typing.SupportsIndex = 0.0, reports: collections.abc.Sequence[RankReport] = []) -> None:
        ...
    def encode(self) -> bytes:
        ...
    @property
    def action_kind(self) -> int | None:
        ...
    @property
    def call(self) -> int:
        """
        The number of the call of step() or eval(); 0: in none.
        """
    @property
    def call_name(self) -> str:
        ...
    @property
    def doing(self) -> str:
        ...
    @property
    def kind(self) -> CauseKind:
        ...
    @property
    def limit(self) -> float:
        """
        Seconds.
        """
    @property
    def message(self) -> str:
        ...
    @property
    def microbatch(self) -> int | None:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def ranks(self) -> int:
        ...
    @property
    def reports(self) -> list[RankReport]:
        ...
    @property
    def seen_by(self) -> int | None:
        ...
    @property
    def stage(self) -> int | None:
        ...
    @property
    def traceback(self) -> str:
        ...
    @property
    def trains(self) -> bool:
        ...
    @property
    def type(self) -> str:
        ...
class ActionLog:
    """
    A ring of this rank's latest actions; see csrc/control/action_log.hpp.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, path: str) -> None:
        ...
    def actions(self) -> list[ActionEntry]:
        ...
    def begin(self, code: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        stage << 40 | kind << 32 | microbatch; ends the action before it. CoreError once this step has failed.
        """
    def discard(self) -> None:
        ...
    def end(self) -> None:
        ...
    def ready(self) -> None:
        ...
    def set_busy(self, work: str) -> None:
        ...
    def set_cause(self, cause: Cause, step: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
    def start_trace(self, capacity: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def status(self) -> RankStatus:
        ...
    def step(self) -> None:
        ...
    def stop_trace(self) -> list[ActionEntry]:
        ...
class RecordFile:
    """
    What a record file holds.
    """
    @property
    def actions(self) -> list[ActionEntry]:
        ...
    @property
    def busy(self) -> str | None:
        ...
    @property
    def cause(self) -> Cause | None:
        ...
    @property
    def clock(self) -> int:
        ...
    @property
    def rank(self) -> int:
        ...
class Hub:
    """
    The control sockets of one rank, and the thread that reads them.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def abandon(self) -> None:
        ...
    def abort(self, cause: Cause, step: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Fails everywhere; step: the one that failed, 0: unknown.
        """
    def add_peer(self, rank: typing.SupportsInt | typing.SupportsIndex, descriptor: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Takes over a connected, authenticated stream socket.
        """
    def ask(self, ranks: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> list[RankReport]:
        ...
    def cause(self) -> Cause | None:
        ...
    def check(self, peer: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self) -> None:
        ...
    def departed(self) -> list[int]:
        ...
    def leave(self) -> None:
        ...
    def prolonging(self, policy: WaitPolicy, ranks: typing.SupportsInt | typing.SupportsIndex) -> WaitPolicy:
        """
        The same policy, but a timeout starts again while a rank says that it is busy.
        """
    def send_envelope(self, peer: typing.SupportsInt | typing.SupportsIndex, envelope: Envelope, channel: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> None:
        ...
    def set_action_log(self, log: ActionLog) -> None:
        ...
    def share_record(self, peer: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> None:
        ...
    def start(self) -> None:
        ...
    def take_envelope(self, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> Envelope:
        ...
    @property
    def rank(self) -> int:
        ...
class SendLink:
    pass
class ReceiveLink:
    pass
class ShmSendLink(SendLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> None:
        ...
class ShmReceiveLink(ReceiveLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> None:
        ...
class OutgoingLayout:
    @property
    def id(self) -> int:
        ...
class Message:
    def holds(self, address: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether the address lies in the slot.
        """
    @property
    def batch_rows(self) -> int:
        ...
    @property
    def bytes(self) -> int:
        """
        Bytes of the slot.
        """
    @property
    def layout(self) -> int:
        ...
    @property
    def memory(self) -> int:
        """
        The start of what was allocated for this slot and others.
        """
    @property
    def pointer(self) -> int:
        ...
    @property
    def rows(self) -> int:
        ...
    @property
    def size(self) -> int:
        """
        Bytes of the message.
        """
class ChannelSender:
    def __init__(self, hub: Hub, link: SendLink, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def announce(self, description: str, sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], forgotten: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> OutgoingLayout:
        ...
    def finish(self, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def has_room(self) -> bool:
        ...
    def send(self, layout: OutgoingLayout, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, run: typing.SupportsInt | typing.SupportsIndex, rows: typing.SupportsInt | typing.SupportsIndex, batch_rows: typing.SupportsInt | typing.SupportsIndex, pointers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], stream: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> int:
        ...
    def sent(self) -> int:
        ...
    @property
    def counters(self) -> dict[str, int]:
        ...
class ChannelReceiver:
    def __init__(self, hub: Hub, link: ReceiveLink, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def begin(self, run: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Begins a run whose messages are promised to be those of the first run of this number.
        """
    def description(self, layout: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> str:
        ...
    def post(self, stream: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> None:
        ...
    def receive(self, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, run: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> Message:
        ...
    def release(self, message: Message, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def counters(self) -> dict[str, int]:
        ...
class LayoutAnnouncer:
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def announce(self, description: str, bytes: typing.SupportsInt | typing.SupportsIndex, forgotten: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> int:
        ...
class LayoutBook:
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def description(self, layout: typing.SupportsInt | typing.SupportsIndex, policy: WaitPolicy) -> str:
        ...
    @property
    def received(self) -> int:
        ...
class CudaLibrary:
    """
    The CUDA driver.
    """
    def device_names(self) -> list[str]:
        """
        The GPUs that this process may use. Initializes the driver. Raises CoreError without any.
        """
    @property
    def path(self) -> str:
        ...
    @property
    def version(self) -> int:
        ...
class CudaGpu:
    """
    A GPU and its primary context.
    """
    def __init__(self, cuda: CudaLibrary, ordinal: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def multiprocessors(self) -> int:
        ...
class NcclLibrary:
    """
    One copy of NCCL.
    """
    def try_communicator(self, gpu: CudaGpu | None, policy: WaitPolicy) -> None:
        """
        Makes a communicator of one rank and takes it down. Raises CoreError with what NCCL says.
        """
    def unique_id(self) -> bytes:
        ...
    @property
    def path(self) -> str:
        ...
    @property
    def version(self) -> int:
        ...
class NcclDirection:
    """
    Which way messages of an edge go.
    
    Members:
    
      ONE_WAY
    
      BOTH_WAYS
    
      TO_ITSELF
    """
    BOTH_WAYS: typing.ClassVar[NcclDirection]
    ONE_WAY: typing.ClassVar[NcclDirection]
    TO_ITSELF: typing.ClassVar[NcclDirection]
    __members__: typing.ClassVar[dict[str, NcclDirection]]
    @typing.overload
    def __eq__(self, other: NcclDirection) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: NcclDirection) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class NcclEdge:
    """
    One end of a communicator of two ranks.
    """
class NcclEdges:
    """
    All communicators of a rank; see csrc/link/nccl/nccl_edges.hpp.
    """
    def __init__(self, gpu: CudaGpu, nccl: NcclLibrary) -> None:
        ...
    def add(self, unique_id: bytes, rank: typing.SupportsInt | typing.SupportsIndex, direction: NcclDirection, name: str, ctas: typing.SupportsInt | typing.SupportsIndex) -> NcclEdge:
        """
        A communicator, to be made by connect().
        """
    def connect(self, policy: WaitPolicy) -> None:
        """
        Makes all communicators and connects them; returns when the other ends have done so too.
        """
class NcclGroup:
    """
    Transfers held back; see csrc/link/nccl/nccl_group.hpp.
    """
    def __init__(self) -> None:
        ...
    def issue(self, policy: WaitPolicy) -> None:
        ...
class NcclSendLink(SendLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, edge: NcclEdge, allocate: collections.abc.Callable[[int], typing.Any], group: NcclGroup | None) -> None:
        ...
class NcclReceiveLink(ReceiveLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, edge: NcclEdge, allocate: collections.abc.Callable[[int], typing.Any], slots: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]], group: NcclGroup | None) -> None:
        ...
class NcclWatchdog:
    """
    Looks after communicators; see csrc/link/nccl/nccl_watchdog.hpp.
    """
    def __init__(self, hub: Hub, edges: NcclEdges, limit: typing.SupportsFloat | typing.SupportsIndex, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self, policy: WaitPolicy) -> None:
        ...
def check_tag(envelope: Envelope, channel: typing.SupportsInt | typing.SupportsIndex, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, run: typing.SupportsInt | typing.SupportsIndex, peer: typing.SupportsInt | typing.SupportsIndex) -> None:
    ...
def loaded_library(name: str) -> str | None:
    """
    The file of a library (by its soname) that this process has loaded, or None.
    """
def open_cuda(override_path: str) -> tuple[CudaLibrary | None, str]:
    """
    The driver, or None and the reason. Raises CoreError for a library that is something else.
    """
def open_nccl(override_path: str, candidates: collections.abc.Sequence[str]) -> tuple[NcclLibrary | None, str]:
    """
    NCCL, or None and the reason. Raises CoreError for a library that is something else or too old.
    """
def pack(sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[int]:
    """
    Offsets of parts of these sizes (bytes) in one message, then the message's size.
    """
def read_record(path: str) -> RecordFile:
    """
    Reads a record file. Raises CoreError for anything else.
    """
PART_ALIGNMENT: int = 64
__version__: str = '0.1.0'
