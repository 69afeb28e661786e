"""Checks of files on disk for ``costmodel doctor``: models, kernels, artifacts, caches, datasets.

Which model ranks, and what it sees, is asked of the functions that the tuner asks.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cli.doctor_check import Look, Missing
from costmodel.cli.options import DEFAULT_TARGET, current_target
from costmodel.files import CACHE_VARIABLE, cache_directory
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from costmodel.tuning.ranking import Ranking

_SQUARE = Workload.dense(4096, 4096, 4096)  # of a kind that every model has learned
_TRAIN = "rules of thumb answer; train one: costmodel collect, then costmodel train"
_UPGRADE = "rules of thumb answer; upgrade XGBoost: pip install -U xgboost-cpu"
_NAME = "name a folder that costmodel train wrote, or train it again"
_RESTORE = "restore them, or collect and train again: no timing is of these"
_BY_CONFIGURATION = "ranking goes by the configurations alone"
_OWN_CACHE = (
    f"winners last for one process only; set {CACHE_VARIABLE} to a folder that can be written"
)
_TRITON_CACHE = "nothing compiles; set TRITON_CACHE_DIR to a folder that can be written"
_CHECKOUT = "only for train, evaluate and full replays: use a checkout, or --data DIR"


def looks_at_files(model: Path | None) -> Iterator[Look]:
    """Yield a look for each kind of file; a model that is named must be usable."""
    tuner = _Tuner()
    yield Look("model", "optional", tuner.model, _TRAIN)
    if model is not None:
        yield Look(f"model {model}", "always", partial(tuner.named_model, model), _NAME)
    yield Look("kernels", "optional", tuner.kernels, _RESTORE)
    yield Look("artifacts", "optional", tuner.artifacts, _BY_CONFIGURATION)
    yield Look("cache", "optional", _cache, _OWN_CACHE)
    yield Look("Triton's cache", "gpu", _triton_cache, _TRITON_CACHE)
    yield Look("datasets", "optional", _datasets, _CHECKOUT)


class _Tuner:
    """Asks what tuning a square product asks; on a machine without a GPU, for the H100."""

    @cached_property
    def _target(self) -> Target:
        return current_target() or Target.named(DEFAULT_TARGET)

    @cached_property
    def _ranking(self) -> tuple[Ranking, str]:
        """The tuner's ranking, and the warnings that came with it."""
        from costmodel.tuning.ranking import rank

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = rank(_SQUARE, self._target)
        return found, "; ".join(str(warning.message) for warning in told)

    def model(self) -> str:
        ranking, _ = self._ranking
        if not ranking.answered_by:
            raise Missing(ranking.caveat, _UPGRADE if "XGBoost" in ranking.caveat else "")
        found = f"{ranking.model} ({ranking.model_hash}) for {self._target.device.name}"
        return f"{found}: {ranking.caveat}" if ranking.caveat else found

    def named_model(self, path: Path) -> str:
        from costmodel.models import load

        model = load(path)
        if reason := model.why_not_usable(_SQUARE, current_target() or model.card.target):
            raise Missing(reason)
        return f"{model.name} ({model.hash}) for {model.card.target.device.name}"

    def kernels(self) -> str:
        """Compare the kernels with those that the model's artifacts were compiled from."""
        from costmodel.gemm.specialize import artifact_key, specialize
        from costmodel.models import XgbCostModel, find_model, known_artifacts

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the line on the model says it
            model, _ = find_model(self._target, _SQUARE)
        if not isinstance(model, XgbCostModel):
            raise Missing("no model to compare them with")
        # Of the model's own toolchain: the line on artifacts is on the installed one.
        target = replace(self._target, toolchain=model.card.target.toolchain)
        known = known_artifacts(model, target)
        configs = self._ranking[0].configs
        seen = {c.kernel for c in configs if artifact_key(specialize(_SQUARE, c), target) in known}
        if changed := sorted({config.kernel for config in configs} - seen):
            raise Missing(f"not those that were timed: {', '.join(changed)}")
        return "as they were timed"

    def artifacts(self) -> str:
        ranking, told = self._ranking
        if not ranking.answered_by or ranking.without_artifact:
            raise Missing(
                ranking.answered_by or "no model", told and f"reinstall costmodel: {told}"
            )
        return ranking.answered_by


def _cache() -> str:
    from costmodel.tuning.tuning_key import WinnerCache

    path = cache_directory()
    _try_to_write(path)
    entries, unusable = WinnerCache(path).survey()
    if unusable:
        raise Missing(
            f"{len(unusable)} of {len(unusable) + len(entries)} files in {path} are no entries",
            "costmodel cache verify; costmodel cache clear",
        )
    return f"{path} can be written, {len(entries)} winners"


def _triton_cache() -> str:
    """Look at the folder where Triton keeps what it compiles, and its launcher."""
    path = Path(importlib.import_module("triton").knobs.cache.dir)
    _try_to_write(path)
    return f"{path} can be written"


def _try_to_write(path: Path) -> None:
    """Write in a folder, or where it would be made."""
    folder = next(p for p in (path, *path.parents) if p.exists())
    with tempfile.TemporaryFile(dir=folder):
        pass


def _datasets() -> str:
    from costmodel.tuning.shipped import checkout

    folder = checkout("datasets")
    names = sorted(card.parent.name for card in folder.glob("*/card.json"))
    if not names:
        raise Missing(f"none in {folder}")
    return f"{', '.join(names)} in {folder}"
