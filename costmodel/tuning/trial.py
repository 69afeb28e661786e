"""Compiles and times the candidates of one workload, in the order of a ranking, and chooses.

What is compiled is timed while the rest is still being compiled.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from costmodel.compile.artifact import Artifact
from costmodel.data.measurement import Candidate, Compares, Measurement, Rests, Runner
from costmodel.evaluation.duplicates import identity
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import Specialization, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.device import DeviceRunner
from costmodel.tuning.ranking import Ranking
from costmodel.validation import one_line

__all__ = ["Choice", "Compile", "Trial"]

Compile = Callable[[Sequence[Specialization], Target], Iterable[Artifact]]
"""Begins to compile in other processes, and leaves the binaries where the runner finds them."""

T = TypeVar("T")

_FINALISTS = 3
# Repeats of a timing differ by up to 1.3 %: Triton must win by more than most of that.
_MARGIN = 0.99
_COMPILED_AT_ONCE = 256
_TIMED_AT_ONCE = 32

log = logging.getLogger("costmodel")


@dataclass(frozen=True, slots=True)
class Choice:
    """What to launch (None is torch), why, whether it would be chosen again, and by timing."""

    config: GemmConfig | None
    why: str
    reliable: bool
    timed: bool = True


@dataclass
class Trial:
    """One trial: :meth:`run`, :meth:`rematch` and :meth:`choose`, in this order.

    Attributes:
        ranking: the candidates, best first.
        runner, compile_: what times and compiles them.
        deadline: of ``time.monotonic()``; past it nothing new is begun, once something is timed.
        torch: what ``torch.matmul`` took, once timed.
        measured: outcomes so far; of the finalists the one of their last comparison.
        compiled: how many binaries were asked of the compiler.
        compile_s, measure_s: wall seconds spent waiting for binaries, and in the runner.
    """

    ranking: Ranking
    runner: Runner
    compile_: Compile
    deadline: float = inf
    torch: Measurement | None = None
    measured: dict[GemmConfig, Measurement] = field(default_factory=dict)
    finalists: list[GemmConfig] = field(default_factory=list)
    compiled: int = 0
    compile_s: float = 0.0
    measure_s: float = 0.0
    _seen: set[object] = field(default_factory=set)

    @property
    def workload(self) -> Workload:
        return self.ranking.workload

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, wanted: int, *, with_torch: bool = False) -> None:
        """Time candidates in the order of the ranking until so many work, or none is left.

        Args:
            with_torch: torch is a candidate too; it is timed while the first are compiled.
        """
        row = 0
        while row < len(self.ranking) and not (self.late and self.measured):
            missing = wanted - len(self._working())
            if missing <= 0:
                break
            batch = range(row, min(row + missing, row + _COMPILED_AT_ONCE, len(self.ranking)))
            row = batch.stop
            self._try([Candidate(self.ranking.configs[i]) for i in batch], with_torch)
            with_torch = False
            if self._no_room() is not None:
                break

    def rematch(self) -> None:
        """Time the best few and torch again, in turn, so that a drift favours none of them.

        Nothing is timed after that: the runner may give back what it holds.
        """
        try:
            self._compare()
        finally:
            if isinstance(self.runner, Rests):
                self.runner.rest()

    def _compare(self) -> None:
        finalists: list[GemmConfig | None] = [*self._working()[:_FINALISTS]]
        if self.torch is not None and self.torch.ok:
            finalists.append(None)
        runner = self.runner
        if not isinstance(runner, Compares) or self.late or len(finalists) < 2:
            return
        again = self._timed(runner.compare, self.workload, finalists)
        for config, measurement in zip(finalists, again, strict=True):
            if config is not None:
                self._note(config, measurement)
                self.finalists.append(config)
            elif measurement.ok:  # a crash is not torch's doing
                self.torch = measurement

    def choose(self) -> Choice:
        """The fastest that works; torch where it is as fast, or where nothing else works."""
        works = self._working()
        torch = self.torch
        if not works and (first := self._no_room()) is not None:
            why = (
                f"first choice of {self.ranking.model} that compiles: {self.measured[first].error}"
            )
            log.warning("%s is not timed: %s", self.workload, self.measured[first].error)
            return Choice(first, why, reliable=False, timed=False)
        if not works:
            outcomes = Counter(m.status for m in self.measured.values())
            counts = ", ".join(f"{n} {status}" for status, n in outcomes.items()) or "none tried"
            why = f"no Triton configuration could be timed ({counts})"
            warnings.warn(f"{self.workload}: {why}; torch computes it", RuntimeWarning, 4)
            return Choice(None, why, False)
        on_time = not self.late
        best_us = self.measured[works[0]].latency_us
        fastest = f"fastest of {len(works)} timed, {best_us:.2f} us"
        if torch is None:
            return Choice(works[0], fastest, on_time)
        if not torch.ok:
            return Choice(works[0], f"{fastest}; torch could not be timed: {torch.status}", False)
        if best_us <= _MARGIN * torch.latency_us:
            return Choice(works[0], f"{fastest}; torch takes {torch.latency_us:.2f}", on_time)
        why = f"torch takes {torch.latency_us:.2f} us, the {fastest}: not 1 % less"
        return Choice(None, why, on_time)

    def _working(self) -> list[GemmConfig]:
        """What works, fastest first; finalists, timed in turn, before the others."""
        works = [c for c, m in self.measured.items() if m.ok]
        final = self.finalists
        return sorted(works, key=lambda c: (c not in final, self.measured[c].latency_us))

    def _no_room(self) -> GemmConfig | None:
        """The first choice, if there is no device memory to time it or any other."""
        lacking = {config for config, m in self.measured.items() if m.no_room}
        return next((c for c in self.ranking.configs if c in lacking), None) if lacking else None

    def _try(self, candidates: Sequence[Candidate], with_torch: bool) -> None:
        """Compile candidates, and time each as soon as its binary is there."""
        waiting: dict[Specialization, list[Candidate]] = {}
        for candidate in candidates:
            waiting.setdefault(specialize(self.workload, candidate.config), []).append(candidate)
        before = self.compiled
        made = iter(self.compile_(list(waiting), self.ranking.target))
        try:
            if with_torch:
                self.torch = self._timed(self.runner.measure_torch, self.workload)
            while (artifact := self._next(made)) is not None:
                self.compiled += 1
                self._measure(
                    [Candidate(c.config, artifact) for c in waiting.pop(artifact.spec, ())]
                )
                if self.late and self.measured:
                    break
        finally:
            if isinstance(made, Generator):
                made.close()  # what is not compiled yet need not be
        if self.compiled == before:  # a runner that answers from a recording needs no binary
            self._measure(candidates)

    def _next(self, made: Iterator[Artifact]) -> Artifact | None:
        """Wait for the next artifact; None if there are no more."""
        start = time.perf_counter()
        artifact = next(made, None)
        self.compile_s += time.perf_counter() - start
        return artifact

    def _new(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Without repetitions, some of which are known only once they are compiled."""
        new = []
        for candidate in candidates:
            same = identity(self.workload, candidate.config, candidate.artifact)
            if same is None or same not in self._seen:
                new.append(candidate)
                self._seen.add(same)
        return new

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        """Time what compiled, and does what none before does."""
        fit = []
        for candidate in candidates:
            artifact = candidate.artifact
            if artifact is not None and not artifact.ok:
                self._note(candidate.config, Measurement(artifact.status, error=artifact.error))
            else:
                fit.append(candidate)
        candidates = self._new(fit)
        for first in range(0, len(candidates), _TIMED_AT_ONCE):
            if self.late and self.measured:
                return
            part = candidates[first : first + _TIMED_AT_ONCE]
            outcomes = self._timed(self._outcomes, part)
            for candidate, measurement in zip(part, outcomes, strict=True):
                self._note(candidate.config, measurement)

    def _outcomes(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Measurements; a device is told the best so far, and gives up early what is far slower."""
        if not isinstance(self.runner, DeviceRunner):
            return self.runner.measure(self.workload, candidates)
        best_us = min((m.latency_us for m in self.measured.values() if m.ok), default=inf)
        return self.runner.measure(self.workload, candidates, best_us)

    def _note(self, config: GemmConfig, measurement: Measurement) -> None:
        is_first = all(m.status != "wrong_result" for m in self.measured.values())
        self.measured[config] = measurement
        error = one_line(measurement.error)
        if measurement.status == "wrong_result":  # a broken kernel has a thousand of them
            level = logging.WARNING if is_first else logging.INFO
            log.log(level, "%s computes %s wrong: %s", config, self.workload, error)
        elif not measurement.ok:
            log.info("%s: %s %s", config, measurement.status, error)

    def _timed(self, function: Callable[..., T], *args: object) -> T:
        start = time.perf_counter()
        result = function(*args)
        self.measure_s += time.perf_counter() - start
        return result
