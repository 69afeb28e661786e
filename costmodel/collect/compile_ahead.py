"""Compiling for a collection: in the background, while the GPU times what is ready."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from costmodel.compile.artifact import Artifact
from costmodel.compile.compile_pool import compile_many
from costmodel.data.dataset import Dataset
from costmodel.gemm.specialize import Specialization

__all__ = ["Compiling"]


class Compiling:
    """Compiles in the background, in the order asked, and hands out what is done."""

    def __init__(
        self,
        specs: Iterable[Specialization],
        dataset: Dataset,
        n_jobs: int,
        cache: Path | None,
    ) -> None:
        self._done: dict[Specialization, Artifact] = {}
        self._news = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._specs, self._target = list(specs), dataset.target
        self._n_jobs, self._cache = n_jobs, cache
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    def wait_for(self, specs: Sequence[Specialization]) -> dict[Specialization, Artifact]:
        """The artifacts of these, once all of them are there."""
        with self._news:
            while not all(s in self._done for s in specs):
                if self._error is not None:
                    raise self._error
                if self._stopped:
                    raise CancelledError
                self._news.wait(timeout=1.0)
            return {s: self._done[s] for s in specs}

    def counts(self) -> tuple[int, int]:
        """(compiled, of these failed)."""
        with self._news:
            return len(self._done), sum(not a.ok for a in self._done.values())

    def give_up(self) -> None:
        """Who waits need wait no longer: nothing more is wanted."""
        with self._news:
            self._stopped = True
            self._news.notify_all()

    def stop(self) -> None:
        self.give_up()
        self._thread.join()

    def _run(self) -> None:
        from triton import knobs

        artifacts = compile_many(
            self._specs,
            self._target,
            n_jobs=self._n_jobs,
            progress=False,
            cache=self._cache or Path(knobs.cache.dir),
        )
        try:
            for artifact in artifacts:
                with self._news:
                    self._done[artifact.spec] = artifact
                    self._news.notify_all()
                if self._stopped:
                    break
        except BaseException as error:  # handed to the waiting thread, which raises it
            with self._news:
                self._error = error
                self._news.notify_all()
        finally:
            artifacts.close()
