"""A model on disk: UBJ, JSON and Parquet only, so that loading one runs no code."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.destination import CARD, require_model_place
from costmodel.data.shards import Identity, read_shards, sort_rows, write_shard
from costmodel.errors import (
    CorruptFile,
    FileError,
    InvalidInput,
    NoModel,
    SchemaMismatch,
    WrongVersion,
)
from costmodel.features.features import CONFIG_FEATURES, FEATURE_SCHEMA, FEATURES
from costmodel.files import cached_fact
from costmodel.gemm.dtypes import kinds
from costmodel.hardware.target import Target
from costmodel.models import swap
from costmodel.models.confidence import Confidence
from costmodel.models.torch_time import TORCH_FEATURES, TorchTime
from costmodel.models.trees import canary_of, open_trees, require_columns
from costmodel.models.xgb import XgbCostModel, XgbParams, content_hash
from costmodel.support.untrusted import file_errors, parse_json, take

__all__ = [
    "CARD", "FORMAT", "card_stamp", "load", "load_artifacts", "parse_head", "read_card", "save",
]  # fmt: skip

FORMAT = 1
"""Version of the layout of the directory and of its card."""

ARTIFACTS = "artifacts.parquet"
TORCH = "torch.ubj"
_ATTEMPTS = 5  # to read what another process is saving
_HEADS = {True: ("model.ubj", FEATURES), False: ("config.ubj", CONFIG_FEATURES)}


def card_stamp(directory: str | PathLike[str]) -> tuple[int, int, int]:
    """What changes when a model is saved to a directory again.

    Raises:
        OSError: no model is there.
    """
    # A new file may bear the time of the old one, by a coarse clock or one that was set back.
    card = os.stat(os.path.join(directory, CARD))
    return card.st_mtime_ns, card.st_ino, card.st_size


def save(model: XgbCostModel, path: Path, raw: Mapping[bool, bytes]) -> Path:
    """Write the heads, the card that vouches for them, and the artifacts that are known.

    All of it or, whatever fails and wherever the process ends, nothing: a model that lay there
    before can then be loaded as before.

    Raises:
        InvalidInput: what could not be loaded again, such as a name that is no text.
        NoModel: the model is not fitted.
        FileError: the folder holds what is no model, or cannot be written.
    """
    if model.target_ is None:
        raise NoModel(f"model {model.name!r} is not fitted: nothing to save, call fit() first")
    require_model_place(path)
    artifacts, raw = model.artifacts, dict(raw)  # read before anything is overwritten
    torch_time = model.torch_time_.dump()
    card = _card_bytes({
        "format": FORMAT,
        "name": model.name,
        "hash": model.hash,
        "torch_hash": hashlib.sha256(torch_time).hexdigest()[:16] if torch_time else "",
        "feature_schema": FEATURE_SCHEMA,
        "ptx_schema": PTX_SCHEMA,
        "features": list(FEATURES),
        "config_features": list(CONFIG_FEATURES),
        "artifacts": len(artifacts or ()),
        "target": model.target_.to_dict(),
        "dtypes": list(model.dtypes_),
        "devices": list(model.devices_),
        "params": asdict(model.params),
        "canaries": _canaries(model),
        **({"confidence": asdict(model.confidence_)} if model.confidence_ else {}),
        "training": {"date": datetime.now(UTC).date().isoformat(), **model.card_},
    })  # fmt: skip
    parts = {name: swap.part_of(raw[ptx]) for ptx, (name, _) in _HEADS.items()}
    parts[TORCH] = swap.part_of(torch_time) if torch_time else None
    parts[ARTIFACTS] = _writes_shard(artifacts, model.target_) if artifacts else None
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        swap.replace_model(path, card, parts)
    return path


def _canaries(model: XgbCostModel) -> dict[str, float]:
    """A prediction of each part that reading it must give again, by the name of its file."""
    parts = {name: model._head(ptx) for ptx, (name, _) in _HEADS.items()}
    if (torch_trees := model.torch_time_.parse()) is not None:
        parts[TORCH] = torch_trees
    return {name: canary_of(trees) for name, trees in parts.items()}


def _card_bytes(card: dict[str, Any]) -> bytes:
    """A card as it is written, which :func:`read_card` will take.

    Raises:
        InvalidInput: it would not, such as for parameters of another type than they are declared.
    """
    try:
        data = (json.dumps(card, indent=1, default=_plain) + "\n").encode()
        _parse_card(Path(CARD), data)
    except (CorruptFile, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the model cannot be saved, since it could not be loaded again ({error!s:.200}): "
            f"nothing was written; train it with the name and the parameters put right"
        ) from None
    return data


def _plain(value: object) -> Any:
    """A number of NumPy's, which stands where one of Python's is meant."""
    if not isinstance(value, np.generic):
        raise TypeError(f"{type(value).__name__} {value!r:.80} is no JSON")
    return value.item()


def _writes_shard(artifacts: ArtifactTable, target: Target) -> swap.Part:
    rows = sort_rows(artifacts.arrow(), ("kernel", "key"))
    identity = Identity(target, {})
    return lambda path: write_shard(path, rows, identity, ptx_schema=PTX_SCHEMA)


def load_artifacts(path: Path, target: Target) -> ArtifactTable:
    """The artifact table beside a model; empty where there is none.

    Raises:
        CorruptFile, WrongVersion: unreadable, or of another PTX schema.
    """
    schema, identity = ArtifactTable.schema(), Identity(target, {})
    for attempt in range(_ATTEMPTS):
        try:
            file = swap.locate(path, ARTIFACTS, swap.stamp_of(path))
            rows = read_shards([file] if file else [], schema, identity, ptx_schema=PTX_SCHEMA)
            break
        except FileNotFoundError:  # another process saves: it has its lasting name now
            if attempt == _ATTEMPTS - 1:
                raise
    return ArtifactTable(rows)


def load(path: Path, *, nthread: int = 1, parse: bool = True) -> XgbCostModel:
    """Read a model directory.

    Args:
        parse: read and parse the trees now; else when they are first asked. The hash of the card,
            which vouches for them, is compared in any case.

    Raises:
        NoModel: nothing at this path.
        CorruptFile: truncated, foreign, or heads that are not those of the card.
        WrongVersion: written by a newer release.
        SchemaMismatch: trained on other columns than this release computes.
        MisreadModel: the installed XGBoost does not predict what it should.
    """
    for _ in range(_ATTEMPTS - 1):
        before = _stamp(path)
        try:
            return _load(path, nthread, parse)
        except CorruptFile:
            if _stamp(path) == before:
                raise  # else another process saves a model there: read that
    return _load(path, nthread, parse)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        return card_stamp(path)
    except OSError:
        return None


def _load(path: Path, nthread: int, parse: bool) -> XgbCostModel:
    data = _read_card(path)
    card, stamp = _parse_card(path / CARD, data), swap.card_digest(data)
    _check_schema(path, card)
    heads = _HeadFiles(path, stamp)
    if heads.hash != card["hash"]:
        raise CorruptFile(f"{path}: the heads are not those of {CARD}; save the model again")
    model = XgbCostModel(card["params"], name=card["name"], nthread=nthread)
    model._raw, model._hash, model._directory = heads, card["hash"], path
    canaries: dict[str, float] = card.get("canaries", {})  # none in models of earlier releases
    model._canaries = {ptx: canaries.get(name) for ptx, (name, _) in _HEADS.items()}
    if parse:
        model._raw = dict(heads)
        for ptx in _HEADS:
            model._head(ptx)
    if card["torch_hash"]:
        data = _read(path, TORCH, stamp)
        if hashlib.sha256(data).hexdigest()[:16] != card["torch_hash"]:
            raise CorruptFile(f"{path / TORCH}: not that of {CARD}; save the model again")
        trees = functools.partial(
            open_trees, path / TORCH, data, TORCH_FEATURES, canaries.get(TORCH)
        )
        model.torch_time_ = TorchTime.of(trees)
        if parse:
            model.torch_time_.parse()
    model.target_, model.dtypes_, model.devices_ = card["target"], card["dtypes"], card["devices"]
    model.card_ = card["training"]
    model.confidence_ = card.get("confidence")
    return model


class _HeadFiles(Mapping[bool, bytes]):
    """The heads in a model's directory, read when they are asked for.

    Their hashes are worked out once for as long as the files stay as they are: a process that only
    looks up a winner reads no trees. What is read later must still be what was hashed.

    Attributes:
        hash: as :func:`content_hash` has it.
    """

    def __init__(self, path: Path, stamp: str) -> None:
        self._path, self._stamp = path, stamp
        with file_errors(path):
            files = [swap.locate(path, name, stamp) or path / name for name, _ in _HEADS.values()]
        # The hash has the columns in it, which another release may name otherwise.
        columns = hashlib.sha256("\n".join(FEATURES).encode()).hexdigest()[:8]
        found = cached_fact(f"model-{columns}", files, self._work_out)
        self.hash, self._sums = found["hash"], found

    def _work_out(self) -> dict[str, str]:
        raw = {ptx: _read(self._path, name, self._stamp) for ptx, (name, _) in _HEADS.items()}
        return {"hash": content_hash(raw), **{str(ptx): _sum(raw[ptx]) for ptx in raw}}

    def __getitem__(self, ptx: bool) -> bytes:
        name, _ = _HEADS[ptx]
        data = _read(self._path, name, self._stamp)
        if _sum(data) != self._sums[str(ptx)]:
            raise CorruptFile(
                f"{self._path / name} has changed since the model was loaded: load it again"
            )
        return data

    def __iter__(self) -> Iterator[bool]:
        return iter(_HEADS)

    def __len__(self) -> int:
        return len(_HEADS)


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_head(
    ptx: bool, raw: bytes, directory: Path | None = None, canary: float | None = None
) -> Any:
    """The trees of a head, from the content of its file in a model's directory.

    Args:
        canary: as of :func:`costmodel.models.trees.open_trees`.

    Raises:
        CorruptFile, SchemaMismatch, MisreadModel: as :func:`load`.
    """
    name, expected = _HEADS[ptx]
    return open_trees((directory or Path()) / name, raw, expected, canary)


def read_card(path: Path) -> dict[str, Any]:
    """The card of a model directory, checked and typed: ``target`` and ``params`` are objects.

    Raises:
        NoModel, CorruptFile, WrongVersion: as :func:`load`.
    """
    return _parse_card(path / CARD, _read_card(path))


def _read_card(path: Path) -> bytes:
    with file_errors(path):
        there = os.path.lexists(path) and path.stat() is not None
    if not there:
        raise NoModel(f"no model at {path}: expected a directory that save() wrote")
    if not path.is_dir():
        raise CorruptFile(f"{path} is a file: expected the directory that save() wrote")
    return _read(path, CARD)


def _parse_card(file: Path, data: bytes) -> dict[str, Any]:
    """The content of a card, checked and typed as :func:`read_card` has it."""
    try:
        card = parse_json(data)
    except InvalidInput as error:
        raise CorruptFile(f"{file}: {error}") from None
    if not isinstance(card, dict) or type(card.get("format")) is not int:
        raise CorruptFile(f"{file}: not the card of a costmodel model")
    if card["format"] < 1:
        raise CorruptFile(f"{file}: format {card['format']}: expected 1 or more")
    if card["format"] > FORMAT:
        raise WrongVersion(
            f"{file}: format {card['format']}, this release reads up to {FORMAT}; upgrade costmodel"
        )
    try:
        card["target"] = Target.from_dict(card["target"])
        card["params"] = _params(card["params"])
        for name, kind in _TYPES.items():
            take(card, name, kind)
        if not set(card["dtypes"]) <= set(kinds()):
            raise InvalidInput(f"dtypes={card['dtypes']!r:.80}: expected some of {list(kinds())}")
        card["dtypes"] = tuple(card["dtypes"])
        card["devices"] = _devices(card)
        if "canaries" in card:
            found = take(card, "canaries", dict)
            card["canaries"] = {name: take(found, name, float) for name in found}
        if "confidence" in card:
            card["confidence"] = Confidence.from_dict(card["confidence"])
    except (KeyError, TypeError, InvalidInput) as error:
        raise CorruptFile(f"{file}: {type(error).__name__}: {error}") from None
    return card


_TYPES = {
    "name": str, "hash": str, "torch_hash": str, "feature_schema": int, "ptx_schema": int,
    "features": list, "config_features": list, "training": dict, "dtypes": list,
}  # fmt: skip


# What a model of an earlier release was trained with, which had no such parameters.
_BEFORE = {"pairs": 0.0, "pair_scale": 0.0}


def _devices(card: dict[str, Any]) -> tuple[str, ...]:
    """The devices it was trained on; in earlier releases it was one."""
    own = card["target"].device.name
    found = take(card, "devices", list) if "devices" in card else [own]
    if own not in found or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"devices={found!r:.80}: expected names, {own!r} among them")
    return tuple(found)


def _params(found: dict[str, Any]) -> XgbParams:
    """Numbers only, under the names that there are."""
    kinds = get_type_hints(XgbParams)
    if isinstance(found, dict):
        found = _BEFORE | found
    if not isinstance(found, dict) or set(found) != set(kinds):
        raise InvalidInput(f"params: expected a number for each of {sorted(kinds)}")
    return XgbParams(**{name: take(found, name, kind) for name, kind in kinds.items()})


def _check_schema(path: Path, card: dict[str, Any]) -> None:
    for name, ours in (("feature_schema", FEATURE_SCHEMA), ("ptx_schema", PTX_SCHEMA)):
        if card[name] != ours:
            raise SchemaMismatch(
                f"{path}: trained with {name} {card[name]}, this release computes {ours}; "
                f"train the model again"
            )
    require_columns(path / CARD, card["features"], FEATURES)
    require_columns(path / CARD, card["config_features"], CONFIG_FEATURES)


def _read(path: Path, name: str, stamp: str = "") -> bytes:
    """A small file of the model in a directory, see :func:`costmodel.models.swap.read_part`."""
    try:
        with file_errors(path / name):
            return swap.read_part(path, name, stamp)
    except FileError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    raise CorruptFile(f"{path}: not a model directory, {name} is not there")
