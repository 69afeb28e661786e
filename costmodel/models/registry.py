"""Chooses the model that answers: the user's, else the shipped one, else the rules."""

import functools
from collections.abc import Iterator
from pathlib import Path

from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import CostModel
from costmodel.data.shards import CARD
from costmodel.errors import FileError, ModelError
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import DEVICES, Target
from costmodel.models.baselines import RuleHeuristic
from costmodel.models.xgb import XgbCostModel
from costmodel.validation import as_path, warn_once


def load(path: str | Path) -> XgbCostModel:
    """Read the model that ``model.save(path)`` wrote. Reads UBJ and JSON; runs no code.

    Raises:
        NoModel: nothing at this path.
        CorruptFile, WrongVersion: not a model, or one of a newer release.
        SchemaMismatch: trained on other features than this release computes.
        MisreadModel: the installed XGBoost does not predict what it should.
    """
    return XgbCostModel.load(as_path("path", path))


def use(model: str | Path | CostModel | None) -> CostModel | None:
    """Use a model in this process from now on, before any shipped one.

    Args:
        model: a directory that ``save()`` wrote, a model, or None to go back to the shipped ones.

    Raises:
        As :func:`load`; then what was used before stays in use.
    """
    if not (model is None or isinstance(model, CostModel)):
        model = XgbCostModel.load(as_path("model", model))
    _used[:] = [] if model is None else [model]
    return model


def shipped_models(kind: str = "") -> dict[str, Path]:
    """Return the directories of the models that came with the package, by device name.

    Args:
        kind: ``kernels-`` for the models of any kernel.
    """
    found = sorted(_root().glob(f"{kind}*/{CARD}"))
    named = {card.parent.name.removeprefix(kind): card.parent for card in found}
    return {name: folder for name, folder in named.items() if name in DEVICES}


def model_directory(target: Target) -> Path | None:
    """Return the directory of the shipped model of a target or of a sibling; None without one."""
    shipped = shipped_models()
    siblings = (path for name, path in shipped.items() if DEVICES[name].is_sibling(target.device))
    return shipped.get(target.device.name) or next(siblings, None)


def find_model(
    target: Target, workload: Workload | None = None, named: CostModel | None = None
) -> tuple[CostModel, str]:
    """Choose the model that answers for this target and workload.

    The named model comes first, then that of :func:`use`, then the shipped one. If none can answer,
    the rule heuristic does. A model that is passed over gives one warning, with the reason.

    Returns:
        (model, reason): why it is not the first choice, or its caveat; empty if neither.
    """
    reasons = []
    for model, called, trouble in _choices(target, named):
        if reason := trouble or model.why_not_usable(workload, target):
            reasons.append(reason)
            continue
        if reasons:
            warn_once(f"{'; '.join(reasons)}: {called} answers instead")
        return model, "; ".join(filter(None, [*reasons, model.caveat(target)]))
    text = "; ".join(reasons)
    warn_once(
        f"{text}: rules of thumb rank instead of a model; train one with `costmodel collect` and "
        f"`costmodel train`, and pass it to costmodel.use(path)"
    )
    return RuleHeuristic(), text


def _choices(target: Target, named: CostModel | None) -> Iterator[tuple[CostModel, str, str]]:
    """Yield (model, what it is called, why it cannot be used); the shipped one is loaded last."""
    for model in dict.fromkeys(_used if named is None else (named, *_used)):
        yield model, f"model {model.name}", ""
    shipped, trouble = shipped_model(target)
    yield shipped or RuleHeuristic(), "the shipped model", trouble


def shipped_model(target: Target) -> tuple[XgbCostModel | None, str]:
    """Load the model that came with the package for a target or a sibling; else None, and why."""
    directory = model_directory(target)
    if directory is None:
        have = ", ".join(shipped_models()) or "none"
        return None, f"no model is shipped for {target.device.name} (shipped: {have})"
    try:
        return _load_shipped(directory), ""
    except (FileError, ModelError) as error:
        return None, f"the shipped model cannot be used: {error}"


def _root() -> Path:
    return Path(__file__).parents[1] / "_models"  # importlib.resources takes a millisecond


@functools.cache
def _load_shipped(directory: Path) -> XgbCostModel:
    """Load a model without its trees: a winner from the cache needs none."""
    return XgbCostModel.load(directory, parse=False)


def known_artifacts(model: CostModel, target: Target) -> ArtifactTable:
    """The artifacts of a target's toolchain that are known for a model, by key.

    First those that it was trained with, then those of the shipped model: a binary does not depend
    on the model. With another toolchain than theirs there are none, and the model ranks by the
    configurations alone. An artifact file that cannot be used gives one warning.
    """
    if model.kind != "learned":
        return ArtifactTable.empty()
    models = [model]
    if model_directory(target) not in (None, model.directory) and (
        shipped := shipped_model(target)[0]
    ):
        models.append(shipped)
    found = [table for each in models if (table := _artifacts_of(each, target))]
    return _merged(*found) if found else ArtifactTable.empty()


def _artifacts_of(model: CostModel, target: Target) -> ArtifactTable | None:
    try:
        found = model.artifacts_for(target)
    except FileError as error:
        warn_once(f"the artifacts of model {model.name} cannot be used: {error}")
        return None
    return found if isinstance(found, ArtifactTable) else None


@functools.lru_cache(maxsize=8)
def _merged(own: ArtifactTable, *others: ArtifactTable) -> ArtifactTable:
    return own.merged_with(others)


_used: list[CostModel] = []
