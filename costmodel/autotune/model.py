"""A model of kernels that it has never seen: how fast each configuration of a list will be.

It predicts log(latency / median of the list) with boosted trees. One head sees what is known before
compiling, the other sees the binary too. They see how the columns of a configuration
(:mod:`costmodel.autotune.features`) differ from the medians of its list.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, Self

import numpy as np

from costmodel.arrays import Floats, Floats32, Indices, Texts
from costmodel.autotune.dataset import FEATURES, KernelDataset, numbers
from costmodel.autotune.features import ALONE, BESIDE, SCALED, after, before, concept, scaled
from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.shards import CARD, require_place
from costmodel.errors import CorruptFile, InvalidInput, MissingData, NoModel, SchemaMismatch
from costmodel.files import (
    Named,
    decode,
    digest,
    file_errors,
    make_folder,
    read_json,
    replace_file,
    write_json,
)
from costmodel.hardware.target import Target
from costmodel.models.storage import read_part
from costmodel.models.trees import (
    DEFAULTS,
    LabelledRows,
    Names,
    Trees,
    XgbParams,
    require_columns,
    train_booster,
)

Columns = Mapping[str, Any]
"""Columns of one list: ``config`` and ``arguments`` as JSON, and the columns of a dataset."""

FORMAT = 1
"""Version of the card and of the columns' meaning."""

KERNELS = XgbParams(
    rounds=280, max_depth=5, colsample_bytree=0.3, nearness=4.0, floor=0.1, pairs=1.0, pair_scale=5
)
"""Chosen by cross-validation over the modules of the kernels that may be learned from."""

HEADS = {"before": before, "after": after}
"""Heads by name: with columns that are known before compiling, and after it."""

COLUMNS = HEADS | {"scaled": scaled}
"""All heads by name; a model of scaled products has the last one only."""

_FOLDS = 6
_FAILED = 0.5  # a failure counts as slower than the slowest of its list by this, in the logarithm
_UNSTEADY = 1.5  # a latency over so many times its own p10 tells nothing
_BINS = 8


def columns_of(
    configs: Sequence[str], arguments: Mapping[str, Any], binaries: Mapping[str, Mapping[str, Any]]
) -> Columns:
    """Return the columns of a list that is being tuned, from the facts in the store.

    Args:
        configs: names of all configurations of the list, since each is compared with the others.
        arguments: of the call, as in the store.
        binaries: by name, as in the store; before compiling only with ``grid``.
    """
    rows = [numbers(name, arguments, binaries.get(name, {})) for name in configs]
    texts = {"config": configs, "arguments": [json.dumps(arguments)] * len(configs)}
    return texts | {name: np.array([row[name] for row in rows]) for name in FEATURES}


@dataclass(frozen=True)
class Head:
    """One ensemble of trees.

    Attributes:
        file: name of its file, which ends with the hash of the content.
        columns: names of the columns that the trees see.
        canary: a prediction that the trees must give when they are read.
        predicted, deviation: ascending predictions, and for each the standard deviation of
            log(latency) from it, within lists of kernels that the trees did not learn from.
    """

    file: str
    columns: Names
    canary: float
    predicted: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class KernelCard:
    """The content of ``card.json``.

    Attributes:
        kernel_model: :data:`FORMAT`.
        target: target of the timings that the model learned from.
        trained_on: how many ``kernels``, ``lists`` and ``rows`` it learned from.
        params: of the trees.
        heads: by name, see :data:`COLUMNS`.
    """

    kernel_model: int
    ptx_schema: int
    target: Target
    trained_on: dict[str, int]
    params: XgbParams
    heads: dict[str, Head]


@dataclass(frozen=True, eq=False)
class KernelModel:
    """Heads that predict log(latency / median of the list), each with its deviation.

    Attributes:
        card: what it was trained on, and where its parts are.
        trees: by name of the head.
    """

    card: KernelCard
    trees: Mapping[str, Trees]

    def factors(self, columns: Columns) -> list[dict[str, float]]:
        """Return for each configuration the factor that each concept contributes to its latency.

        Their product, ``all alike`` included, is the latency / median that head ``after`` predicts.
        """
        import xgboost

        names, values = matrix("after", columns, self.card.target)
        data = xgboost.DMatrix(values, feature_names=list(names))
        found = self.trees["after"].booster.predict(data, pred_contribs=True)
        concepts = [*map(concept, names), "all alike"]  # the mean comes last
        result = []
        for row in found.tolist():
            logs: dict[str, float] = defaultdict(float)
            for name, log in zip(concepts, row):
                logs[name] += log
            result.append({name: exp(log) for name, log in logs.items()})
        return result

    def predict(self, head: str, columns: Columns) -> tuple[Floats, Floats]:
        """Predict with one head: mean and standard deviation of log(latency / median), [n] each.

        For configurations that are not compiled (NaN) the mean of the head ``after`` says little.
        """
        _, values = matrix(head, columns, self.card.target)
        mean = self.trees[head].forest.predict(values)
        about = self.card.heads[head]
        return mean, np.interp(mean, about.predicted, about.deviation)

    @classmethod
    def train(
        cls, dataset: KernelDataset, params: XgbParams | None = None, *, nthread: int = 1
    ) -> Self:
        """Train on the rows of a dataset whose role is ``train``.

        Args:
            params: None: :data:`KERNELS`, or for a dataset of scaled products alone the defaults.

        Raises:
            MissingData: no list has two timings.
        """
        heads, trees = {}, {}
        of_products = dataset.rows["kernel"].unique().to_pylist() == [SCALED]
        params = params or (DEFAULTS if of_products else KERNELS)
        for head in ["scaled"] if of_products else [*HEADS]:
            table = KernelTable.of(dataset, head)
            booster = train_booster(
                table.labelled(params), params, nthread=nthread, names=table.names
            )
            made = trees[head] = Trees.of(booster, table.names)
            spread = table.deviations(table.unseen(params, nthread))
            file = f"{head}-{digest(made.raw)}.ubj"
            heads[head] = Head(file, table.names, made.canary(), *spread)
        count = {
            "kernels": len(np.unique(table.kernel)),
            "lists": int(table.list[-1]) + 1,
            "rows": len(table.row),
        }
        target = dataset.identity.target
        return cls(KernelCard(FORMAT, PTX_SCHEMA, target, count, params, heads), trees)

    def save(self, folder: Path) -> Path:
        """Write the model; the card last, so that a reader meanwhile finds a whole model.

        Raises:
            FileError: the folder holds something else, or cannot be written.
        """
        require_place(folder, "model of kernels")
        with file_errors(folder):
            make_folder(folder)
            before = {*folder.glob("*.ubj")}
            for name, head in self.card.heads.items():
                replace_file(folder / head.file, self.trees[name].raw)
                before.discard(folder / head.file)
            write_json(folder / CARD, self.card)
            for file in before:
                file.unlink()
        return folder

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a model. This runs no code; the trees are read when they are first used.

        Raises:
            NoModel: nothing is there. CorruptFile: damaged, or something else.
            SchemaMismatch: it has columns that this release does not compute.
        """
        file = folder / CARD
        if not file.exists():
            raise NoModel(f"no model of kernels at {folder}: expected what `costmodel train` wrote")
        with file_errors(file):
            found = read_json(file, Named)
        known, theirs = (FORMAT, PTX_SCHEMA), (found.get("kernel_model"), found.get("ptx_schema"))
        if None not in theirs and theirs != known:
            raise SchemaMismatch(
                f"{folder}: format and PTX schema {theirs}, this release {known}: train it again"
            )
        try:
            card = decode(found, KernelCard)
            heads = ["scaled"] if "scaled" in card.heads else [*HEADS]
            trees = {name: _trees(folder, card.heads[name]) for name in heads}
        except (InvalidInput, KeyError) as error:
            raise CorruptFile(f"{file}: not the card of a model of kernels: {error}") from None
        for name in heads:  # those of this release
            ours, _ = matrix(name, columns_of(['{"kwargs":{}}'], {}, {}), card.target)
            require_columns(file, card.heads[name].columns, ours)
        return cls(card, trees)


def _trees(folder: Path, head: Head) -> Trees:
    file = folder / head.file
    read = partial(read_part, file, file.stem[-16:])
    return Trees(head.columns, read, file, head.canary)


# --- What is learned from -------------------------------------------------------------------------


def matrix(head: str, columns: Columns, target: Target) -> tuple[Names, Floats32]:
    """Return the names of a head's columns, and their values for a list, float32 [n, f].

    Each column is there as the difference from the median of the list, and some also as they are.
    Without the binary all are there as they are too: the kind of kernel and call then helps more
    than it misleads.
    """
    with np.errstate(all="ignore"):
        found = COLUMNS[head](columns, target.device)
        values = np.column_stack([*found.values()])
        known = np.ma.masked_invalid(values)  # type: ignore[no-untyped-call]
        medians = np.ma.median(known, axis=0)  # type: ignore[no-untyped-call]
        values, medians = known.filled(np.nan), medians.filled(np.nan)
    alone = [i for i, name in enumerate(found) if head != "after" or name in ALONE]
    names = tuple(f"{name}{BESIDE}" for name in found) + tuple([*found][i] for i in alone)
    return names, np.hstack([values - medians, values[:, alone]]).astype(np.float32)


@dataclass(frozen=True)
class KernelTable:
    """Rows of a dataset as one head sees them, in the order of its lists.

    Attributes:
        names, values: names of the columns, and their values, float32 [n, f].
        label: log(latency / median of the list), float64 [n]; failures are above all of the list.
        kernel, list, row: full name, number of the list, and row of the dataset, [n] each.
    """

    names: Names
    values: Floats32
    label: Floats
    kernel: Texts
    list: Indices
    row: Indices

    @classmethod
    def of(cls, dataset: KernelDataset, head: str, role: str = "train") -> Self:
        """Take the lists of one role in which two configurations work.

        Raises:
            MissingData: there are none.
        """
        own = "list kernel role status config arguments latency_us p10_us"
        table = dataset.rows.select([*own.split(), *FEATURES])
        every = {name: np.asarray(table[name]) for name in table.column_names}
        order = np.lexsort((every["config"], every["list"]))
        ends = np.flatnonzero(every["list"][order][1:] != every["list"][order][:-1]) + 1
        parts: list[tuple[Any, ...]] = []
        for rows in np.split(order, ends):
            columns = {name: column[rows] for name, column in every.items()}
            label = _label(columns)
            known = np.flatnonzero(~np.isnan(label))
            if columns["role"][0] == role and len(known) > 1:
                names, values = matrix(head, columns, dataset.identity.target)
                number = np.full(len(known), len(parts))
                kernel = columns["kernel"][known]
                parts.append((values[known], label[known], kernel, number, rows[known]))
        if not parts:
            raise MissingData(f"no list of role {role!r} with two timings: tune more kernels first")
        return cls(names, *map(np.concatenate, zip(*parts)))

    def labelled(self, params: XgbParams, rows: Any = slice(None)) -> LabelledRows:
        """Return rows to learn from; all kernels weigh the same, and all lists of a kernel."""
        _, kernel = np.unique(self.kernel, return_inverse=True)
        of_list = np.bincount(self.list)[self.list]
        lists = np.bincount(kernel, 1 / of_list)[kernel]
        best = np.full(len(of_list), np.inf)
        np.minimum.at(best, self.list, self.label)
        near = np.exp(-params.nearness * np.expm1(self.label - best[self.list]))
        weight = ((params.floor + (1 - params.floor) * near) / of_list / lists)[rows]
        label = self.label[rows]
        return LabelledRows(
            self.values[rows], label, np.zeros_like(label), weight / weight.mean(), self.list[rows]
        )

    def unseen(self, params: XgbParams, nthread: int = 1) -> Floats:
        """Predict each row with trees that learned from no kernel of its module, float64 [n].

        Kernels with the same first three names are left out together; if there are few such groups,
        each kernel is its own group.
        """
        groups = [".".join(name.split(".")[:3]) for name in self.kernel]
        if len(set(groups)) < _FOLDS:
            groups = [*self.kernel]
        fold = np.unique(groups, return_inverse=True)[1] % _FOLDS
        found = np.zeros(len(fold))
        for i in np.unique(fold) if fold.any() else ():  # of one kernel nothing would be left
            out = fold == i
            booster = train_booster(self.labelled(params, ~out), params, nthread=nthread)
            found[out] = booster.inplace_predict(self.values[out])
        return found

    def deviations(self, predicted: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return ascending predictions, and the standard deviation of the error at each."""
        error = self.label - predicted
        error -= (np.bincount(self.list, error) / np.bincount(self.list))[self.list]
        bins = np.array_split(np.argsort(predicted, kind="stable"), min(_BINS, len(error) // 2))
        knots = tuple(float(predicted[rows].mean()) for rows in bins)
        return knots, tuple(float(np.sqrt(np.mean(error[rows] ** 2))) for rows in bins)


def _label(columns: Columns) -> Floats:
    """Return log(latency / median), float64 [n]; NaN where nothing is known."""
    status, latency = columns["status"], columns["latency_us"].astype(np.float64)
    unsteady = (status == "ok") & (latency > _UNSTEADY * columns["p10_us"])
    timed = np.isin(status, ("ok", "too_slow")) & ~unsteady
    if not timed.any():
        return np.full(len(status), np.nan)
    label = np.log(np.where(timed, latency, np.nan))
    failed = np.isin(status, ("compile_error", "out_of_resources", "timeout"))
    label[failed] = label[timed].max() + _FAILED
    return label - np.median(label[timed])
