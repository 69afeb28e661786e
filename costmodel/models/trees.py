"""Trees from the content of a file: sound, of the columns expected, and read as they were meant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.errors import CorruptFile, InvalidInput, MisreadModel, SchemaMismatch
from costmodel.models.ubj import check_trees

if TYPE_CHECKING:
    from xgboost import Booster

__all__ = ["canary_of", "open_trees", "require_columns"]

_PACKAGE = (Path(__file__).parents[1] / "_models").resolve()
_CANARY_OFF = 1e-3  # of a logarithm; what releases differ by in rounding is a hundredth of it


def open_trees(file: Path, raw: bytes, columns: tuple[str, ...], canary: float | None) -> Booster:
    """Trees from UBJ.

    Args:
        file: where they lie, for messages.
        columns: what they must expect.
        canary: :func:`canary_of` the trees when they were saved; None where it was not kept.

    Raises:
        CorruptFile, SchemaMismatch: other content, or other columns.
        MisreadModel: the installed XGBoost predicts something else.
    """
    import xgboost

    booster = xgboost.Booster()
    try:
        if not file.resolve().is_relative_to(_PACKAGE):  # which is code, and as trusted
            check_trees(raw)
        booster.load_model(bytearray(raw))
    except InvalidInput as error:
        raise CorruptFile(f"{file}: not an XGBoost model in UBJ ({error})") from None
    except xgboost.core.XGBoostError as error:
        reason = str(error).splitlines()[0][:200]
        raise CorruptFile(f"{file}: not an XGBoost model in UBJ ({reason})") from None
    require_columns(file, booster.feature_names or (), columns)
    if canary is not None and not abs((found := canary_of(booster)) - canary) <= _CANARY_OFF:
        raise MisreadModel(
            f"{file}: XGBoost {xgboost.__version__} predicts {found:.4f} where {canary:.4f} is "
            f"known to be right: upgrade it (pip install -U xgboost-cpu), or train the model again"
        )
    return booster


def canary_of(booster: Booster) -> float:
    """What trees predict of one row, always the same: a release that reads them wrongly differs.

    Releases of XGBoost have read the same file otherwise without a word, such as without the mean
    that all trees start from.
    """
    row = np.arange(booster.num_features(), dtype=np.float32) % 8
    row[::5] = np.nan
    return float(booster.inplace_predict(row[np.newaxis])[0])


def require_columns(
    file: Path, found: list[str] | tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """The same columns in the same order, or an error that names the first difference."""
    if tuple(found) == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
    raise SchemaMismatch(
        f"{file}: {len(found)} feature columns, this release computes {len(expected)}; the first "
        f"difference is column {where} ({_at(found, where)}, expected {_at(expected, where)}); "
        f"train the model again"
    )


def _at(names: list[str] | tuple[str, ...], i: int) -> str:
    return repr(names[i]) if i < len(names) else "nothing"
