"""``k="auto"`` on a GPU: as many are timed as the model asks for, and the result is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import costmodel
from costmodel.dispatch import dispatch
from costmodel.gemm.workload import Workload
from costmodel.tuning.cache import WinnerCache
from costmodel.tuning.winners import Question, Winners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*rules of thumb rank:RuntimeWarning"),
]

SIZES = (192, 1024, 2048)


def test_auto_times_what_it_says_and_its_winner_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "winners", Winners(WinnerCache(tmp_path)))
    result = costmodel.tune(*SIZES, k="auto")
    assert 1 <= result.k <= 32
    assert sum(m.ok for _, m in result.measured) == result.k
    if result.expected_kept is not None:
        assert 0.5 < result.expected_kept <= 1
    again = Winners(WinnerCache(tmp_path)).find(Question(Workload.dense(*SIZES), 0, k="auto"))
    assert again == result
