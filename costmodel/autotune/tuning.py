"""The first call of a kind: take known timings, compile and time the rest, and choose one."""

import functools
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import torch
from triton import knobs

from costmodel.autotune.call import KernelCall
from costmodel.autotune.compiling import Compiled, Compiling, wait_for_first
from costmodel.autotune.isolated import IsolatedRunner, apart
from costmodel.autotune.learner import OTHERS, Learner, Tried, distance
from costmodel.autotune.options import Options
from costmodel.autotune.prior import load_meanwhile, predicted
from costmodel.autotune.runner import KernelRunner
from costmodel.autotune.store import KernelStore, config_name, is_config, lasting_text
from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Batch, Candidate, Measurement
from costmodel.errors import CompileError, InvalidInput
from costmodel.gemm.specialize import device_compilers
from costmodel.hardware.target import Target
from costmodel.processes import Action
from costmodel.tuning.counters import count
from costmodel.tuning.modes import default_mode
from costmodel.tuning.ranks import first_said
from costmodel.tuning.search import TopKSearch
from costmodel.validation import log, one_line

_SILENT_S = 2.0  # of tuning, before it prints its progress
_PATIENCE_S, _WORTH = 0.5, 0.02  # wait for the last binaries; gain that is worth the whole wait

store = KernelStore()


class Tuning:
    """The tuning of one call.

    Args:
        tuner: a ``triton.runtime.Autotuner``.
        key: of the call, by ``State.key_of`` with all arguments.
        args, kwargs: passed to its ``run``.
        configs: to choose from; None: those that the user's own pruning functions leave.

    Attributes:
        compiling: compiles the configurations.
        resets: True: ``reset_to_zero`` is applied once more for the launch that follows.
    """

    def __init__(
        self,
        tuner: Any,
        options: Options,
        key: tuple[Any, ...],
        args: Any,
        kwargs: Any,
        configs: Sequence[Any] | None = None,
    ):
        self._tuner, self._options = tuner, options
        self._head = getattr(tuner.fn, "head", "before")
        self._must_try = getattr(tuner.fn, "must_try", lambda config: False)
        self._call = KernelCall(tuner, args, kwargs)
        configs = self._pruned(kwargs) if configs is None else configs
        self.configs, self._by_name = configs, {config_name(x): x for x in configs}
        self._target = Target.current(torch.cuda.current_device())
        self._key = self._readable(key)
        self.resets, self._anew = True, False
        self._begun = monotonic()
        self._end = self._begun + options.budget_s
        self._done: dict[str, Measurement] = {}
        self._enough = False  # the learner wants no more
        self._told = ""  # the last line of progress
        self._first_of: dict[object, str] = {}
        self._repeats: dict[str, str] = {}  # name: an earlier one that does the same
        self.compiling = Compiling(self._call, self._by_name)

    def __str__(self) -> str:
        return str(self._call)

    # --- What is known ----------------------------------------------------------------------------

    def known(self) -> Any:
        """Return the configuration that was chosen before from the same list; None if none was."""
        kept = store.read(self._key)
        if self._is_exhaustive:
            kept.untried = []
        if (name := kept.choice(self._by_name)) is None:
            return None
        if error := self._call.refused(self._by_name[name]):
            self._note(name, Measurement("launch_error", error=error))
            self._anew = True  # others may be refused too
            return None
        return self._by_name[name]

    def best_known(self) -> Any:
        """Return the fastest of the timed configurations; None if none was timed."""
        measured = store.read(self._key).measured
        times = {n: m.latency_us for n, m in measured.items() if m.ok and n in self._by_name}
        return self._by_name[min(times, key=times.__getitem__)] if times else None

    @property
    def is_empty(self) -> bool:
        """Return True if the call launches no program, so that nothing can be learned from it."""
        return 0 in self._call.grid(self.configs[0])

    @property
    def _is_exhaustive(self) -> bool:
        return (self._options.mode or default_mode()) == "exhaustive"

    def _pruned(self, kwargs: dict[str, Any]) -> list[Any]:
        """Return the configurations that the user's own pruning functions leave."""
        tuner = self._tuner
        tuner.nargs = {k: v for k, v in self._call.named.items() if k not in kwargs}
        try:
            return list(tuner.prune_configs(kwargs)) or list(tuner.configs)
        finally:
            tuner.nargs = None

    def _readable(self, key: tuple[Any, ...]) -> dict[str, Any]:
        """Return the key for the store: all that timings depend on, such as source and device."""
        return {
            "name": f"{self._tuner.base_fn.__module__}.{self._tuner.base_fn.__qualname__}",
            "source": self._call.source(),
            "key": self._call.key(),
            "specialized": [lasting_text(part) for part in key[2:]],  # [:2]: device, ranks
            **self._target.here(),
        }

    # --- Choosing ---------------------------------------------------------------------------------

    def choose(self) -> Any:
        """Compile and time the configurations that may be best; return the best.

        Raises:
            CompileError: no configuration can be compiled and launched.
            BrokenContext: a configuration has broken the CUDA context.
        """
        kept = store.read(self._key)
        known = {} if self._anew else kept.known(self._by_name)
        self._done |= known
        if not kept.arguments:
            store.describe(self._key, self._call.described())
        load_meanwhile(self._target, self._head)
        self.compiling.start()
        runner = self._runner()
        search = TopKSearch(
            problem=self._call,
            candidates=[Candidate(name) for name in self._by_name if name not in known],
            ranked_by="the list",
            runner=runner,
            compile_=functools.partial(self._compile, meanwhile=runner.get_ready),
            identity=self._identity,
            deadline=self._end,
            measured=self._done,
        )
        try:
            search.run(len(self._by_name))
            # What is known on disk may be launched too, and its code is not known here.
            self._call.keep(None if known else self.compiling.written())
            if runner.agree:
                for name, outcome in runner.outvoted().items():
                    self._note(name, outcome)
            search.remeasure_finalists()
            for name, first in self._repeats.items():
                if first in search.measured:  # else the budget ended before it
                    self._note(name, search.measured[first])
        finally:
            with suppress(torch.AcceleratorError):  # in a broken context nothing can be put back
                self._call.restore()
            if self._told:
                print(file=sys.stderr)
        choice = search.choose()
        if choice.config is None:
            raise self._none_works(search.measured.values())
        self._tuner.configs_timings = {
            self._by_name[n]: [x / 1e3 if m.ok else inf for x in (m.latency_us, m.p10_us, m.p90_us)]
            for n, m in search.measured.items()
        }
        untried = [name for name in self._by_name if name not in self._done]
        if choice.timed and (self._enough or not untried):
            unsteady = (choice.unsteady or search.is_late) and not kept.unsteady
            store.choose(self._key, choice.config, choice.why, untried, unsteady=unsteady)
        costs = f"{search.compile_s:.2f} s compiling, {search.measure_s:.2f} s timing"
        log.info("%s: %s; %s", self._call, choice.why, costs)
        best = self._by_name[choice.config]
        self._tell(best)
        if self.resets:
            self._call.reset(best)
        return best

    def _none_works(self, outcomes: Iterable[Measurement]) -> CompileError:
        """Return the error that names the first three reasons."""
        why = "; ".join(sorted({one_line(f"{m.status}: {m.error}")[:200] for m in outcomes})[:3])
        return CompileError(f"{self}: none of {len(self._by_name)} configurations works: {why}")

    def predict(self) -> Any:
        """Return the configuration that ranks first of those that compile."""
        return next((c for c in self.ranked() if not self._call.refused(c)), self.configs[0])

    def ranked(self) -> list[Any]:
        """Return the configurations that compile, ordered by prediction, the fastest first.

        A model predicts; without a model, or if the user asks for it, the PTX score does.
        """
        names, sizes, slower = [*self._by_name], self._call.described(), np.zeros(1)
        if self._head == "scaled":  # needs no binaries
            slower = predicted(self._target, names, sizes, {}, self._head)
        else:  # what is loaded is compiled once more, which tells about its binary
            self.compiling.function = apart(self._tuner.fn)
        if not slower.any():
            made = {
                candidate.config: candidate.artifact
                for same in self._compile([*map(Candidate, self._by_name)])
                for candidate in same
                if not candidate.artifact or candidate.artifact.ok
            }
            names = [name for name in self._by_name if name in made]
            binaries = {n: self.compiling.binary(n, found) for n, found in made.items() if found}
            slower = predicted(self._target, names, sizes, binaries, "after")
            if self._options.model == "ptx-score" or len(binaries) < len(names) or not slower.any():
                slower = np.array([-self.compiling.ptx_score(name, made[name]) for name in names])
        ordered = [self._by_name[names[row]] for row in slower.argsort(kind="stable")]
        return sorted(ordered, key=self._must_try)  # libraries come last

    def _runner(self) -> KernelRunner | IsolatedRunner:
        """Return the runner: one with a child process, if that is asked for and possible."""
        by_hand = any(getattr(c, "ir_override", None) for c in self._by_name.values())
        agree = by_hand or self._options.check == "agree"
        given = self._call, self._by_name, self._note, agree
        if self._options.isolate:
            try:
                return IsolatedRunner(*given)
            except InvalidInput as error:
                warnings.warn(f"{self} is timed in this process: {error}", RuntimeWarning, 6)
        return KernelRunner(*given)

    def shared(self, config: Any) -> Any:
        """Return the choice of the rank that chose first in a process group; else this one."""
        return self._by_name.get(first_said(self._key, config_name(config)), config)

    def _tell(self, config: Any) -> None:
        """Print what Triton prints about a tuning, if that is switched on."""
        if knobs.autotuning.print:
            print(
                f"Triton autotuning for function {self._call},\nwith key as "
                f"{tuple(self._key['key'].values())},\n"
                f"finished after {monotonic() - self._begun:.2f}s,\n"
                f"best config selected: {config};"
            )

    def _note(self, name: str, measurement: Measurement) -> None:
        count(timed=measurement.status != "compile_error" and name not in self._done)
        store.note(self._key, name, measurement)
        self._done[name] = measurement
        is_terminal = getattr(sys.stderr, "isatty", bool)  # a program may have put its own there
        if monotonic() - self._begun > _SILENT_S and is_terminal():
            self._told = f"\rcostmodel: tuning {self}, {len(self._done)} of {len(self._by_name)}"
            print(self._told, end="", file=sys.stderr)

    def _identity(self, candidate: Candidate) -> object:
        """Return a value that is equal for candidates that do the same; None if it is unknown."""
        artifact, config = candidate.artifact, self._by_name[candidate.config]
        if artifact is None or config.pre_hook is not None:
            return None
        # The grid may depend on arguments that do not change the program.
        same = artifact.ptx_hash, artifact.shared_bytes, config.num_ctas, str(config.kwargs)
        if (first := self._first_of.setdefault(same, candidate.config)) != candidate.config:
            self._repeats[candidate.config] = first
        return same

    # --- Compiling --------------------------------------------------------------------------------

    def _compile(
        self, candidates: Batch, meanwhile: Action | None = None
    ) -> Generator[Batch, None, None]:
        """Compile what the learner wants, in its order; yield the candidates of each binary.

        Args:
            meanwhile: called while the first ones are being compiled; None: nothing is timed, and
                so nothing is learned: all are compiled.
        """
        everything = meanwhile is None or self._is_exhaustive
        names = [candidate.config for candidate in candidates]
        learner, self._enough = self._learner(names, everything), False
        pending = defaultdict(list)
        for row, name in enumerate(names):
            if self._must_try(self._by_name[name]):
                pending[self.compiling.begin(name)].append(row)
        wanted = self._begin(learner, names, pending)
        if meanwhile is not None:
            meanwhile()
        try:
            while not self._enough:
                patience = self._patience_s(learner, _rows(pending), wanted or everything)
                self.compiling.written()  # takes some ms for each text
                done = wait_for_first(pending, patience, meanwhile)
                if meanwhile is not None:
                    self._call.keep(self.compiling.written())
                for future in done:
                    rows = pending.pop(future)
                    if future.cancelled():  # by another thread that no longer wants it
                        continue
                    same = [Candidate(names[row]) for row in rows]
                    yield self._compiled(same, future.result(), bool(meanwhile))
                    for row in rows:
                        learner.tell(row, self._latency_us(names[row]))
                wanted = self._begin(learner, names, pending)
                self._enough = not (done and (wanted or learner.needs(_rows(pending))))
        finally:
            for future in pending:
                future.cancel()
            self.compiling.forget()
        yield []  # tells the search not to time candidates that were not yielded

    def _begin(
        self, learner: Learner, names: Sequence[str], pending: dict[Compiled, list[int]]
    ) -> bool:
        """Begin compiles that the learner wants, one per core; return True if it wants more.

        It stops at a compile that is done: its timing comes first, as then less may be wanted.
        """
        while (row := learner.next(_rows(pending))) is not None:
            if len(pending) >= device_compilers().size or any(x.done() for x in pending):
                return True
            pending[self.compiling.begin(names[row])].append(row)
        return False

    def _compiled(self, same: Batch, artifact: Artifact | None, keep: bool) -> list[Candidate]:
        """Keep the facts about a binary, or the reason why there is none; None: it is loaded."""
        if artifact is None:
            return [*same]
        count(compiled=1)
        for name in [candidate.config for candidate in same if keep]:
            if artifact.ok:
                store.note_binary(self._key, name, **self.compiling.binary(name, artifact))
            else:
                self._note(name, Measurement(artifact.status, error=artifact.error))
        return [replace(candidate, artifact=artifact) for candidate in same]

    def _patience_s(self, learner: Learner, rows: Sequence[int], wants_more: bool) -> float:
        """Return how long to wait for the next binary: within the budget, once one works.

        The last ones, which may compile for ten seconds, are worth as long as tuning has taken. But
        half of the learner's least number must be timed.
        """
        works = sum(measurement.ok for measurement in self._done.values())
        left_s = self._end - monotonic() if works else inf
        if wants_more or 2 * works < learner.least:
            return left_s
        share = min(1.0, learner.gain(rows) / _WORTH)
        return min(share * max(_PATIENCE_S, monotonic() - self._begun), left_s)

    # --- Learning ---------------------------------------------------------------------------------

    def _learner(self, names: Sequence[str], everything: bool) -> Learner:
        """Return the learner, which decides which of these configurations are tried."""
        every = [*names, *(x for x in self._by_name if x in self._done and x not in names)]
        sizes = self._call.described()
        grids = {name: {"grid": self._call.grid(self._by_name[name])} for name in every}
        model = predicted(self._target, every, sizes, grids, self._head)
        times = np.array([self._latency_us(name) for name in every])
        now = Tried([*map(json.loads, every)], model, times, sizes)
        least, others = (len(every), []) if everything else (0, self._others())
        learner = Learner(now, others, least=least)
        for row in range(len(names), len(every)):
            learner.tell(row, times[row])
        return learner

    def _others(self) -> list[Tried]:
        """Return timings and predictions of this kernel under other keys."""
        found, sizes = [], self._call.described()
        near = sorted(store.relatives(self._key), key=lambda e: distance(e.arguments, sizes))
        for entry in near[:OTHERS]:
            names = [name for name, m in entry.measured.items() if m.ok and is_config(name)]
            times = np.array([entry.measured[name].latency_us for name in names])
            model = predicted(self._target, names, entry.arguments, entry.binaries, self._head)
            found.append(Tried([*map(json.loads, names)], model, times, entry.arguments))
        return found

    def _latency_us(self, name: str) -> float:
        """Return the latency of a configuration in us; NaN: it was not timed, or failed."""
        measurement = self._done.get(self._repeats.get(name, name))
        return measurement.latency_us if measurement and measurement.ok else math.nan


def _rows(pending: Mapping[Any, Sequence[int]]) -> list[int]:
    return [row for rows in pending.values() for row in rows]
