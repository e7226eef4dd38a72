"""
The C++ core of pypipe: control sockets, links and channels. Not a public interface.
"""
from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['CoreError', 'CudaLibrary', 'Envelope', 'Hub', 'LayoutAnnouncer', 'LayoutBook', 'Message', 'NcclEdge', 'NcclGroup', 'NcclLibrary', 'NcclReceiveLink', 'NcclSendLink', 'NcclTraffic', 'NcclWatchdog', 'PART_ALIGNMENT', 'Patience', 'ReceiveChannel', 'ReceiveLink', 'Recorder', 'SendChannel', 'SendLayout', 'SendLink', 'ShmReceiveLink', 'ShmSendLink', 'check_tag', 'loaded_library', 'open_cuda', 'open_nccl', 'pack']
class CoreError(RuntimeError):
    fault: typing.ClassVar[str] = ''
class Patience:
    """
    How long (seconds) and how eagerly to wait: polls before parking, and seconds of more polls while waits are that short.
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
    def __init__(self, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, layout: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex, rows: typing.SupportsInt | typing.SupportsIndex, batch_rows: typing.SupportsInt | typing.SupportsIndex) -> None:
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
    def stage(self) -> int:
        ...
class Recorder:
    """
    A ring of what this rank did last; see csrc/control/recorder.hpp.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, path: str) -> None:
        ...
    def activity(self) -> str:
        ...
    def begin(self, code: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        stage << 40 | kind << 32 | microbatch; ends the action before it. CoreError once this step has failed.
        """
    def deeds(self) -> list[tuple[int, int, int, int, int, int, int]]:
        ...
    def discard(self) -> None:
        ...
    def end(self) -> None:
        ...
    def ready(self) -> None:
        ...
    def set_busy(self, work: str) -> None:
        ...
    def set_cause(self, cause: str, step: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
    def start_trace(self, capacity: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def step(self) -> None:
        ...
    def stop_trace(self) -> list[tuple[int, int, int, int, int, int, int]]:
        ...
class Hub:
    """
    The control sockets of one rank, and the thread that reads them.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def abandon(self) -> None:
        ...
    def abort(self, cause: str, step: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Fails everywhere; step: the one that failed, 0: unknown.
        """
    def add_peer(self, rank: typing.SupportsInt | typing.SupportsIndex, descriptor: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Takes over a connected, authenticated stream socket.
        """
    def ask(self, ranks: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> list[tuple[str, bool]]:
        ...
    def cause(self) -> str | None:
        ...
    def check(self, peer: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self) -> None:
        ...
    def departed(self) -> list[int]:
        ...
    def leave(self) -> None:
        ...
    def prolonging(self, patience: Patience, ranks: typing.SupportsInt | typing.SupportsIndex) -> Patience:
        """
        The same patience, prolonged for as long as a rank says that it is busy.
        """
    def send_envelope(self, peer: typing.SupportsInt | typing.SupportsIndex, envelope: Envelope, channel: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        ...
    def set_recorder(self, recorder: Recorder) -> None:
        ...
    def share_record(self, peer: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        ...
    def start(self) -> None:
        ...
    def take_envelope(self, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> Envelope:
        ...
    @property
    def rank(self) -> int:
        ...
class SendLink:
    pass
class ReceiveLink:
    pass
class ShmSendLink(SendLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        ...
class ShmReceiveLink(ReceiveLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, capacity: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        ...
class SendLayout:
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
class SendChannel:
    def __init__(self, hub: Hub, link: SendLink, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def announce(self, description: str, sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], forgotten: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> SendLayout:
        ...
    def finish(self, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def has_room(self) -> bool:
        ...
    def send(self, layout: SendLayout, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, rows: typing.SupportsInt | typing.SupportsIndex, batch_rows: typing.SupportsInt | typing.SupportsIndex, pointers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], stream: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> int:
        ...
    def sent(self) -> int:
        ...
    @property
    def counters(self) -> dict[str, int]:
        ...
class ReceiveChannel:
    def __init__(self, hub: Hub, link: ReceiveLink, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def description(self, layout: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> str:
        ...
    def post(self, stream: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        ...
    def receive(self, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> Message:
        ...
    def release(self, message: Message, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def counters(self) -> dict[str, int]:
        ...
class LayoutAnnouncer:
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def announce(self, description: str, bytes: typing.SupportsInt | typing.SupportsIndex, forgotten: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> int:
        ...
class LayoutBook:
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, channel: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def description(self, layout: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> str:
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
class NcclLibrary:
    """
    One copy of NCCL.
    """
    def try_communicator(self, patience: Patience) -> None:
        """
        Makes a communicator of one rank and takes it down. Raises CoreError with what NCCL says.
        """
    def unique_id(self) -> bytes:
        ...
    @property
    def absent(self) -> list[str]:
        """
        Optional functions that this release lacks.
        """
    @property
    def path(self) -> str:
        ...
    @property
    def version(self) -> int:
        ...
class NcclTraffic:
    """
    What goes through an edge.
    
    Members:
    
      ONE_WAY
    
      BOTH_WAYS
    
      TO_ITSELF
    """
    BOTH_WAYS: typing.ClassVar[NcclTraffic]
    ONE_WAY: typing.ClassVar[NcclTraffic]
    TO_ITSELF: typing.ClassVar[NcclTraffic]
    __members__: typing.ClassVar[dict[str, NcclTraffic]]
    @typing.overload
    def __eq__(self, other: NcclTraffic) -> bool:
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
    def __ne__(self, other: NcclTraffic) -> bool:
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
    def __init__(self, cuda: CudaLibrary, nccl: NcclLibrary, unique_id: bytes, rank: typing.SupportsInt | typing.SupportsIndex, traffic: NcclTraffic, name: str, min_ctas: typing.SupportsInt | typing.SupportsIndex, max_ctas: typing.SupportsInt | typing.SupportsIndex, patience: Patience) -> None:
        """
        Joins the communicator and connects; returns when the other end has done so too.
        """
class NcclGroup:
    """
    Transfers held back; see csrc/link/nccl_group.hpp.
    """
    def __init__(self) -> None:
        ...
    def issue(self, patience: Patience) -> None:
        ...
class NcclSendLink(SendLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, edge: NcclEdge, allocate: collections.abc.Callable[[int], typing.Any], group: NcclGroup | None) -> None:
        ...
class NcclReceiveLink(ReceiveLink):
    def __init__(self, hub: Hub, peer: typing.SupportsInt | typing.SupportsIndex, link: typing.SupportsInt | typing.SupportsIndex, edge: NcclEdge, allocate: collections.abc.Callable[[int], typing.Any], slots: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]], group: NcclGroup | None) -> None:
        ...
class NcclWatchdog:
    """
    Looks after communicators; see csrc/link/nccl_watchdog.hpp.
    """
    def __init__(self, hub: Hub, edges: collections.abc.Sequence[NcclEdge], limit: typing.SupportsFloat | typing.SupportsIndex, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self, patience: Patience) -> None:
        ...
def check_tag(envelope: Envelope, channel: typing.SupportsInt | typing.SupportsIndex, stage: typing.SupportsInt | typing.SupportsIndex, kind: typing.SupportsInt | typing.SupportsIndex, microbatch: typing.SupportsInt | typing.SupportsIndex, peer: typing.SupportsInt | typing.SupportsIndex) -> None:
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
PART_ALIGNMENT: int = 64
__version__: str = '0.1.0'
