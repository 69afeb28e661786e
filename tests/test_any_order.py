"""Calls of all modes in any order, by one process after another on one folder of winners."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_fakes import H100, LAW, K, N, ask, faked
from dispatch_fakes import Machine
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import costmodel
from costmodel.dispatch import dispatch
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload

pytestmark = pytest.mark.slow

MS = st.sampled_from([2049, 2060, 2300, 2560, 2561, 2900, 700])
"""Of two neighbouring buckets, and of one that is timed as well."""

UNTIMED = ("predict", "never", "heuristic")
TIMED = ("auto", "topk")


class AnyOrder(RuleBasedStateMachine):
    """What holds whatever came before.

    Attributes:
        chosen: what each timed mode has for an m, as long as nothing fails.
        buckets: of each timed mode, those that were asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.folder = pytest.MonkeyPatch(), Path(tempfile.mkdtemp())
        self.machine: Machine = faked(self.patch, self.folder)
        self.chosen: dict[tuple[str, int], Any] = {}
        self.buckets: set[tuple[str, tuple[int, int]]] = set()

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.folder)

    def call(self, m: int, mode: str) -> None:
        """A call finds what may run; the same call again finds the same, and times nothing."""
        found = ask(m, mode)
        timed = len(self.machine.bench.timed)
        assert ask(m, mode) is found
        assert len(self.machine.bench.timed) == timed
        workload = Workload.dense(m, N, K)
        assert found.config is None or not why_illegal(found.config, workload, H100.device)
        if mode in TIMED:
            self.buckets.add((mode, dispatch.winners.buckets.of(m)))
            assert self.chosen.setdefault((mode, m), found.chosen) == found.chosen

    @rule(m=MS, mode=st.sampled_from(TIMED))
    def timed(self, m: int, mode: str) -> None:
        self.call(m, mode)

    @rule(m=MS, mode=st.sampled_from(UNTIMED))
    def untimed(self, m: int, mode: str) -> None:
        used = len(self.machine.bench.waited)
        self.call(m, mode)
        assert len(self.machine.bench.waited) == used

    @rule(m=MS)
    def never_takes_what_was_timed(self, m: int) -> None:
        if ("auto", m) in self.chosen:
            assert ask(m, "never").chosen == self.chosen["auto", m]

    @rule(m=MS)
    def background(self, m: int) -> None:
        """When it is done, it has what ``auto`` has."""
        a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
        deadline = time.monotonic() + 60
        while True:
            costmodel.matmul(a, b, mode="background", model=LAW)
            if dispatch._background.is_idle:
                break
            assert time.monotonic() < deadline
            time.sleep(0.002)
        costmodel.matmul(a, b, mode="background", model=LAW)
        found = costmodel.result_for(a, b, mode="background", model=LAW)
        assert found is not None
        used = len(self.machine.bench.waited)
        self.call(m, "auto")
        assert found.chosen == self.chosen["auto", m]
        assert len(self.machine.bench.waited) == used

    @rule(m=MS, mode=st.sampled_from((*TIMED, *UNTIMED)))
    def in_a_capture(self, m: int, mode: str) -> None:
        """Nothing is timed; that nothing is loaded is seen to by the machine."""
        used = len(self.machine.bench.waited)
        self.machine.capturing = True
        a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that torch computes it
            costmodel.matmul(a, b, mode=mode, model=LAW)
        self.machine.capturing = False
        assert len(self.machine.bench.waited) == used

    @rule(m=MS)
    def warmup(self, m: int) -> None:
        costmodel.warmup([(m, N, K)], model=LAW)
        before = costmodel.stats()
        first, last = dispatch.winners.buckets.of(m)
        for any_m in range(first, last + 1, 101):
            self.call(any_m, "auto")
        done = costmodel.stats().since(before)
        assert (done.tuned, done.timed, done.compiled, done.loaded) == (0, 0, 0, 0)

    @rule()
    def another_process(self) -> None:
        self.machine.restart()

    @rule()
    def forget(self) -> None:
        dispatch.winners.forget()
        dispatch.forget_launches()

    @invariant()
    def each_bucket_is_tuned_once_and_spread_once(self) -> None:
        assert len(self.machine.bench.waited) <= 2 * len(self.buckets)

    @invariant()
    def what_is_on_disk_can_be_read(self) -> None:
        _, unusable = dispatch.winners.cache.survey()
        assert not unusable


# Unshrunk: it would take minutes, and there are few steps.
AnyOrder.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
test_any_order = AnyOrder.TestCase
