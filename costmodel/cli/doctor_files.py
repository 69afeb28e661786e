"""What lies on disk, looked at: models, kernels, tables, caches and datasets."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cli.doctor_check import Check, line
from costmodel.errors import CostModelError, MisreadModel

if TYPE_CHECKING:
    from costmodel.models import XgbCostModel

__all__ = ["check_artifacts", "check_cache", "check_datasets", "check_kernels", "check_model",
           "check_named_model", "check_triton_cache"]  # fmt: skip


def check_model() -> Check:
    from costmodel.hardware.target import Target
    from costmodel.models import load, shipped_models

    shipped = shipped_models()
    advice = "rules of thumb answer; train one: costmodel collect, then costmodel train"
    wanted = list(shipped)
    with suppress(CostModelError, ImportError, RuntimeError):  # no GPU: any model will do
        wanted = [Target.current().device.name]
    try:
        found = [f"{name} ({load(shipped[name]).hash})" for name in wanted if name in shipped]
    except MisreadModel as error:
        advice = "rules of thumb answer; upgrade XGBoost: pip install -U xgboost-cpu"
        return Check("model", False, line(error), advice, "optional")
    except (CostModelError, ImportError) as error:
        return Check("model", False, line(error), advice, "optional")
    if not found:
        lacking = f"none for {', '.join(wanted) or 'any target'}"
        return Check("model", False, f"{lacking} (shipped: {', '.join(shipped) or 'none'})",
                     advice, "optional")  # fmt: skip
    return Check("model", True, ", ".join(found), need="optional")


def check_named_model(path: Path) -> Check:
    from costmodel.models import load

    # Whoever names a model wants that one: naming it is an error elsewhere too.
    name, advice = f"model {path}", "name a folder that costmodel train wrote, or train it again"
    try:
        model = load(path)
    except (CostModelError, ImportError) as error:
        return Check(name, False, line(error), advice, "always")
    target = model.target_.device.name if model.target_ else "no device"
    return Check(name, True, f"{model.name} ({model.hash}) for {target}", need="always")


def check_kernels() -> Check:
    """Whether the kernels are those that the shipped model's artifacts were compiled from."""
    from costmodel.models import shipped_models

    name, advice = "kernels", "restore them, or collect and train again: no timing is of these"
    try:
        changed = sorted({k for path in shipped_models().values() for k in _unknown(_unread(path))})
    except (CostModelError, ImportError, OSError, SyntaxError, KeyError) as error:
        return Check(name, False, line(error), "reinstall costmodel", "optional")
    if changed:
        found = f"not those that were timed: {', '.join(changed)}"
        return Check(name, False, found, advice, "optional")
    return Check(name, True, "as they were timed", need="optional")


def _unread(path: Path) -> XgbCostModel:
    """A model whose trees are not read: of them there is another check."""
    from costmodel.models import XgbCostModel

    return XgbCostModel.load(path, parse=False)


def _unknown(model: XgbCostModel) -> set[str]:
    """Kernels of which a model that has seen artifacts has seen none."""
    from costmodel.gemm.grid import grid
    from costmodel.gemm.specialize import artifact_key, specialize
    from costmodel.gemm.workload import Workload

    target, artifacts = model.target_, model.artifacts
    if target is None or not artifacts:
        return set()
    square = Workload.dense(4096, 4096, 4096)  # a kind that every table holds
    return {config.kernel for config in grid()} - {
        config.kernel
        for config in grid()
        if artifact_key(specialize(square, config), target) in artifacts
    }


def check_artifacts() -> Check:
    """Whether a model's artifacts are of the installed Triton, so that ranking sees PTX."""
    from costmodel.hardware.target import Target
    from costmodel.models import known_artifacts, shipped_models

    name, advice = "artifacts", "ranking goes by the configurations alone"
    counts, toolchain = [], ""
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for device, path in shipped_models().items():
                target = Target.named(device)
                toolchain = f"Triton {target.toolchain.triton}, ptxas {target.toolchain.ptxas}"
                counts.append(f"{len(known_artifacts(_unread(path), target))} for {device}")
        if told:
            return Check(name, False, line(told[0].message), "reinstall costmodel", "optional")
    except (CostModelError, ImportError, AttributeError, RuntimeError, OSError) as error:
        return Check(name, False, line(error), advice, "optional")
    ok = any(not count.startswith("0 ") for count in counts)
    found = f"{', '.join(counts) or 'none'}; {toolchain}"
    return Check(name, ok, found, "" if ok else advice, "optional")


def check_cache() -> Check:
    from costmodel.files import CACHE_VARIABLE, cache_directory
    from costmodel.tuning.cache import WinnerCache

    name = "cache"
    advice = (
        f"winners last for one process only; set {CACHE_VARIABLE} to a folder that can be written"
    )
    try:
        path = cache_directory()
        _try_to_write(path)
    except (CostModelError, ImportError, OSError) as error:
        return Check(name, False, line(error), advice, "optional")
    entries, unusable = WinnerCache(path).survey()
    if unusable:
        found = f"{unusable} of {unusable + len(entries)} files in {path} are no entries"
        return Check(
            name, False, found, "costmodel cache verify; costmodel cache clear", "optional"
        )
    return Check(name, True, f"{path} can be written, {len(entries)} winners", need="optional")


def check_triton_cache() -> Check:
    """Where Triton keeps what it compiles, and its launcher."""
    name = "Triton's cache"
    advice = "nothing compiles; set TRITON_CACHE_DIR to a folder that can be written"
    try:
        path = Path(importlib.import_module("triton").knobs.cache.dir)
        _try_to_write(path)
    except (ImportError, AttributeError, OSError) as error:
        return Check(name, False, line(error), advice, "gpu")
    return Check(name, True, f"{path} can be written", need="gpu")


def _try_to_write(path: Path) -> None:
    """In a folder, or where it would be made."""
    folder = next(p for p in (path, *path.parents) if p.exists())
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_datasets() -> Check:
    from costmodel.tuning.shipped import checkout

    advice = "only for train, evaluate and full replays: use a checkout, or --data DIR"
    try:
        folder = checkout("datasets")
    except CostModelError as error:
        return Check("datasets", False, line(error), advice, "optional")
    names = sorted(card.parent.name for card in folder.glob("*/card.json"))
    found = f"{', '.join(names) or 'none'} in {folder}"
    return Check("datasets", bool(names), found, "" if names else advice, "optional")
