"""Boosted trees: of the columns expected, and read by the installed XGBoost as they were meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.errors import CorruptFile, MisreadModel, SchemaMismatch

if TYPE_CHECKING:
    from xgboost import Booster

_CANARY_OFF = 1e-3  # of a logarithm; what releases differ by in rounding is a hundredth of it


class Trees:
    """Boosted trees, parsed when they are first asked.

    Importing XGBoost and parsing takes a second, which a process that only looks up a winner saves.
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        *,
        booster: Booster | None = None,
        file: Path | None = None,
        read: Callable[[], bytes] | None = None,
        canary: float | None = None,
    ) -> None:
        """Take trained trees (``booster``), or those of a file (``file`` and ``read``).

        Args:
            columns: the names of the columns that they expect.
            read: gives the content of the file, checked against the card.
            canary: the :meth:`canary` of the trees when they were saved; None if not kept.
        """
        self._columns, self._booster = columns, booster
        if booster is not None:
            booster.set_param({"nthread": 1})
        self._file, self._read, self._canary = file, read, canary

    @cached_property
    def raw(self) -> bytes:
        """The trees as UBJ.

        Raises:
            CorruptFile, FileError: the file is damaged, not that of the card, or cannot be read.
        """
        return self._read() if self._read else bytes(self.booster().save_raw(raw_format="ubj"))

    def booster(self) -> Booster:
        """Return the trees, which predict with one thread: more are slower on a few rows.

        Raises:
            CorruptFile, SchemaMismatch: other content, or other columns.
            MisreadModel: the installed XGBoost predicts something else than it should.
        """
        if self._booster is None:
            self._booster = self._parse()
            self._booster.set_param({"nthread": 1})
        return self._booster

    def canary(self) -> float:
        """Predict one fixed row: a release of XGBoost that reads the trees wrongly differs.

        Releases have read the same file otherwise without a word, such as without the mean that
        all trees start from.
        """
        return _canary_of(self.booster())

    def _parse(self) -> Booster:
        import xgboost

        booster = xgboost.Booster()
        try:
            booster.load_model(bytearray(self.raw))
        except xgboost.core.XGBoostError as error:
            reason = str(error).splitlines()[0][:200]
            raise CorruptFile(f"{self._file}: not an XGBoost model in UBJ ({reason})") from None
        require_columns(self._file, booster.feature_names or (), self._columns)
        found = _canary_of(booster)
        if self._canary is not None and not abs(found - self._canary) <= _CANARY_OFF:
            raise MisreadModel(
                f"{self._file}: XGBoost {xgboost.__version__} predicts {found:.4f} where "
                f"{self._canary:.4f} is known to be right: upgrade it (pip install -U "
                f"xgboost-cpu), or train the model again"
            )
        return booster


def require_columns(
    file: Path | None, found: list[str] | tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Refuse other columns, or another order, with the first difference.

    Raises:
        SchemaMismatch: they differ.
    """
    if tuple(found) == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
    raise SchemaMismatch(
        f"{file}: {len(found)} feature columns, this release computes {len(expected)}; the first "
        f"difference is column {where} ({_at(found, where)}, expected {_at(expected, where)}); "
        f"train the model again"
    )


def _canary_of(booster: Booster) -> float:
    row = np.arange(booster.num_features(), dtype=np.float32) % 8
    row[::5] = np.nan
    return float(booster.inplace_predict(row[np.newaxis])[0])


def _at(names: list[str] | tuple[str, ...], i: int) -> str:
    return repr(names[i]) if i < len(names) else "nothing"
