"""A model of kernels that it has never seen: how fast each configuration of a list will be.

It predicts log(latency / median of the list) by boosted trees, of which one head knows what is
known before compiling, the other the binary too. What they see of a configuration is how its
columns (:mod:`costmodel.autotune.features`) differ from the median of the list.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.autotune.dataset import FEATURES, KernelDataset, numbers
from costmodel.autotune.features import BESIDE, Floats, after, before, concept
from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.shards import CARD, require_place
from costmodel.errors import CorruptFile, InvalidInput, MissingData, NoModel, SchemaMismatch
from costmodel.files import (
    decode,
    file_errors,
    read_json,
    read_small_file,
    replace_file,
    write_json,
)
from costmodel.hardware.target import Target
from costmodel.models.trees import LabelledRows, Trees, XgbParams, train_booster

Rows = NDArray[np.float32]
Deviations = tuple[tuple[float, ...], tuple[float, ...]]
Columns = Mapping[str, Any]
"""Of one list: names and arguments as JSON (``config``, ``arguments``), and a dataset's columns."""

FORMAT = 1
"""Version of the card and of what the columns mean."""

KERNELS = XgbParams(
    rounds=300, max_depth=5, colsample_bytree=0.3, nearness=4.0, floor=0.1, pairs=1.0, pair_scale=5
)
"""Chosen by cross-validation over the modules of the kernels that may be learned from."""

HEADS = {"before": before, "after": after}
"""What is known before compiling, and after it."""

_FOLDS = 6
_FAILED = 0.5  # slower than the slowest of its list, in the logarithm
_UNSTEADY = 1.5  # a latency so many times its own p10 tells nothing
_BINS = 8


def columns_of(
    configs: Sequence[str], arguments: Mapping[str, Any], binaries: Mapping[str, Mapping[str, Any]]
) -> Columns:
    """Return the columns of a list that is being tuned, from what the store has of it.

    Args:
        configs: names of all configurations of the list, since each is seen beside the others.
        binaries: before compiling with ``grid`` and ``ttir`` alone.
    """
    rows = [numbers(name, arguments, binaries.get(name, {})) for name in configs]
    texts = {"config": list(configs), "arguments": [json.dumps(arguments)] * len(configs)}
    return texts | {name: np.array([row[name] for row in rows]) for name in FEATURES}


@dataclass(frozen=True)
class KernelCard:
    """The content of ``card.json``.

    Attributes:
        kernel_model: :data:`FORMAT`.
        target: of the timings that were learned from.
        trained_on: how many ``kernels``, ``lists`` and ``rows``.
        params: of the trees.
        features: the columns of each head.
        files, hashes, canaries: name, content and a known prediction of each head's trees.
        deviations: of each head: predictions, in order, and how far latencies are from each, as the
            standard deviation of the logarithm within a list of kernels not learned from.
    """

    kernel_model: int
    ptx_schema: int
    target: Target
    trained_on: dict[str, int]
    params: XgbParams
    features: dict[str, tuple[str, ...]]
    deviations: dict[str, Deviations]
    files: dict[str, str]
    hashes: dict[str, str]
    canaries: dict[str, float]


class KernelModel:
    """Two heads that predict log(latency / median of the list), each with its deviation.

    Attributes:
        card: what it was trained on, and where its parts are.
        trees: of each head.
    """

    def __init__(self, card: KernelCard, trees: Mapping[str, Trees]) -> None:
        self.card, self.trees = card, trees

    def before(self, columns: Columns) -> tuple[Floats, Floats]:
        """Predict from what is known before compiling: mean and standard deviation, [n] each."""
        return self._predict("before", columns)

    def after(self, columns: Columns) -> tuple[Floats, Floats]:
        """Predict from the binaries too; of what is not compiled (NaN) the mean says little."""
        return self._predict("after", columns)

    def factors(self, columns: Columns) -> list[dict[str, float]]:
        """Return what each concept makes of each configuration, as factors of its latency.

        They multiply, with the one that all share, to what :meth:`after` predicts.
        """
        import xgboost

        names, values = matrix("after", columns, self.card.target)
        data = xgboost.DMatrix(values, feature_names=list(names))
        found = self.trees["after"].booster.predict(data, pred_contribs=True)
        concepts = [*map(concept, names), "all alike"]  # the mean comes last
        result = []
        for row in found.tolist():
            logs: dict[str, float] = defaultdict(float)
            for name, log in zip(concepts, row, strict=True):
                logs[name] += log
            result.append({name: exp(log) for name, log in logs.items()})
        return result

    def _predict(self, head: str, columns: Columns) -> tuple[Floats, Floats]:
        _, values = matrix(head, columns, self.card.target)
        mean = self.trees[head].booster.inplace_predict(values).astype(np.float64)
        return mean, np.interp(mean, *self.card.deviations[head])

    @classmethod
    def train(
        cls, dataset: KernelDataset, params: XgbParams = KERNELS, *, nthread: int = 1
    ) -> KernelModel:
        """Train on the rows of a dataset that are there to be learned from.

        Raises:
            MissingData: no list has two timings.
        """
        table = KernelTable.of(dataset)
        trees, deviations = {}, {}
        for head in HEADS:
            rows = table.labelled(head, params)
            booster = train_booster(rows, params, nthread=nthread, names=table.names[head])
            trees[head] = Trees.of(booster, table.names[head])
            deviations[head] = table.deviations(table.unseen(head, params, nthread))
        raw = {head: each.raw for head, each in trees.items()}
        hashes = {head: hashlib.sha256(data).hexdigest()[:16] for head, data in raw.items()}
        card = KernelCard(
            kernel_model=FORMAT,
            ptx_schema=PTX_SCHEMA,
            target=dataset.identity.target,
            trained_on=table.counts(),
            params=params,
            features={head: each.columns for head, each in trees.items()},
            deviations=deviations,
            files={head: f"{head}-{digest}.ubj" for head, digest in hashes.items()},
            hashes=hashes,
            canaries={head: each.canary() for head, each in trees.items()},
        )
        return cls(card, trees)

    def save(self, folder: Path) -> Path:
        """Write the model; the card last, so that whoever reads meanwhile finds a whole one.

        Raises:
            FileError: the folder holds something else, or cannot be written.
        """
        require_place(folder, "model of kernels")
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for head, name in self.card.files.items():
                replace_file(folder / name, self.trees[head].raw)
            write_json(folder / CARD, self.card)
            for file in folder.glob("*.ubj"):
                if file.name not in self.card.files.values():
                    file.unlink()
        return folder

    @classmethod
    def load(cls, folder: Path) -> KernelModel:
        """Read a model; this runs no code, and reads the trees when they are first asked.

        Raises:
            NoModel: nothing is there. CorruptFile: damaged, or something else.
            SchemaMismatch: of columns that this release does not compute.
        """
        file = folder / CARD
        if not file.exists():
            raise NoModel(f"no model of kernels at {folder}: expected what `costmodel train` wrote")
        with file_errors(file):
            found = read_json(file, dict[str, Any])
        schemas = found.get("kernel_model"), found.get("ptx_schema")
        if None in schemas:
            raise CorruptFile(f"{file}: expected the card of a model of kernels; name another")
        if schemas != (FORMAT, PTX_SCHEMA):
            raise SchemaMismatch(
                f"{folder}: format and PTX schema {schemas}, this release has "
                f"{(FORMAT, PTX_SCHEMA)}: train the model again"
            )
        try:
            card = decode(found, KernelCard)
        except InvalidInput as error:
            raise CorruptFile(f"{file}: {error}") from None
        return cls(card, {head: _trees(folder, card, head) for head in HEADS})


def _trees(folder: Path, card: KernelCard, head: str) -> Trees:
    def read() -> bytes:
        with file_errors(file):
            data = read_small_file(file)
        if hashlib.sha256(data).hexdigest()[:16] != card.hashes[head]:
            raise CorruptFile(f"{file}: not that of {CARD}; train the model again")
        return data

    try:
        file, _ = folder / card.files[head], card.deviations[head]
        return Trees(card.features[head], read, file=file, canary=card.canaries[head])
    except KeyError:
        raise CorruptFile(f"{folder / CARD}: nothing of the head {head!r}") from None


# --- What is learned from -------------------------------------------------------------------------


def matrix(head: str, columns: Columns, target: Target) -> tuple[tuple[str, ...], Rows]:
    """Return the names of a head's columns, and what they hold of a list, float32 [n, f].

    Without the binary the columns are there as they are, too: what kind of kernel and call it is
    then says more than it misleads.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column of NaN has no median
        found = HEADS[head](columns, target.device)
        values = np.column_stack([*found.values()])
        values[~np.isfinite(values)] = np.nan
        beside = (values - np.nanmedian(values, axis=0)).astype(np.float32)
    names = tuple(f"{name}{BESIDE}" for name in found)
    if head == "after":
        return names, beside
    return (*names, *found), np.hstack([beside, values.astype(np.float32)])


@dataclass(frozen=True)
class KernelTable:
    """Rows of a dataset as a model sees them, in the order of its lists.

    Attributes:
        names, values: of each head: its columns, and what they hold, float32 [n, f].
        label: log(latency / median of the list), float64 [n]; of what fails above all of the list.
        slower: than the fastest of the list, in the logarithm, float64 [n].
        kernel, list: full name of the kernel, and number of the list, [n].
        row: of the dataset, [n].
    """

    names: dict[str, tuple[str, ...]]
    values: dict[str, Rows]
    label: Floats
    slower: Floats
    kernel: NDArray[np.str_]
    list: NDArray[np.intp]
    row: NDArray[np.intp]

    @classmethod
    def of(cls, dataset: KernelDataset, role: str = "train") -> KernelTable:
        """Take the lists of one role in which two configurations work.

        Raises:
            MissingData: there are none.
        """
        texts = ("list", "kernel", "role", "status", "config", "arguments")
        table = dataset.rows.select([*texts, "latency_us", "p10_us", *FEATURES])
        every = {name: np.asarray(table[name]) for name in table.column_names}
        order = np.lexsort((every["config"], every["list"]))
        ends = np.flatnonzero(every["list"][order][1:] != every["list"][order][:-1]) + 1
        names: dict[str, tuple[str, ...]] = {}
        parts: dict[str, list[Any]] = defaultdict(list)
        for rows in np.split(order, ends):
            columns = {name: column[rows] for name, column in every.items()}
            label = _label(columns)
            known = ~np.isnan(label)
            if columns["role"][0] != role or known.sum() < 2:
                continue
            for head in HEADS:
                names[head], values = matrix(head, columns, dataset.identity.target)
                parts[head].append(values[known])
            parts["label"].append(label[known])
            parts["slower"].append(label[known] - label[known].min())
            parts["kernel"].append(columns["kernel"][known])
            parts["list"].append(np.full(known.sum(), len(parts["list"])))
            parts["row"].append(rows[known])
        if not names:
            raise MissingData(f"no list of role {role!r} with two timings: tune more kernels first")
        found = {name: np.concatenate(part) for name, part in parts.items()}
        return cls(names, {head: found.pop(head) for head in HEADS}, **found)

    def counts(self) -> dict[str, int]:
        """Return how many kernels, lists and rows there are."""
        return {
            "kernels": len(np.unique(self.kernel)),
            "lists": len(np.unique(self.list)),
            "rows": len(self.row),
        }

    def labelled(self, head: str, params: XgbParams, rows: Any = slice(None)) -> LabelledRows:
        """Return rows to learn from: each kernel counts alike, and each of its lists."""
        _, kernel = np.unique(self.kernel, return_inverse=True)
        of_list = np.bincount(self.list)[self.list]
        lists = np.bincount(kernel, 1 / of_list)[kernel]
        near = np.exp(-params.nearness * np.expm1(self.slower))
        weight = (params.floor + (1 - params.floor) * near) / of_list / lists
        label, weight = self.label[rows], weight[rows]
        start = np.zeros_like(label)
        values = self.values[head][rows]
        return LabelledRows(values, label, start, weight / weight.mean(), self.list[rows])

    def unseen(self, head: str, params: XgbParams, nthread: int = 1) -> Floats:
        """Predict each row by trees that have learned from no kernel of its module, float64 [n].

        Modules of three names are left out together; if there are few, kernels.
        """
        groups = [".".join(name.split(".")[:3]) for name in self.kernel]
        if len(set(groups)) < _FOLDS:
            groups = self.kernel.tolist()
        _, group = np.unique(groups, return_inverse=True)
        fold = group % _FOLDS
        found = np.zeros(len(fold))
        for i in np.unique(fold):
            out = fold == i
            if not out.all():
                rows = self.labelled(head, params, ~out)
                booster = train_booster(rows, params, nthread=nthread)
                found[out] = booster.inplace_predict(self.values[head][out])
        return found

    def deviations(self, predicted: Floats) -> Deviations:
        """Return how far latencies are from predictions, by what is predicted."""
        error = self.label - predicted
        error -= (np.bincount(self.list, error) / np.bincount(self.list))[self.list]
        bins = np.array_split(np.argsort(predicted, kind="stable"), min(_BINS, len(error) // 2))
        knots = tuple(float(predicted[rows].mean()) for rows in bins)
        return knots, tuple(float(np.sqrt(np.mean(error[rows] ** 2))) for rows in bins)


def _label(columns: Columns) -> Floats:
    """Return log(latency / median); NaN where nothing is known."""
    status, latency = columns["status"], columns["latency_us"].astype(np.float64)
    unsteady = (status == "ok") & (latency > _UNSTEADY * columns["p10_us"])
    timed = np.isin(status, ("ok", "too_slow")) & ~unsteady
    if not timed.any():
        return np.full(len(status), np.nan)
    label = np.log(np.where(timed, latency, np.nan))
    failed = np.isin(status, ("compile_error", "out_of_resources", "timeout"))
    label[failed] = label[timed].max() + _FAILED
    return label - np.median(label[timed])
