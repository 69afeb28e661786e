"""Searches ranked candidates: compile and time the best few, time the finalists again, choose.

Compiled candidates are timed while the rest is still being compiled. Nothing here knows what the
candidates compute: the problem is passed on to the runner. The caller says which candidates are
equal, how to compile them, and if there is a library that they must beat.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from time import monotonic, perf_counter
from typing import Any, TypeVar

from costmodel.data.measurement import Batch, Candidate, Measurement, Runner
from costmodel.validation import log, one_line

CompileCandidates = Callable[[Batch], Generator[Batch, None, None]]
"""Begins to compile candidates; yields those of each binary, with its artifact, once it is there.

It leaves the binaries where the runner finds them. It yields nothing if no binary is needed.
"""

T = TypeVar("T")
Config = Any  # of a candidate; None stands for the library

LIBRARY_COUNTS = 0.97
"""Factor on torch's time in a comparison: a candidate that is less than 3 % faster loses to torch.

From one process to the next the two times differ by as much, and the choice is for all processes.
"""

_FINALISTS, _MOST_FINALISTS = 3, 8  # the second where timings scatter: all take a minute at most
_FAR = 8.0  # a candidate this many times slower is no finalist
_ROUNDS = (9, 27, 27)  # of the finalists' comparison, and of its repetitions where they scatter
_LOSS = 1.02  # a choice may turn out this many times slower than another that was compared
_COMPILED_AT_ONCE = 256
_TIMED_AT_ONCE = 32


@dataclass(frozen=True)
class Choice:
    """The configuration to launch (None is the library) and why.

    Attributes:
        reliable: it would be chosen again.
        timed: it rests on timings.
        unsteady: the timings scatter too much to be sure, as when others use the device.
    """

    config: Config | None
    why: str
    reliable: bool
    timed: bool = True
    unsteady: bool = False


def fastest(
    times: Mapping[Config | None, Measurement],
) -> tuple[Config | None, list[Config | None]]:
    """Return the fastest, and its rivals: those that may be faster by more than a choice may lose.

    Args:
        times: of candidates that work; None is the library, which wins if it is close.
    """
    counts = {config: LIBRARY_COUNTS if config is None else 1.0 for config in times}
    best = min(times, key=lambda c: counts[c] * times[c].latency_us, default=None)
    least_us = {c: counts[c] * m.least_us for c, m in times.items() if c != best}
    return best, [
        c for c, us in least_us.items() if counts[best] * times[best].most_us > _LOSS * us
    ]


@dataclass
class TopKSearch:
    """One search: :meth:`run`, :meth:`remeasure_finalists` and :meth:`choose`, in this order.

    Attributes:
        problem: what the runner times the candidates on.
        candidates: best first; ``ranked_by`` names the model that ranked them.
        runner, compile_: time and compile them.
        identity: equal for candidates that do the same; None where that is not known yet.
        deadline: of ``monotonic()``; past it nothing new is begun, once something is timed.
        library: its measurement, once timed.
        measured: outcomes so far; for finalists, that of their last comparison.
        compiled: number of binaries that the compiler returned.
        compile_s, measure_s: wall seconds spent waiting for binaries, and in the runner.
    """

    problem: Any
    candidates: Batch
    ranked_by: str
    runner: Runner
    compile_: CompileCandidates
    identity: Callable[[Candidate], object]
    deadline: float = inf
    library: Measurement | None = None
    measured: dict[Config, Measurement] = field(default_factory=dict)
    finalists: list[Config] = field(default_factory=list)
    compiled: int = 0
    compile_s: float = 0.0
    measure_s: float = 0.0
    _seen: set[object] = field(default_factory=set)

    @property
    def is_late(self) -> bool:
        """True if the time is up and there is something to choose from."""
        works = self.library is not None or any(m.ok for m in self.measured.values())
        return works and bool(self.measured) and monotonic() > self.deadline

    def run(self, wanted: int, *, with_library: bool = False) -> None:
        """Time candidates in their order until ``wanted`` of them work, or none is left.

        Args:
            with_library: the library is timed too, while the first candidates are compiled.
        """
        row = 0
        while row < len(self.candidates) and not self.is_late:
            missing = wanted - len(self._working())
            if missing <= 0:
                break
            batch = self.candidates[row : row + min(missing, _COMPILED_AT_ONCE)]
            row += len(batch)
            self._try(batch, with_library)
            with_library = False
            if self._without_room() is not None:
                break

    def remeasure_finalists(self) -> None:
        """Time the best few and the library again, in turn, so that a drift favours none of them.

        They are timed again, longer, while they scatter too much to be sure. Nothing is timed after
        that: the runner may give back what it holds.
        """
        try:
            for rounds in _ROUNDS:
                finalists = [*self._foremost()]
                if self.library is not None and self.library.ok:
                    finalists.append(None)
                if monotonic() > self.deadline or len(finalists) < 2:
                    return
                again = self._timed(self.runner.compare, self.problem, finalists, rounds)
                for config, measurement in zip(finalists, again, strict=True):
                    if config is not None:
                        self._note(config, measurement)
                    elif measurement.ok:  # a crash is not the library's doing
                        self.library = measurement
                self.finalists = [config for config in finalists if config is not None]
                if not self._fastest()[1]:
                    return
        finally:
            self.runner.rest()

    def _foremost(self) -> list[Config]:
        """The best few, and others whose timings scatter so much that they may be the best."""
        works = self._working()
        best_us = min((self.measured[config].latency_us for config in works), default=0.0)
        near = [c for c in works[:_FINALISTS] if self.measured[c].least_us < _FAR * best_us]
        may_win = [
            c for c in works[_FINALISTS:_MOST_FINALISTS] if self.measured[c].least_us < best_us
        ]
        return near + may_win

    def _fastest(self) -> tuple[Config | None, list[Config | None]]:
        """Apply :func:`fastest` to the finalists that work; if none does, to all that works."""
        works = self._working()
        compared = [config for config in works if config in self.finalists]
        times = {config: self.measured[config] for config in compared or works}
        if self.library is not None and self.library.ok:
            times[None] = self.library
        return fastest(times)

    def choose_untimed(self, compiles: Sequence[bool], reason: str) -> Choice:
        """The first candidate that compiles; the library if none does.

        Args:
            compiles: which candidates are known to compile; the others are compiled, one by one.
            reason: why nothing is timed.
        """
        for candidate, known in zip(self.candidates, compiles):
            ready = None if known else self._next(self.compile_([candidate]))
            self.compiled += ready is not None
            artifact = ready[0].artifact if ready else None
            if artifact is None or artifact.ok:
                return self._predicted(candidate.config, reason, reliable=True)
            self._note(candidate.config, Measurement(artifact.status, error=artifact.error))
        why = "no configuration compiles"
        warnings.warn(f"{self.problem}: {why}; torch computes it", RuntimeWarning, 4)
        return Choice(None, why, reliable=False, timed=False)

    def _predicted(self, config: Config, reason: str, *, reliable: bool) -> Choice:
        why = f"first choice of {self.ranked_by} that compiles: {reason}"
        return Choice(config, why, reliable, timed=False)

    def choose(self) -> Choice:
        """The fastest that works; the library where it is as fast, or where nothing else works."""
        works = self._working()
        library = self.library
        if not works:
            return self._choose_without_timings()
        on_time = monotonic() <= self.deadline
        best, rivals = self._fastest()
        why = f"fastest of {len(works)} timed, {self.measured[works[0]].latency_us:.2f} us"
        if library is not None and not library.ok:
            why += f"; torch could not be timed: {library.status}"
        elif library is not None and (best is None or None in rivals):
            best = None  # a candidate wins only if it is sure to
            why = f"torch takes {library.latency_us:.2f} us; the {why}, is not surely 3 % faster"
        elif library is not None:
            why += f"; torch takes {library.latency_us:.2f}"
        if rivals:
            why += "; the timings scatter too much to be sure, as if others used the device"
        steady = not rivals and (library is None or library.ok)
        return Choice(best, why, steady and on_time, unsteady=on_time and bool(rivals))

    def _choose_without_timings(self) -> Choice:
        """The first candidate where there was no memory to time any; else the library."""
        if (first := self._without_room()) is not None:
            error = self.measured[first].error
            log.warning("%s is not timed: %s", self.problem, error)
            return self._predicted(first, error, reliable=False)
        outcomes = Counter(m.status for m in self.measured.values())
        counts = ", ".join(f"{n} {status}" for status, n in outcomes.items()) or "none tried"
        why = f"no Triton configuration could be timed ({counts})"
        if self.library is not None:
            warnings.warn(f"{self.problem}: {why}; torch computes it", RuntimeWarning, 5)
        return Choice(None, why, reliable=False)

    def _working(self) -> list[Config]:
        """List candidates that work: finalists, which were timed in turn, first; then by time."""
        works = [c for c, m in self.measured.items() if m.ok]
        final = self.finalists
        return sorted(works, key=lambda c: (c not in final, self.measured[c].latency_us))

    def _without_room(self) -> Config | None:
        """The first candidate, if there is no device memory to time it or any other."""
        lacking = {config for config, m in self.measured.items() if m.no_room}
        return next((c.config for c in self.candidates if c.config in lacking), None)

    def _try(self, candidates: Batch, with_library: bool) -> None:
        """Compile candidates, and time each as soon as its binary is there."""
        before = self.compiled
        with closing(self.compile_(candidates)) as made:  # what is not compiled yet need not be
            if with_library:
                self.library = self._timed(self.runner.measure_torch, self.problem)
            while (ready := self._next(made)) is not None:
                self.compiled += 1
                self._measure(ready)
                if self.is_late:
                    break
        if self.compiled == before:  # a runner that answers from a recording needs no binary
            self._measure(candidates)

    def _next(self, made: Iterator[Batch]) -> Batch | None:
        """Wait for the candidates of the next binary; None if there are no more."""
        start = perf_counter()
        ready = next(made, None)
        self.compile_s += perf_counter() - start
        return ready

    def _measure(self, candidates: Batch) -> None:
        """Time the candidates that compiled and do not repeat another one."""
        fit = []
        for candidate in candidates:
            artifact = candidate.artifact
            if artifact is not None and not artifact.ok:
                self._note(candidate.config, Measurement(artifact.status, error=artifact.error))
                continue
            same = self.identity(candidate)  # may be known only now that it is compiled
            if same is None or same not in self._seen:
                self._seen.add(same)
                fit.append(candidate)
        for first in range(0, len(fit), _TIMED_AT_ONCE):
            if self.is_late:
                return
            part = fit[first : first + _TIMED_AT_ONCE]
            best_us = min((m.latency_us for m in self.measured.values() if m.ok), default=inf)
            outcomes = self._timed(self.runner.measure, self.problem, part, best_us)
            for candidate, measurement in zip(part, outcomes, strict=True):
                self._note(candidate.config, measurement)

    def _note(self, config: Config, measurement: Measurement) -> None:
        is_first = all(m.status != "wrong_result" for m in self.measured.values())
        self.measured[config] = measurement
        error = one_line(measurement.error)
        if measurement.status == "wrong_result":  # a broken kernel has a thousand of them
            level = logging.WARNING if is_first else logging.INFO
            log.log(level, "%s computes %s wrong: %s", config, self.problem, error)
        elif not measurement.ok:
            log.info("%s: %s %s", config, measurement.status, error)

    def _timed(self, function: Callable[..., T], *args: object) -> T:
        start = perf_counter()
        result = function(*args)
        self.measure_s += perf_counter() - start
        return result
