"""The c10d link: the same numbers over torch.distributed's own backend, and errors instead of its silence."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import c10d_cases as cases
import c10d_endings
import c10d_exit
import c10d_failures
import c10d_hosts
import pytest
from rank_pool import Raised, RankPool
from search_path import PYTHONPATH


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that came out of step, or hang, must not spoil the next test."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


def _check(ranks: RankPool, size: int, function: object, *arguments: object, timeout: float = 60.0) -> None:
    results = ranks.run(size, function, *arguments, timeout=timeout)  # type: ignore[arg-type]
    found = [text for texts in results for text in texts]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_over_c10d_equals_unpipelined_training(ranks: RankPool, schedule: str, size: int) -> None:
    batches = [(1, 2), (2, 5), (size + 1, 2 * size + 3)]
    models = ["mlp", "gpt", "mixed", "identities"]
    found = [(schedule, model, m, rows, True) for (m, rows), model in itertools.product(batches, models)]
    _check(ranks, size, cases.compare_many, found)


def test_c10d_on_one_rank_is_c10d_on_all(ranks: RankPool) -> None:
    _check(ranks, 3, cases.asked_for_by_one_rank)


def test_buffers_follow_batches_of_changing_length(ranks: RankPool) -> None:
    _check(ranks, 2, cases.another_layout_per_message)


def test_ranks_on_different_hosts_choose_c10d_and_tcp_by_themselves_and_shared_memory_within_one(
    ranks: RankPool,
) -> None:
    _check(ranks, 4, c10d_hosts.on_two_hosts)


def test_c10d_without_a_process_group_is_an_error_that_says_so_on_every_rank(ranks: RankPool) -> None:
    for text in ranks.run(2, cases.no_process_group, timeout=20.0):
        assert text.startswith("ConfigurationError: "), text
        assert "init_process_group" in text


def test_a_peer_may_close_as_soon_as_it_has_sent_its_last_message(ranks: RankPool) -> None:
    _check(ranks, 2, c10d_endings.peer_that_leaves_after_its_last_message, timeout=30.0)


def test_a_peer_may_destroy_its_process_group_as_soon_as_its_last_step_is_over(ranks: RankPool, tmp_path: Path) -> None:
    _check(ranks, 4, c10d_endings.group_that_ends_after_the_last_message, str(tmp_path / "flag"), timeout=40.0)


def _run_script(script: str, size: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Runs a script as so many ranks over c10d: exit code, output and errors, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYPIPE_LINK": "c10d",
                "PYTHONPATH": PYTHONPATH,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_a_rank_may_end_its_script_as_soon_as_its_last_step_is_over() -> None:
    for code, output, errors in _run_script(c10d_hosts.__file__, 2, "end_at_once"):
        assert (code, output.strip()) == (0, "done"), errors[-2000:]


@pytest.mark.parametrize(
    ("way", "schedule"),
    [*((way, "Schedule1F1B") for way in c10d_exit.WAYS), ("plain", "ScheduleGPipe"), ("plain", "ScheduleZBH1")],
)
def test_a_script_that_catches_a_failure_ends_in_good_order_and_its_process_group_lives_on(
    way: str, schedule: str
) -> None:
    for rank, (code, output, errors) in enumerate(_run_script(c10d_exit.__file__, 3, way, schedule)):
        caught = "caught ValueError" if rank == 1 else "caught RemoteStageError"
        times = 2 if way == "second failure" else 1
        assert output.splitlines() == [caught] * times + ["sum [3.0, 3.0, 3.0]", "left: []"], output + errors[-2000:]
        assert (code, errors) == (0, ""), f"rank {rank}: {code}: {errors[-2000:]}"


def test_a_failed_step_does_not_break_the_process_group_when_its_timeout_is_over(
    ranks: RankPool, tmp_path: Path
) -> None:
    _check(ranks, 4, c10d_failures.group_after_a_failure, str(tmp_path / "flag"), timeout=40.0)


def test_an_address_that_cannot_be_listened_on_is_an_error_on_every_rank(ranks: RankPool) -> None:
    first, last = ranks.run(2, c10d_hosts.address_that_is_not_ours, timeout=15.0)
    for text in (first, last):
        assert text.startswith("ConfigurationError: "), text
        assert "PYPIPE_ADDRESS" in text
        assert "rank 0" in text


def test_no_thread_is_left_after_close(ranks: RankPool) -> None:
    _check(ranks, 2, c10d_endings.threads_after_close, timeout=30.0)


def test_a_deadline_ends_the_wait_for_a_peer_that_is_busy(ranks: RankPool, tmp_path: Path) -> None:
    first, last = ranks.run(2, c10d_failures.busy_peer, str(tmp_path / "flag"), timeout=30.0)
    assert first.startswith("PipelineTimeout: "), first
    assert "rank 1" in first
    assert last.startswith("PipelineTimeout: "), last
    assert "stopped because a rank waited too long: rank 0" in last


def test_a_deadline_ends_the_wait_for_bytes_that_the_backend_has_lost(ranks: RankPool) -> None:
    first, last = ranks.run(2, c10d_failures.lost_bytes, timeout=30.0)
    assert first.startswith("PipelineTimeout: "), first
    assert "rank 1" in first
    assert "rank 0" in first
    assert last.startswith("PipelineTimeout: "), last
    assert "a rank waited too long: rank 0" in last


def test_a_failure_elsewhere_ends_the_wait_for_bytes(ranks: RankPool) -> None:
    first, last = ranks.run(2, c10d_failures.abort_while_bytes_are_awaited, timeout=30.0)
    assert last.startswith("PipelineError: had enough"), last
    assert first.startswith("RemoteStageError: "), first
    assert "had enough" in first


@pytest.mark.parametrize("name", ["irecv", "isend"])
def test_a_backend_that_fails_is_an_error_of_pypipe_on_every_rank(ranks: RankPool, name: str) -> None:
    first, last = ranks.run(2, c10d_failures.broken_backend, name, timeout=30.0)
    assert not first.startswith("not pypipe's"), first
    assert "Connection closed by peer" in first
    assert "rank 1" in first
    assert last.startswith("RemoteStageError: "), last
    assert "rank 0" in last


def test_a_backend_that_cannot_send_is_an_error_of_pypipe_on_every_rank(ranks: RankPool) -> None:
    first, last = ranks.run(2, c10d_failures.backend_that_raises_at_once, timeout=30.0)
    assert not first.startswith("not pypipe's"), first
    assert "does not support isend" in first
    assert last.startswith("RemoteStageError: "), last


def test_a_dead_peer_is_seen_at_once_by_every_rank(ranks: RankPool) -> None:
    results = ranks.run_raw(3, c10d_failures.dead_peer, timeout=25.0)
    assert isinstance(results[2], Raised)
    for text in results[:2]:
        assert isinstance(text, str), text
        assert text.startswith("PeerLost: "), text
        assert "rank 2" in text


# --- ranks in network namespaces of their own, which shared memory and Unix sockets do not cross

HOSTS = ("10.201.77.1", "10.201.77.2")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair, with the addresses of HOSTS."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"{os.getpid() % 100000}"
    names = [f"pypipe{tag}a", f"pypipe{tag}b"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                f"pa{tag}",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                f"pb{tag}",
                "netns",
                names[1],
            )
            for name, link, address in zip(names, (f"pa{tag}", f"pb{tag}"), HOSTS, strict=True):
                _ip("-n", name, "link", "set", link, "name", "veth0")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
                _ip("-n", name, "link", "set", "veth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                _ip("netns", "delete", name)


def _run_in(
    namespaces: list[str], places: list[int], master: str, argument: str, hosts: list[Path] | None = None
) -> list[dict[str, object]]:
    """Runs the script as ranks 0.. in these namespaces; what they print, by rank."""
    processes = []
    for rank, place in enumerate(places):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": master,
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": "veth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
        }
        script = [sys.executable, c10d_hosts.__file__, argument]
        if hosts is not None:
            bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
            script = ["unshare", "-m", "sh", "-c", bind, str(hosts[place]), *script]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", namespaces[place], *script],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output + errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_one_script_runs_on_several_hosts_and_chooses_its_links_by_itself(namespaces: list[str]) -> None:
    cases_ = json.dumps([["Schedule1F1B", "gpt", 4, 9, True], ["ScheduleGPipe", "mixed", 2, 4, True]])
    seen = _run_in(namespaces, [0, 0, 1], HOSTS[0], cases_)
    assert [one["rank"] for one in seen] == [0, 1, 2]
    assert [one["differences"] for one in seen] == [[], [], []]
    # Ranks 0 and 1 share a host: nothing of theirs goes over c10d but what rank 1 exchanges with rank 2.
    assert seen[0]["sent"] == 0
    assert int(str(seen[1]["sent"])) > 0
    assert int(str(seen[2]["sent"])) > 0
    # The lower rank of a pair listens: on the address that reaches the others, and on no other one.
    # Rank 0 listens for the last rank: the control sockets form a ring, whatever the links are.
    assert seen[0]["listening"] == [[HOSTS[0], "0A"]] * 2
    assert seen[1]["listening"] == [[HOSTS[0], "0A"]] * 2
    assert seen[2]["listening"] == []


def test_a_master_whose_own_name_is_a_loopback_address_at_home_is_reached_by_the_others(
    namespaces: list[str], tmp_path: Path
) -> None:
    """Debian writes "127.0.1.1 myname" into /etc/hosts."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to give each host its own /etc/hosts")
    hosts = [tmp_path / "hosts0", tmp_path / "hosts1"]
    hosts[0].write_text("127.0.0.1 localhost\n127.0.1.1 pypipe-master\n")
    hosts[1].write_text(f"127.0.0.1 localhost\n{HOSTS[0]} pypipe-master\n")
    seen = _run_in(namespaces, [0, 1], "pypipe-master", json.dumps([["Schedule1F1B", "mlp", 2, 4, True]]), hosts)
    assert [one["differences"] for one in seen] == [[], []]
    assert seen[0]["listening"] == [[HOSTS[0], "0A"]]
