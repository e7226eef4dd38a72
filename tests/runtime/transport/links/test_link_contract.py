"""One contract for all links: any tensor arrives as it was sent, wherever it is in a message, and so does its gradient.

The NCCL link runs on the emulated driver and NCCL.
"""

from __future__ import annotations

import channel_pair
import link_contract
import pytest
from rank_pool import RankPool

DTYPES = [str(dtype).removeprefix("torch.") for dtype in channel_pair.DTYPES]


def _check(request: pytest.FixtureRequest, link: str, case: str, wanted: str | None = None) -> None:
    pool: RankPool = request.getfixturevalue("gpus" if link == "nccl" else "ranks")
    found = [text for texts in pool.run(2, link_contract.check, link, case, wanted) for text in texts]
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("link", link_contract.LINKS)
@pytest.mark.parametrize("way", list(link_contract.WAYS))
def test_a_tensor_arrives_as_it_was_sent_in_each_place_of_a_message(
    request: pytest.FixtureRequest, link: str, way: str
) -> None:
    _check(request, link, way)


@pytest.mark.parametrize("link", link_contract.LINKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_arrive_as_they_were_sent(request: pytest.FixtureRequest, link: str, dtype: str) -> None:
    _check(request, link, dtype)


@pytest.mark.parametrize("link", link_contract.LINKS)
def test_every_kind_of_tensor_may_come_right_before_every_other(request: pytest.FixtureRequest, link: str) -> None:
    _check(request, link, "every pair")


@pytest.mark.parametrize("link", ["shm", "c10d"])  # NCCL takes no checksums
def test_messages_with_checksums_arrive_as_they_were_sent_too(request: pytest.FixtureRequest, link: str) -> None:
    _check(request, link, "every pair", "checksum")
