"""Compiles the configurations of one call of a kernel, in the pool of this process."""

import functools
import itertools
import threading
import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from costmodel.autotune.arguments import written
from costmodel.autotune.call import KernelCall
from costmodel.compile.compiler import Artifact, reason
from costmodel.compile.ptx import extract
from costmodel.compile.triton_private import cache_folder, know_triton_key
from costmodel.compile.ttir import KernelJob, compile_job, count_operations, front_end, recorded
from costmodel.errors import CompileError, HostError, host_errors
from costmodel.files import Named
from costmodel.gemm.specialize import device_compilers
from costmodel.models.baselines import PTX_WEIGHTS
from costmodel.processes import Action
from costmodel.validation import drop_oldest, one_line

_AT_MOST = 4096  # compiles that no later call has asked for

_READY_S = 0.5  # a device that is warm stays warm for so long

_numbers = itertools.count(1)
Compiled = Future[Artifact | None]
"""A future of a configuration's artifact; None if the configuration is loaded."""

_begun: dict[str, Future[Artifact]] = {}  # by the identity of the job


@dataclass(eq=False)
class Compiling:
    """Compiles the configurations of a call. Those of the latest call are compiled first.

    Attributes:
        call: a call of the kernel.
        by_name: its configurations, by :func:`costmodel.autotune.store.config_name`.
        dump: a folder for their PTX and SASS.
    """

    call: KernelCall
    by_name: Named
    dump: Path | None = None

    def __post_init__(self) -> None:
        self._urgency = next(_numbers)
        self.function: Any = None  # in place of the call's
        self._texts: dict[str, str] = {}  # TTIR; empty where it is not known
        self._signature: Named = {}
        self._loaded: Named = {}
        self._written: dict[str, Collection[str] | None] = {}  # by text
        self._submitted: list[str] = []

    def start(self) -> None:
        """Start all children, without waiting, as the first kernel is seldom the only one."""
        pool = device_compilers()

        def work(start: Action) -> None:
            with suppress(HostError):  # the code that needs it meets the error again
                start()

        # 0.4 s; 15 ms a child
        for each in (know_triton_key, functools.partial(pool.start, pool.size)):
            threading.Thread(target=work, args=[each], daemon=True).start()

    def job(self, name: str) -> KernelJob | None:
        """Return the job that compiles a configuration; None if the configuration is loaded.

        Raises:
            CompileError: it cannot be compiled.
        """
        config = self.by_name[name]
        self.call.hook(config)  # it may change the types of arguments
        try:
            with host_errors():  # Triton builds its driver at the first launch
                found, loaded = recorded(
                    lambda: self.call.launch(config, self.function, warmup=True)
                )
        except (AssertionError, KeyError, ValueError) as error:  # unknown names, wrong options
            raise CompileError(reason(error)) from error
        if not found:  # loaded, or a library's, which has no text
            self._texts[name] = getattr(loaded, "asm", {}).get("ttir", "")
            self._signature = getattr(getattr(loaded, "src", None), "signature", {})
            self._loaded[name] = loaded
            return None
        job = front_end().job(found[-1])
        self._texts[name] = job.text
        self._signature = found[-1].signature
        return job

    def submit(self, job: KernelJob) -> Future[Artifact]:
        """Begin to compile, unless an earlier call has begun that job."""
        begun = _begun.get(job.identity)
        if begun is None or (begun.done() and (begun.cancelled() or begun.exception())):
            compile_ = functools.partial(compile_job, job, job.name, self.dump)
            begun = _begun[job.identity] = device_compilers().submit(
                job.identity, job.name, compile_, cache=cache_folder(), urgency=self._urgency
            )
            drop_oldest(_begun, _AT_MOST)
        else:
            device_compilers().hurry(begun, self._urgency)
        return begun

    def begin(self, name: str) -> Compiled:
        """Begin to compile a configuration; of one that is loaded the result is None."""
        found: Compiled = Future()
        try:
            if job := self.job(name):
                self._submitted.append(job.identity)
                return self.submit(job)  # type: ignore[return-value]  # nobody sets its result
            found.set_result(None)
        except CompileError as error:
            found.set_result(Artifact("", None, "compile_error", one_line(str(error))))
        return found

    def begin_all(self) -> list[Compiled]:
        """Begin to compile all configurations, without waiting."""
        return [self.begin(name) for name in self.by_name]

    def forget(self) -> None:
        """Forget the compiles of this call: their artifacts were taken, or nobody wants them."""
        for identity in self._submitted:
            if (begun := _begun.pop(identity, None)) and not begun.done():
                _begun[identity] = begun  # a child is still compiling it

    def written(self) -> set[str] | None:
        """Return the arguments that any configuration may write; None: all."""
        if hasattr(self.call.tuner.fn, "writes"):  # not only a kernel of Triton
            return set(self.call.tuner.fn.writes)
        for text in set(self._texts.values()) - self._written.keys():
            self._written[text] = written(text, self._signature)
        found = self._written.values()
        if None in found or not found:
            return None
        return {*self.call.tuner.reset_to_zero}.union(*filter(None, found))

    def binary(self, name: str, artifact: Artifact) -> Named:
        """Return the facts about a binary from which a model learns, beside its timing."""
        return {
            "registers": artifact.registers, "spill_bytes": artifact.spill_bytes,
            "shared_bytes": artifact.shared_bytes, "compile_s": round(artifact.compile_s, 3),
            "ptx": {feature: count for feature, count in artifact.ptx.items() if count},
            "grid": self.call.grid(self.by_name[name]),
            "ttir": count_operations(self._texts[name]),
        }  # fmt: skip

    def ptx_score(self, name: str, artifact: Artifact | None) -> float:
        """Return the hand-weighted score of a binary; artifact None: that of the loaded one."""
        if artifact is None and self._loaded[name] is None:
            return -inf  # not a kernel of Triton
        counts = artifact.ptx if artifact else extract(self._loaded[name].asm["ptx"])
        return sum(weight * counts.get(each, 0.0) for each, weight in PTX_WEIGHTS.items())


def wait_for_first(
    pending: Collection[Compiled], patience_s: float, meanwhile: Action | None
) -> set[Compiled]:
    """Wait for the next binaries; call ``meanwhile`` again each half second.

    Returns:
        the futures that are done; empty if none was within ``patience_s``.
    """
    end = time.monotonic() + patience_s
    while True:
        left_s = max(end - time.monotonic(), 0)
        done, undone = wait(pending, min(left_s, _READY_S), FIRST_COMPLETED)
        if done or not undone or left_s <= _READY_S:
            front_end().wait_for_launchers()  # else Triton would build them again
            return done
        if meanwhile is not None:
            meanwhile()
