"""The emulated CUDA driver and NCCL keep their promises, and catch each hazard that they are there for.

For every hazard there is a program that plants it, and its correct twin: `hazards SCENARIO planted|correct SEEDS` runs
two rank processes under so many seeds, and fails unless the emulator reported the bug each time, or nothing ever.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cuda_emulator
import pytest
from cuda_emulator import Emulator
from search_path import ROOT

pytestmark = [
    pytest.mark.skipif(
        not cuda_emulator.has_compiler(),
        reason="no C++ compiler (c++, g++, clang++ or $CXX): the emulator cannot be built here",
    ),
    pytest.mark.timeout(400),  # the first test builds it, on a machine that may be busy
]

CORRECT_SEEDS = int(os.environ.get("PYPIPE_EMULATOR_SEEDS", "60"))
PLANTED_SEEDS = 20  # a race is found by the clocks, whatever the seed
HANG_SEEDS = 4  # a hang takes a quarter of a second to be sure of


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return cuda_emulator.build()


def run(emulator: Emulator, *command: object, code: int = 0, **environment: object) -> str:
    """Runs a program of the emulator; returns all that it said."""
    knobs = {f"PYPIPE_EMULATOR_{name.upper()}": str(value) for name, value in environment.items()}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYPIPE_EMULATOR_")}
    done = subprocess.run(
        [str(emulator.folder / str(command[0])), *map(str, command[1:])],
        capture_output=True,
        text=True,
        timeout=120,
        env={**inherited, **knobs},
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{said}"
    return said


def check(emulator: Emulator, scenario: str, *, seeds: int = PLANTED_SEEDS) -> str:
    """Both forms of a scenario; returns the reports of the planted one."""
    run(emulator, "hazards", scenario, "correct", CORRECT_SEEDS)
    return run(emulator, "hazards", scenario, "planted", seeds)


# --- hazards


def test_a_send_that_does_not_wait_for_what_it_sends_is_a_race(emulator: Emulator) -> None:
    said = check(emulator, "no_wait_before_a_send")
    assert re.search(r"race: .*\bcompute #.*\n.*not ordered with the .*\bncclSend #|race: .*\bncclSend #", said)


def test_a_reader_that_does_not_wait_for_its_receive_is_a_race(emulator: Emulator) -> None:
    assert "read by 2F0" in check(emulator, "no_wait_after_a_receive")


def test_a_slot_that_is_reused_one_event_too_early_is_a_race(emulator: Emulator) -> None:
    said = check(emulator, "a_slot_reused_one_event_too_early")
    assert "read by backward" in said
    assert "write by ncclRecv" in said
    assert "forward" not in said  # the reader that was waited for


def test_a_send_buffer_that_is_freed_too_early_is_reported(emulator: Emulator) -> None:
    assert "ncclSend" in check(emulator, "a_freed_send_buffer")


def test_a_tensor_that_is_freed_too_early_is_reported_with_the_label_of_its_send(emulator: Emulator) -> None:
    assert "issued by ncclSend in 2SEND_F0, called from" in check(emulator, "a_freed_tensor")


def test_compute_on_stream_zero_must_wait_before_it_writes_what_is_being_sent(emulator: Emulator) -> None:
    assert "write by 1F0" in check(emulator, "host_writes_a_buffer_being_sent")


def test_an_answer_orders_what_follows_it_after_the_message_only_on_its_own_stream(emulator: Emulator) -> None:
    check(emulator, "an_order_through_the_peer")


def test_crossed_sends_on_one_communicator_hang_above_the_staging_budget(emulator: Emulator) -> None:
    said = check(emulator, "crossed_order_above_the_staging", seeds=HANG_SEEDS)
    assert "waits for the peer's receive, or room in the staging buffer" in said
    assert "next ncclRecv" in said  # what stands behind it


def test_crossed_sends_on_one_communicator_pass_below_the_staging_budget(emulator: Emulator) -> None:
    # `correct` has the bug and a message that fits; `planted` has the same message and no staging.
    check(emulator, "crossed_order_below_the_staging", seeds=HANG_SEEDS)


def test_opposite_transfers_hang_in_different_orders_over_one_communicator_but_not_over_two(
    emulator: Emulator,
) -> None:
    said = check(emulator, "opposite_transfers_one_communicator", seeds=HANG_SEEDS)
    assert "its turn on communicator" in said


def test_opposite_transfers_in_one_group_need_no_order(emulator: Emulator) -> None:
    check(emulator, "opposite_transfers_fused", seeds=HANG_SEEDS)


def test_an_event_recorded_while_a_call_is_in_progress_is_reported(emulator: Emulator) -> None:
    said = check(emulator, "an_event_recorded_in_progress")
    assert "a non-blocking NCCL call is still in progress on stream" in said


def test_a_device_with_one_place_starves_where_one_with_two_does_not(emulator: Emulator) -> None:
    said = check(emulator, "one_resident_operation", seeds=HANG_SEEDS)
    assert "a place on the device, all of whose 1 are taken" in said


def test_one_hardware_queue_puts_a_send_behind_the_wait_for_a_receive(emulator: Emulator) -> None:
    said = check(emulator, "one_hardware_queue", seeds=HANG_SEEDS)
    assert "which came earlier into their common hardware queue" in said


def test_a_launch_order_must_not_contradict_what_the_messages_depend_on(emulator: Emulator) -> None:
    said = check(emulator, "a_launch_order_that_contradicts_the_data", seeds=HANG_SEEDS)
    assert re.search(r"kernel #\d+ of communicator .* 'up' .*, which comes before it in the launch order", said)


def test_a_serial_launch_order_allows_no_early_receives(emulator: Emulator) -> None:
    assert "in the launch order" in check(emulator, "a_serial_launch_order", seeds=HANG_SEEDS)


def test_connections_that_are_first_used_in_different_orders_hang(emulator: Emulator) -> None:
    said = check(emulator, "connections_in_different_orders", seeds=HANG_SEEDS)
    assert "waits for the peer's first use of an edge of communicator" in said


def test_communicators_created_one_by_one_in_different_orders_hang(emulator: Emulator) -> None:
    said = check(emulator, "creations_in_different_orders", seeds=HANG_SEEDS)
    assert "waits for the other rank of communicator" in said


def test_aborting_communicators_one_by_one_hangs_where_a_group_of_aborts_ends(emulator: Emulator) -> None:
    said = check(emulator, "aborts_one_by_one", seeds=HANG_SEEDS)
    assert re.search(r"ncclCommAbort.*\n.*waits for the kernels of communicator \d+ 'to'", said)


def test_before_nccl_2_22_a_group_of_aborts_hangs_where_one_thread_each_ends(emulator: Emulator) -> None:
    said = check(emulator, "aborts_of_an_old_release", seeds=HANG_SEEDS)
    assert "ncclCommAbort" in said


def test_memory_that_is_registered_at_one_end_only_is_reported(emulator: Emulator) -> None:
    assert "registered memory at one end only, the receiving one" in check(emulator, "registered_at_one_end")


def test_a_deregistration_that_no_event_orders_after_the_transfers_is_reported(emulator: Emulator) -> None:
    assert "deregistered while a transfer" in check(emulator, "deregistered_in_use")


def test_a_free_waits_for_receives_of_the_whole_device(emulator: Emulator) -> None:
    said = check(emulator, "a_free_behind_a_receive", seeds=HANG_SEEDS)
    assert "waits for the whole device, so far for stream" in said


def test_with_lazy_loading_the_first_launch_of_a_kernel_waits_for_receives_of_the_whole_device(
    emulator: Emulator,
) -> None:
    check(emulator, "a_first_launch_behind_a_receive", seeds=HANG_SEEDS)


# --- promises


@pytest.mark.parametrize("subject", ["threads", "none", "devices"])
def test_what_belongs_to_a_device_needs_its_context(emulator: Emulator, subject: str) -> None:
    for seed in range(3):
        run(emulator, "contexts", subject, seed=seed)


@pytest.mark.parametrize(
    "subject", ["events", "stream_zero", "queued_zero", "memory", "configurations", "to_oneself", "together"]
)
def test_semantics(emulator: Emulator, subject: str) -> None:
    for seed in range(5):
        run(emulator, "semantics", subject, seed=seed)


@pytest.mark.parametrize(
    "subject", ["creation_blocking", "creation_nonblocking", "failure", "mixed", "abandoned", "interrupted"]
)
def test_a_group_creates_and_finalizes_its_communicators_all_at_once(emulator: Emulator, subject: str) -> None:
    for seed in range(5):
        run(emulator, "groups", subject, seed=seed)


@pytest.mark.parametrize("subject", ["queries", "own", "joins"])
def test_a_stream_capture_is_broken_by_unsafe_calls(emulator: Emulator, subject: str) -> None:
    run(emulator, "captures", subject)


@pytest.mark.parametrize(
    "failure",
    ["size_staged", "size_not_staged", "error", "hang", "version", "death_told", "death_silent"],
)
def test_a_failure_is_told_as_nccl_tells_it_and_an_abort_ends_it(emulator: Emulator, failure: str) -> None:
    for seed in range(5):
        run(emulator, "failures", failure, seed=seed)


def test_a_hazard_can_end_the_process_and_is_written_to_a_file(emulator: Emulator, tmp_path: Path) -> None:
    report = tmp_path / "report"
    program = [sys.executable, "-c", USE_A_DESTROYED_EVENT, str(emulator.cuda)]
    for action, code in (("report", 0), ("exit", 97)):
        environment = {**os.environ, "PYPIPE_EMULATOR_ON_HAZARD": action, "PYPIPE_EMULATOR_REPORT": str(report)}
        done = subprocess.run(program, env=environment, capture_output=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr.decode()
    assert len(re.findall("usage: no such event", report.read_text())) == 2


USE_A_DESTROYED_EVENT = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
event = ctypes.c_void_p()
assert cuda.cuEventCreate(ctypes.byref(event), 0) == 0
assert cuda.cuEventDestroy_v2(event) == 0
assert cuda.cuEventQuery(event) == 400
"""


def test_a_knob_that_means_nothing_ends_the_process(emulator: Emulator) -> None:
    said = run(emulator, "semantics", "events", code=98, delay_us="long")
    assert "PYPIPE_EMULATOR_DELAY_US=long means nothing" in said


def test_a_child_forked_after_the_first_use_cannot_go_on(emulator: Emulator) -> None:
    program = [sys.executable, "-c", USE_AFTER_A_FORK, str(emulator.cuda)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=False)
    assert done.returncode == 97, done.stderr.decode()


USE_AFTER_A_FORK = """
import ctypes, os, sys
cuda = ctypes.CDLL(sys.argv[1])
event = ctypes.c_void_p()
cuda.cuEventCreate(ctypes.byref(event), 0)
child = os.fork()
if child == 0:
    cuda.cuEventCreate(ctypes.byref(event), 0)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_libraries_have_the_real_names_and_every_function_that_the_product_opens(emulator: Emulator) -> None:
    names = {
        kind: set(
            re.findall(r"^ *X\(\w+, (\w+),", (ROOT / "csrc" / "link" / "nccl" / f"{kind}_abi.hpp").read_text(), re.M)
        )
        for kind in ("cuda", "nccl")
    }
    assert "cuEventRecord" in names["cuda"]
    # What is not the product's, but its users'.
    others = {"cuCtxSynchronize", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuStreamIsCapturing"}
    assert "ncclGetLastError" in names["nccl"]
    optional = {"ncclCommRegister", "ncclCommDeregister", "ncclMemAlloc", "ncclMemFree"}
    for library, wanted in (
        (emulator.cuda, names["cuda"]),
        (emulator.nccl, names["nccl"] | optional),
        (emulator.old_nccl, names["nccl"]),
    ):
        listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, check=True).stdout
        exported = set(re.findall(r" T (\w+)$", listed.decode(), re.M)) - {"_init", "_fini"}
        assert exported - others == wanted, library
        dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, check=True).stdout.decode()
        assert f"Library soname: [{library.name}]" in dynamic


def test_both_libraries_share_one_engine_that_python_can_steer(emulator: Emulator) -> None:
    program = [sys.executable, "-c", STEER, *map(str, (ROOT, emulator.cuda, emulator.nccl, emulator.old_nccl))]
    done = subprocess.run(program, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


STEER = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/tests/emulator")
from cuda_emulator import Control, Emulator
cuda, nccl, old = map(ctypes.CDLL, sys.argv[2:])
control = Control(Emulator(Path(sys.argv[2]).parent))
version = ctypes.c_int()
assert nccl.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 23007
assert old.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 21805
control.set("version", 22809)
assert nccl.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 22809
assert nccl.ncclGroupEnd() == 5 and control.hazards("usage") == control.hazards() == 1
assert "ncclGroupEnd without ncclGroupStart" in control.last_report()
control.reset_counters()
stream = ctypes.c_void_p()
assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, -5) == 0
memory = ctypes.create_string_buffer(64)
data = ctypes.addressof(memory)
control.label("0F0")
control.writes(data, 64, "forward", stream.value)
control.label(None)
assert cuda.cuStreamSynchronize(stream) == 0 and control.host_synchronizations() == 1
control.reads(data, 64, "loss")
assert control.hazards() == 0, control.last_report()
control.writes(data, 64, "backward", stream.value)
control.reads(data, 1, "loss")
assert cuda.cuStreamSynchronize(stream) == 0 and control.hazards("race") == 1
assert "write by backward" in control.last_report() and "read by loss" in control.last_report()
try:
    control.set("delay", 3)
except ValueError:
    pass
else:
    raise AssertionError("an unknown knob was taken")
"""
