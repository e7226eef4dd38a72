"""Whatever is wrong on one rank is a clear error on every rank, at once; afterwards a new schedule trains."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import bad_input_cases as cases
import pytest
from bad_input_cases import Seen
from rank_pool import RankPool

import pypipe

SIZE = 3
TIMEOUT = 15.0  # seconds for a whole case, less than the schedules' own timeout: a rank that waits it out has hung


@pytest.fixture(autouse=True)
def _fresh_ranks_after_a_failure(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that came out of step, or hang, must not spoil the next test."""
    ranks.run(SIZE, _nothing)  # starting them is not part of the test's time
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        ranks.close()


def _nothing(rank: int, size: int, group: object) -> None:
    pass


def _attempt(ranks: RankPool, case: str) -> list[Seen]:
    return ranks.run(SIZE, cases.attempt, case, timeout=TIMEOUT)


def _check_common(everyone: list[Seen]) -> None:
    for rank, seen in enumerate(everyone):
        assert seen.kind, f"rank {rank} raised nothing"
        if seen.again is not None:
            assert seen.again.public, f"rank {rank}'s second step() raised {seen.again.kind}: {seen.again.text}"
            assert "Timeout" not in seen.again.kind, f"rank {rank}'s second step() waited: {seen.again.text}"
    assert [seen.trained for seen in everyone] == [[]] * SIZE, "a new schedule does not train"


# Case; the rank where it arises; words of the message; words of the remedy.
BUILT_WRONGLY = [
    ("no_microbatches_anywhere", None, ["n_microbatches is 0"], "1 microbatch or more"),
    ("no_microbatches_on_rank_1", 1, ["n_microbatches is 0"], "1 microbatch or more"),
    ("half_a_microbatch_on_rank_0", 0, ["n_microbatches is 2.5"], "1 microbatch or more"),
    ("no_time_on_rank_1", 1, ["timeout is 0"], "positive"),
    ("loss_that_cannot_be_called_on_rank_2", 2, ["loss_fn is a str"], "function"),
    ("stage_index_out_of_range_on_rank_1", 1, ["stage_index is 3"], "0..2"),
    ("stage_index_out_of_range_everywhere", None, ["stage_index is"], "0..2"),
    ("negative_stage_index_on_rank_2", 2, ["stage_index is -1"], "0..2"),
    ("no_module_on_rank_0", 0, ["stage", "torch.nn.Module"], "torch.nn.Module"),
    ("unknown_device_on_rank_1", 1, ["stage", "abacus"], "device"),
    ("unknown_link_on_rank_1", 1, ["PYPIPE_LINK", "cans"], "auto"),
]


@pytest.mark.parametrize(("case", "origin", "words", "remedy"), BUILT_WRONGLY, ids=[row[0] for row in BUILT_WRONGLY])
def test_an_argument_that_cannot_work_is_refused_on_every_rank(
    ranks: RankPool, case: str, origin: int | None, words: list[str], remedy: str
) -> None:
    everyone = _attempt(ranks, case)
    for rank, seen in enumerate(everyone):
        assert seen.kind == "ConfigurationError", seen
        for word in [*words, remedy, f"rank {rank if origin is None else origin}"]:
            assert word in seen.text, (word, seen.text)
            if seen.again is not None:
                assert word in seen.again.text, (word, seen.again.text)
    _check_common(everyone)


DISAGREEMENTS = [
    ("stage_index_given_twice", ["stage_index 1", "ranks 1 and 2"], "stage_index=rank"),
    ("stages_on_the_wrong_ranks", ["rank 0 holds stage 2"], "stage_index=rank"),
    ("num_stages_that_disagree", ["num_stages", "rank 0: 4", "rank 1: 3", "rank 2: 3"], "same num_stages"),
    ("more_stages_than_ranks", ["num_stages is 4", "3 ranks"], "as many ranks as there are stages"),
    ("fewer_stages_than_ranks", ["num_stages is 1", "3 ranks"], "as many ranks as there are stages"),
    ("another_schedule_on_rank_1", ["rank 0: Schedule1F1B", "rank 1: ScheduleGPipe"], "same schedule class"),
    ("another_number_of_microbatches_on_rank_2", ["n_microbatches", "rank 1: 2", "rank 2: 4"], "same n_microbatches"),
    ("loss_only_on_the_last_rank", ["loss_fn", "rank 0: False", "rank 2: True"], "on every rank, or on none"),
    ("another_scale_grads_on_rank_1", ["scale_grads", "rank 0: True", "rank 1: False"], "same scale_grads"),
]


@pytest.mark.parametrize(("case", "words", "remedy"), DISAGREEMENTS, ids=[row[0] for row in DISAGREEMENTS])
def test_ranks_that_disagree_all_learn_who_said_what(ranks: RankPool, case: str, words: list[str], remedy: str) -> None:
    everyone = _attempt(ranks, case)
    assert len({seen.text for seen in everyone}) == 1, [seen.text for seen in everyone]
    for seen in everyone:
        assert seen.kind == "ConfigurationError", seen
        assert seen.again is not None
        for word in [*words, remedy]:
            assert word in seen.text, (word, seen.text)
            assert word in seen.again.text, (word, seen.again.text)
    _check_common(everyone)


CALLED_WRONGLY = [
    ("batch_smaller_than_m", 0, "InputError", ["4 rows", "5 microbatches"], "n_microbatches <= 4"),
    ("empty_batch", 0, "InputError", ["0 rows"], "larger batch"),
    ("arguments_of_differing_lengths", 0, "InputError", ["4 rows", "has 3"], "Replicate()"),
    ("kwargs_of_another_length_on_rank_0", 0, "InputError", ["factor", "has 3"], "Replicate()"),
    ("kwargs_of_another_length_on_rank_1", 1, "InputError", ["kwargs", "3 rows", "has 4"], "the same batch"),
    ("target_of_another_length", 2, "InputError", ["target", "3 rows", "has 4"], "the same batch"),
    ("target_that_is_a_list_of_numbers", 2, "InputError", ["target is a list of 4 values"], "torch.as_tensor"),
    ("kwargs_with_an_array_of_rows", 1, "InputError", ["kwargs['factor'] is a numpy.ndarray"], "Replicate()"),
    ("output_with_a_number_of_each_microbatch", 2, "InputError", ["the output[1] is a float"], "return_outputs=False"),
    ("output_that_cannot_be_made_again", 2, "InputError", ["_Unrepeatable cannot be made again"], "a plain dict"),
    ("target_missing", 2, "InputError", ["target="], "without loss_fn"),
    ("loss_that_is_no_scalar", 2, "InputError", ["loss_fn", "(2,)"], "one element"),
    ("loss_that_is_complex", 2, "InputError", ["loss_fn", "torch.complex128"], "real part"),
    ("loss_that_is_an_integer", 2, "InputError", ["loss_fn", "torch.int64"], "floating-point dtype"),
    ("loss_kwargs_as_long_as_the_batch", 2, "InputError", ["loss_kwargs['weight']", "4 rows"], "Replicate()"),
    ("loss_that_is_no_tensor", 2, "InputError", ["loss_fn", "float"], "one element"),
    ("loss_that_depends_on_nothing", 2, "InputError", ["depends on nothing"], "detach()"),
    ("output_with_an_open_file", 0, "LayoutError", ["output[1]", "TextIOWrapper"], "may return tensors"),
    ("output_with_a_set_on_rank_1", 1, "LayoutError", ["output['names']", "set"], "may return tensors"),
    ("output_that_is_sparse", 0, "LayoutError", ["sparse"], "to_dense()"),
    ("output_that_is_quantized", 0, "LayoutError", ["quantized"], "dequantize()"),
    ("output_on_another_device", 1, "LayoutError", ["meta"], "device"),
    ("output_in_a_cycle", 0, "LayoutError", ["deep"], "cycle"),
    ("step_under_no_grad_everywhere", None, "InputError", ["no_grad"], "eval()"),
    ("step_under_no_grad_on_rank_1", 1, "InputError", ["no_grad"], "eval()"),
    ("losses_that_are_no_list", 2, "InputError", ["losses is a tuple"], "list"),
    ("losses_without_a_loss_function", 2, "InputError", ["losses="], "loss_fn"),
    ("args_chunk_spec_with_a_dimension_too_many", 0, "InputError", ["args", "dimension 2"], "chunk spec"),
    ("args_chunk_spec_for_two_arguments", 0, "InputError", ["2 chunk specs", "args"], "1 value"),
    ("output_merge_spec_that_fits_nothing", 2, "InputError", ["output_merge_spec", "Tensor"], "nested as the output"),
    ("args_chunk_spec_that_is_none", 0, "InputError", ["'rows'"], "TensorChunkSpec"),
    ("kwargs_chunk_spec_for_an_unknown_name", 1, "InputError", ["fctr"], "no such argument"),
    ("kwargs_that_hold_tensors_and_cannot_be_cut", 1, "InputError", ["kwargs['factor']", "factor'].x"], "Replicate()"),
    ("target_without_a_spec_where_arguments_have_one", 2, "InputError", ["target", "8 rows"], "target_chunk_spec="),
    ("offsets_of_packed_sequences", 0, "InputError", ["cu_seqlens", "4 numbers"], "one row for each microbatch"),
]


@pytest.mark.parametrize(
    ("case", "origin", "kind", "words", "remedy"), CALLED_WRONGLY, ids=[row[0] for row in CALLED_WRONGLY]
)
def test_a_call_that_cannot_work_is_an_error_on_every_rank(
    ranks: RankPool, case: str, origin: int | None, kind: str, words: list[str], remedy: str
) -> None:
    everyone = _attempt(ranks, case)
    for rank, seen in enumerate(everyone):
        assert seen.public, seen
        here = origin is None or rank == origin
        where = rank if origin is None else origin
        # With a fault on every rank, a rank may hear of another's before it comes to its own.
        expected = (
            {kind} if origin is not None and here else {kind, "RemoteStageError"} - ({kind} if not here else set())
        )
        assert seen.kind in expected, seen
        for word in [*words, remedy]:
            assert word in seen.text, (word, seen.text)
        if seen.kind == kind or origin is not None:
            assert f"rank {where}" in seen.text, seen.text
            assert f"stage {where}" in seen.text, seen.text
        assert seen.again is not None
        assert words[0] in seen.again.text, seen.again.text
        if origin is not None and not here:
            assert seen.origin["rank"] == origin
            assert seen.origin["stage"] == origin, "the cause does not name its stage"
            assert "failed at the end of the step" not in seen.text, seen.text
    _check_common(everyone)


RAISING = [
    ("module_that_raises_in_forward", 1, "ZeroDivisionError", "1F1", 1, "out of luck"),
    ("first_module_that_raises_in_forward", 0, "ZeroDivisionError", "0F0", 0, "out of luck"),
    ("module_that_raises_in_backward", 1, "ZeroDivisionError", "1B1", 1, "out of luck"),
    ("last_module_that_raises_in_backward", 2, "ZeroDivisionError", "2B0", 0, "out of luck"),
    ("loss_that_raises", 2, "ZeroDivisionError", "2F0", 0, "out of luck"),
    ("keyboard_interrupt_in_a_module", 1, "KeyboardInterrupt", "1F1", 1, "KeyboardInterrupt"),
    ("exit_in_a_module", 1, "SystemExit", "1F0", 0, "SystemExit"),
    ("error_with_a_long_text_in_another_alphabet", 1, "ZeroDivisionError", "1F1", 1, "\u8d85\u51fa"),
    ("error_that_cannot_be_printed", 1, "Mutters", "1F1", 1, "Mutters"),
]


@pytest.mark.parametrize(
    ("case", "origin", "kind", "action", "microbatch", "words"), RAISING, ids=[row[0] for row in RAISING]
)
def test_what_a_stage_raises_is_raised_there_and_told_to_every_rank(
    ranks: RankPool, case: str, origin: int, kind: str, action: str, microbatch: int, words: str
) -> None:
    everyone = _attempt(ranks, case)
    for rank, seen in enumerate(everyone):
        assert seen.again is not None
        assert kind in seen.again.text, seen.again.text
        for word in (f"rank {origin}", f"stage {origin}", action, f"microbatch {microbatch}"):
            assert word in seen.text, (word, seen.text)
        if rank == origin:
            assert seen.kind == kind, seen
            continue
        assert seen.kind == "RemoteStageError", seen
        assert words in seen.text, seen.text
        origin_seen = {key: seen.origin[key] for key in ("rank", "stage", "action", "microbatch")}
        assert origin_seen == {"rank": origin, "stage": origin, "action": action, "microbatch": microbatch}
        assert "Traceback" in seen.origin["remote_traceback"]
        assert "runtime/executor.py" not in seen.origin["remote_traceback"], (
            "pypipe's own frames stand before the user's"
        )
        assert "bad_input_setup.py" in seen.origin["remote_traceback"] or len(seen.text) > 20_000
    _check_common(everyone)


def test_a_graph_that_reaches_from_one_microbatch_into_another_is_an_error_with_advice(ranks: RankPool) -> None:
    everyone = _attempt(ranks, "graph_that_microbatches_share")
    assert [seen.kind for seen in everyone] == ["RemoteStageError", "RemoteStageError", "RuntimeError"], everyone
    for seen in everyone:
        for word in ("a second time", "rank 2", "stage 2", "compute in each forward", "detach() it"):
            assert word in seen.text, (word, seen.text)
    _check_common(everyone)


def test_outputs_that_cannot_be_merged_are_an_error_on_every_rank_at_the_next_step_at_the_latest(
    ranks: RankPool,
) -> None:
    everyone = ranks.run(SIZE, cases.merge_fails_at_the_end, timeout=TIMEOUT)
    assert everyone[SIZE - 1].kind == "InputError"
    assert [seen.kind for seen in everyone[:-1]] == ["RemoteStageError"] * (SIZE - 1), everyone
    for seen in everyone:
        assert "return_outputs=False" in seen.text, seen.text
        assert f"rank {SIZE - 1}" in seen.text
        assert f"stage {SIZE - 1}" in seen.text
    _check_common(everyone)


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("wait", [False, True], ids=["at once", "between steps"])
def test_a_rank_that_closes_or_does_fewer_steps_than_its_peers_is_an_error_on_all_of_them(
    ranks: RankPool, leaver: int, wait: bool
) -> None:
    everyone = ranks.run(SIZE, cases.leave_early, leaver, wait, timeout=TIMEOUT)
    for rank, seen in enumerate(everyone):
        assert seen.trained == []
        if rank == leaver:
            assert seen.kind == ""
            continue
        assert seen.kind in ("PeerLost", "RemoteStageError"), seen
        assert f"rank {leaver}" in seen.text, seen.text
        assert "equally often" in seen.text, seen.text
        assert seen.again is not None
        assert seen.again.public
        assert "PeerLost" in seen.again.text, seen.again.text


def test_a_rank_that_closes_before_its_first_step_is_an_error_that_names_it(ranks: RankPool) -> None:
    everyone = ranks.run(2, cases.close_at_start, 1, timeout=TIMEOUT)
    assert [seen.public for seen in everyone] == [True, True]
    assert "rank 1" in everyone[0].text
    assert "closed" in everyone[1].text
    ranks.close()  # the ranks have met a different number of times


def test_step_inside_the_same_schedules_step_is_refused_on_every_rank(ranks: RankPool) -> None:
    for size in (1, SIZE):
        everyone = ranks.run(size, cases.step_inside_itself, timeout=TIMEOUT)
        for seen in everyone:
            assert seen.public, seen
            assert "inside" in seen.text or "already" in seen.text or "running" in seen.text, seen.text
            assert seen.trained == []


def test_ctrl_c_reaches_a_rank_that_waits_for_another_one(ranks: RankPool, tmp_path: Path) -> None:
    everyone = ranks.run(2, cases.interrupt_while_waiting, str(tmp_path), timeout=TIMEOUT)
    assert everyone[0].kind == "KeyboardInterrupt", everyone[0]
    assert everyone[1].kind == "RemoteStageError", everyone[1]
    assert "KeyboardInterrupt" in everyone[1].text
    assert everyone[1].origin["rank"] == 0
    assert [seen.trained for seen in everyone] == [[], []]


def test_every_error_of_pypipe_survives_pickling() -> None:
    remote = pypipe.RemoteStageError(
        "stopped", rank=1, stage=2, action="2F0", microbatch=0, remote_traceback="Traceback"
    )
    copied = pickle.loads(pickle.dumps(remote))
    assert (str(copied), vars(copied)) == (str(remote), vars(remote))
    for kind in (pypipe.ConfigurationError, pypipe.InputError, pypipe.PeerLost, pypipe.PipelineTimeout):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
