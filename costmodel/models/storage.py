"""A model on disk: UBJ, JSON and Parquet only, so that loading one runs no code."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

from costmodel.artifact_table import ArtifactTable
from costmodel.destination import CARD, require_model_place
from costmodel.errors import (
    CorruptFile,
    FileError,
    InvalidInput,
    NoModel,
    SchemaMismatch,
    WrongVersion,
)
from costmodel.features import CONFIG_FEATURES, FEATURE_SCHEMA, FEATURES
from costmodel.models.torch_time import TORCH_FEATURES, TorchTime
from costmodel.models.ubj import check_trees
from costmodel.models.xgb import XgbCostModel, XgbParams, content_hash
from costmodel.ptx import PTX_SCHEMA
from costmodel.remembered import remembered
from costmodel.shards import Identity, read_shards, replace_file, write_json, write_shard
from costmodel.target import Target
from costmodel.uncertainty import Uncertainty
from costmodel.untrusted import file_errors, parse_json, read_small_file, take
from costmodel.workload import KINDS

__all__ = [
    "CARD", "FORMAT", "card_stamp", "load", "load_artifacts", "parse_head", "read_card", "save",
]  # fmt: skip

FORMAT = 1
"""Version of the layout of the directory and of its card."""

ARTIFACTS = "artifacts.parquet"
TORCH = "torch.ubj"
_PACKAGE = (Path(__file__).parents[1] / "_models").resolve()
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

    Raises:
        NoModel: the model is not fitted.
        FileError: the folder holds what is no model, or cannot be written.
    """
    if model.target_ is None:
        raise NoModel(f"model {model.name!r} is not fitted: nothing to save, call fit() first")
    require_model_place(path)
    artifacts, raw = model.artifacts, dict(raw)  # read before anything is overwritten
    torch_time = model.torch_time_.dump()
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    card = {
        "format": FORMAT,
        "name": model.name,
        "hash": model.hash,
        "torch_hash": hashlib.sha256(torch_time).hexdigest()[:16] if torch_time else "",
        "feature_schema": FEATURE_SCHEMA,
        "ptx_schema": PTX_SCHEMA,
        "features": list(FEATURES),
        "config_features": list(CONFIG_FEATURES),
        "target": model.target_.to_dict(),
        "dtypes": list(model.dtypes_),
        "devices": list(model.devices_),
        "params": asdict(model.params),
        **({"uncertainty": model.uncertainty_.to_dict()} if model.uncertainty_ else {}),
        "training": {"date": datetime.now(UTC).date().isoformat(), **model.card_},
    }
    with file_errors(path):
        for ptx, (name, _) in _HEADS.items():
            replace_file(path / name, functools.partial(_put, raw[ptx]))
        (path / TORCH).unlink(missing_ok=True)
        if torch_time:
            replace_file(path / TORCH, functools.partial(_put, torch_time))
        write_json(path / CARD, card)
        (path / ARTIFACTS).unlink(missing_ok=True)  # those of a model that lay here before
    if artifacts:
        identity = Identity(model.target_, {})
        write_shard(path / ARTIFACTS, artifacts.arrow(), identity, ptx_schema=PTX_SCHEMA)
    return path


def load_artifacts(path: Path, target: Target) -> ArtifactTable:
    """The artifact table beside a model; empty where there is none.

    Raises:
        CorruptFile, WrongVersion: unreadable, or of another PTX schema.
    """
    files = [path / ARTIFACTS] if (path / ARTIFACTS).exists() else []
    schema = ArtifactTable.schema()
    return ArtifactTable(read_shards(files, schema, Identity(target, {}), ptx_schema=PTX_SCHEMA))


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
    """
    card = read_card(path)
    _check_schema(path, card)
    heads = _HeadFiles(path)
    if heads.hash != card["hash"]:
        raise CorruptFile(f"{path}: the heads are not those of {CARD}; save the model again")
    model = XgbCostModel(card["params"], name=card["name"], nthread=nthread)
    model._raw, model._hash, model._directory = heads, card["hash"], path
    if parse:
        model._raw = dict(heads)
        for ptx in _HEADS:
            model._head(ptx)
    if card["torch_hash"]:
        data = _read(path / TORCH)
        if hashlib.sha256(data).hexdigest()[:16] != card["torch_hash"]:
            raise CorruptFile(f"{path / TORCH}: not that of {CARD}; save the model again")
        trees = functools.partial(_booster, path / TORCH, data, TORCH_FEATURES)
        model.torch_time_ = TorchTime.of(trees)
        if parse:
            model.torch_time_.parse()
    model.target_, model.dtypes_, model.devices_ = card["target"], card["dtypes"], card["devices"]
    model.card_ = card["training"]
    model.uncertainty_ = card.get("uncertainty")
    return model


class _HeadFiles(Mapping[bool, bytes]):
    """The heads in a model's directory, read when they are asked for.

    Their hashes are worked out once for as long as the files stay as they are: a process that only
    looks up a winner reads no trees. What is read later must still be what was hashed.

    Attributes:
        hash: as :func:`content_hash` has it.
    """

    def __init__(self, path: Path) -> None:
        self._files = {ptx: path / name for ptx, (name, _) in _HEADS.items()}
        # The hash has the columns in it, which another release may name otherwise.
        columns = hashlib.sha256("\n".join(FEATURES).encode()).hexdigest()[:8]
        found = remembered(f"model-{columns}", self._files.values(), self._work_out)
        self.hash, self._sums = found["hash"], found

    def _work_out(self) -> dict[str, str]:
        raw = {ptx: _read(file) for ptx, file in self._files.items()}
        return {"hash": content_hash(raw), **{str(ptx): _sum(raw[ptx]) for ptx in raw}}

    def __getitem__(self, ptx: bool) -> bytes:
        data = _read(self._files[ptx])
        if _sum(data) != self._sums[str(ptx)]:
            raise CorruptFile(
                f"{self._files[ptx]} has changed since the model was loaded: load it again"
            )
        return data

    def __iter__(self) -> Iterator[bool]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_head(ptx: bool, raw: bytes, directory: Path | None = None) -> Any:
    """The trees of a head, from the content of its file in a model's directory.

    Raises:
        CorruptFile, SchemaMismatch: as :func:`load`.
    """
    name, expected = _HEADS[ptx]
    return _booster((directory or Path()) / name, raw, expected)


def _booster(file: Path, raw: bytes, expected: tuple[str, ...]) -> Any:
    """Trees from UBJ, of the columns that this release computes."""
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
    _compare(file, booster.feature_names or (), expected)
    return booster


def read_card(path: Path) -> dict[str, Any]:
    """The card of a model directory, checked and typed: ``target`` and ``params`` are objects.

    Raises:
        NoModel, CorruptFile, WrongVersion: as :func:`load`.
    """
    with file_errors(path):
        there = os.path.lexists(path) and path.stat() is not None
    if not there:
        raise NoModel(f"no model at {path}: expected a directory that save() wrote")
    if not path.is_dir():
        raise CorruptFile(f"{path} is a file: expected the directory that save() wrote")
    file = path / CARD
    try:
        card = parse_json(_read(file))
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
        if not set(card["dtypes"]) <= set(KINDS):
            raise InvalidInput(f"dtypes={card['dtypes']!r:.80}: expected some of {list(KINDS)}")
        card["dtypes"] = tuple(card["dtypes"])
        card["devices"] = _devices(card)
        if "uncertainty" in card:  # not in models of earlier releases
            card["uncertainty"] = Uncertainty.from_dict(card["uncertainty"])
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
    _compare(path / CARD, card["features"], FEATURES)
    _compare(path / CARD, card["config_features"], CONFIG_FEATURES)


def _compare(file: Path, found: list[str] | tuple[str, ...], expected: tuple[str, ...]) -> None:
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


def _put(data: bytes, stream: BinaryIO) -> None:
    stream.write(data)


def _read(file: Path) -> bytes:
    try:
        with file_errors(file):
            return read_small_file(file)
    except FileError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    raise CorruptFile(f"{file.parent}: not a model directory, {file.name} is not there")
