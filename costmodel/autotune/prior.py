"""Finds the model of all kernels, and gets the predictions that the learner starts from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.data.shards import content_of
from costmodel.errors import CostModelError
from costmodel.hardware.target import Target
from costmodel.models.registry import shipped_models
from costmodel.validation import warn_once

if TYPE_CHECKING:
    from costmodel.arrays import Floats
    from costmodel.autotune.model import KernelModel

_LOADING = threading.Lock()


def load_meanwhile(target: Target, head: str) -> None:
    """Begin to read the model for a target in a thread, without waiting."""
    threading.Thread(target=model_for, args=[target.device.arch, head], daemon=True).start()


def model_for(arch: int, head: str = "before") -> KernelModel | None:
    """Return the user's or the shipped model for an architecture; None if there is none."""
    with _LOADING:
        mine = (m for m in _used if head in m.trees and m.card.target.device.arch == arch)
        return next(mine, None) or _load(arch, "scaled-" if head == "scaled" else "kernels-")


def use_for_kernels(model: object) -> KernelModel | None:
    """Use a model of kernels before the shipped one, if this is the folder of one; None forgets it.

    Raises:
        As :meth:`KernelModel.load`; then nothing changes.
    """
    if model is None:
        _used.clear()
    if not isinstance(model, str | Path):
        return None
    folder, kind = Path(model), ""
    with suppress(OSError):  # then it is no folder
        kind = content_of(folder)
    if kind != "model of kernels":
        return None
    from costmodel.autotune.model import KernelModel

    found = KernelModel.load(folder)
    for trees in found.trees.values():
        trees.raw  # noqa: B018, it is read here
    _used.insert(0, found)
    return found


_used: list[KernelModel] = []


def predicted(
    target: Target,
    configs: Sequence[str],
    arguments: Mapping[str, Any],
    binaries: Mapping[str, Mapping[str, Any]],
    head: str,
) -> Floats:
    """Return log(latency) of each configuration up to a constant, [n]; zeros without a model.

    Args:
        configs, arguments, binaries: see :func:`costmodel.autotune.model.columns_of`.
        head: a name in :data:`costmodel.autotune.model.COLUMNS`.
    """
    model = model_for(target.device.arch, head)
    if model is not None and len(configs) > 1:
        from costmodel.autotune.model import columns_of

        try:
            return model.predict(head, columns_of(configs, arguments, binaries))[0]
        except CostModelError as error:  # trees are read when they are first used
            _warn(error)
    return np.zeros(len(configs))


@functools.cache
def _load(arch: int, kind: str) -> KernelModel | None:
    from costmodel.autotune.model import KernelModel

    for folder in shipped_models(kind).values():
        try:
            model = KernelModel.load(folder)
            next(iter(model.trees.values())).forest  # noqa: B018, it is read here
        except CostModelError as error:
            _warn(error)
            continue
        if model.card.target.device.arch == arch:
            return model
    return None


def _warn(error: CostModelError) -> None:
    warn_once(f"the model of kernels cannot be used: {error}")
