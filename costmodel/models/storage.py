"""A model on disk: JSON, UBJ and Parquet only, so that loading one runs no code.

Each part is named by its content, and ``card.json`` names the parts and their hashes. A save writes
the new parts and replaces the card last: whoever reads meanwhile, or whenever the process is
killed, one whole model is there. The parts that the card no longer names stay for those who read
it before, until the next save.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.shards import (
    CARD,
    Identity,
    compaction_lock,
    read_shards,
    require_place,
    sort_rows,
    write_shard,
)
from costmodel.errors import (
    CorruptFile,
    FileError,
    InvalidInput,
    ModelError,
    NoModel,
    SchemaMismatch,
    WrongVersion,
)
from costmodel.features.features import CONFIG_FEATURES, FEATURE_SCHEMA, FEATURES
from costmodel.files import decode, file_errors, parse_json, read_small_file, replace_file
from costmodel.gemm.dtypes import kinds
from costmodel.hardware.target import Target
from costmodel.models.confidence import Confidence
from costmodel.models.objective import XgbParams
from costmodel.models.trees import require_columns

__all__ = [
    "CARD", "FORMAT", "HEADS", "TORCH", "Card", "card_stamp", "content_hash", "read_artifacts",
    "read_card", "read_heads", "read_torch", "save",
]  # fmt: skip

FORMAT = 1
"""Version of the layout of the directory and of its card."""

HEADS = {True: "model.ubj", False: "config.ubj"}
"""The parts that hold the two heads; True is the one that sees the compiled artifact."""
TORCH = "torch.ubj"
ARTIFACTS = "artifacts.parquet"
_ANY_DIGEST = "[0-9a-f]" * 16
_PARTS = (*HEADS.values(), TORCH, ARTIFACTS)


@dataclass(frozen=True)
class Card:
    """The content of ``card.json``.

    Attributes:
        features, config_features: the columns that the two heads expect.
        hash: identity of the heads, see :func:`content_hash`.
        torch_hash, artifacts_hash: of the content of these parts; empty for a part that is not
            there, or was not hashed.
        files: the name of each part's file; in a card without names they have the parts' own.
        canaries: a prediction that each part must give when it is read.
    """

    format: int
    name: str
    hash: str
    feature_schema: int
    ptx_schema: int
    features: tuple[str, ...]
    config_features: tuple[str, ...]
    target: Target
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    params: XgbParams
    training: dict[str, Any]
    torch_hash: str = ""
    artifacts_hash: str = ""
    files: dict[str, str] = field(default_factory=dict)
    canaries: dict[str, float] = field(default_factory=dict)
    confidence: Confidence | None = None

    @classmethod
    def of(cls, **fields: Any) -> Card:
        """Make a card for the columns that this release computes."""
        return cls(
            format=FORMAT,
            feature_schema=FEATURE_SCHEMA,
            ptx_schema=PTX_SCHEMA,
            features=FEATURES,
            config_features=CONFIG_FEATURES,
            **fields,
        )


def content_hash(model: bytes, config: bytes) -> str:
    """Return the identity of a trained model: its trees and the columns that they expect."""
    digest = hashlib.sha256("\n".join(FEATURES).encode())
    digest.update(model)
    digest.update(config)
    return digest.hexdigest()[:16]


def card_stamp(directory: str | PathLike[str]) -> tuple[int, int, int]:
    """Return what changes when a model is saved to a directory again.

    Raises:
        OSError: no model is there.
    """
    # A new file may bear the time of the old one, by a coarse clock or one that was set back.
    card = os.stat(os.path.join(directory, CARD))
    return card.st_mtime_ns, card.st_ino, card.st_size


def save(
    path: Path, card: Card, trees: Mapping[str, bytes], artifacts: ArtifactTable | None
) -> Path:
    """Write the parts of a model and the card that vouches for them; all of it or nothing.

    Args:
        card: its ``files`` and hashes of parts are filled in here.
        trees: the content of both heads and, if there is one, of :data:`TORCH`.

    Raises:
        InvalidInput: it could not be loaded again, for example a name that is no text.
        FileError: the folder holds something else than a model, or cannot be written.
    """
    require_place(path, "model")
    hashes = {part: _hash(data) for part, data in trees.items()}
    _card_bytes(card, hashes)  # refused before anything is written
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        with compaction_lock(path):  # of two that save at once, one is first
            _remove_unnamed(path)
            for part, data in trees.items():
                replace_file(path / _file_name(part, hashes[part]), data)
            if artifacts:
                hashes[ARTIFACTS] = _write_artifacts(path, artifacts, card.target)
            replace_file(path / CARD, _card_bytes(card, hashes))
    return path


def read_card(path: Path) -> Card:
    """Read the card of a model directory.

    Raises:
        NoModel: nothing at this path.
        CorruptFile: foreign or damaged. WrongVersion: written by a newer release.
        SchemaMismatch: trained on other columns than this release computes.
    """
    with file_errors(path):
        there = os.path.lexists(path) and path.stat() is not None
    if not there:
        raise NoModel(f"no model at {path}: expected a directory that save() wrote")
    if not path.is_dir():
        raise CorruptFile(f"{path} is a file: expected the directory that save() wrote")
    return _parse_card(path / CARD, _read(path, CARD))


def read_heads(path: Path, card: Card) -> dict[bool, bytes]:
    """Read the trees of both heads.

    Raises:
        CorruptFile: not those of the card. FileError: they cannot be read.
    """
    raw = {ptx: _read(path, card.files[part]) for ptx, part in HEADS.items()}
    if content_hash(raw[True], raw[False]) != card.hash:
        raise CorruptFile(f"{path}: the heads are not those of {CARD}; save the model again")
    return raw


def read_torch(path: Path, card: Card) -> bytes:
    """Read the trees that predict ``torch.matmul``. Raises as :func:`read_heads`."""
    data = _read(path, card.files[TORCH])
    _require_hash(path / card.files[TORCH], data, card.torch_hash)
    return data


def read_artifacts(path: Path) -> ArtifactTable:
    """Read the artifact table of a model directory; empty if it has none.

    Raises:
        As :func:`read_card`.
        CorruptFile: unreadable, or not that of the card. WrongVersion: of another PTX schema.
    """
    card = read_card(path)
    file = path / card.files.get(ARTIFACTS, ARTIFACTS)
    there = ARTIFACTS in card.files and (card.artifacts_hash or os.path.lexists(file))
    if there:
        _require_hash(file, _read(path, file.name), card.artifacts_hash)
    schema, identity = ArtifactTable.schema(), Identity(card.target, {})
    rows = read_shards([file] if there else [], schema, identity, ptx_schema=PTX_SCHEMA)
    return ArtifactTable(rows)


def _require_hash(file: Path, data: bytes, expected: str) -> None:
    if expected and _hash(data) != expected:
        raise CorruptFile(f"{file}: not that of {CARD}; save the model again")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _file_name(part: str, digest: str) -> str:
    stem, suffix = part.split(".")
    return f"{stem}-{digest}.{suffix}"


def _write_artifacts(path: Path, artifacts: ArtifactTable, target: Target) -> str:
    staged = path / "artifacts.parquet.new"
    rows = sort_rows(artifacts.arrow(), ("kernel", "key"))
    write_shard(staged, rows, Identity(target, {}), ptx_schema=PTX_SCHEMA)
    digest = _hash(staged.read_bytes())
    os.replace(staged, path / _file_name(ARTIFACTS, digest))
    return digest


def _remove_unnamed(path: Path) -> None:
    """Remove parts that the card does not name: of a model before, or of a save that was killed."""
    try:
        named = set(read_card(path).files.values())
    except (FileError, ModelError):
        named = set()
    for part in _PARTS:
        for file in (path / part, *path.glob(_file_name(part, _ANY_DIGEST))):
            if file.name not in named:
                file.unlink(missing_ok=True)


def _card_bytes(card: Card, hashes: Mapping[str, str]) -> bytes:
    """Return a card as it is written, which :func:`read_card` will take.

    Raises:
        InvalidInput: it would not, for example for parameters of another type than declared.
    """
    written = replace(
        card,
        torch_hash=hashes.get(TORCH, ""),
        artifacts_hash=hashes.get(ARTIFACTS, ""),
        files={part: _file_name(part, digest) for part, digest in hashes.items()},
    )
    try:
        data = (json.dumps(asdict(written), indent=1, default=_plain) + "\n").encode()
        _parse_card(Path(CARD), data)
    except (CorruptFile, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the model cannot be saved, since it could not be loaded again ({error!s:.200}): "
            f"nothing was written; train it with the name and the parameters put right"
        ) from None
    return data


def _plain(value: object) -> Any:
    """Convert a number of NumPy."""
    if not isinstance(value, np.generic):
        raise TypeError(f"{type(value).__name__} {value!r:.80} is no JSON")
    return value.item()


def _parse_card(file: Path, data: bytes) -> Card:
    try:
        found = parse_json(data)
        version = found.get("format") if isinstance(found, dict) else None
        if type(version) is not int or version < 1:
            raise InvalidInput("not the card of a costmodel model")
        if version > FORMAT:
            raise WrongVersion(
                f"{file}: format {version}, this release reads up to {FORMAT}; upgrade costmodel"
            )
        card = decode(found, Card)
        if found["params"].keys() != (expected := asdict(card.params).keys()):
            raise InvalidInput(f"params: expected a number for each of {sorted(expected)}")
        _check(card)
    except InvalidInput as error:
        raise CorruptFile(f"{file}: {error}") from None
    for name, ours in (("feature_schema", FEATURE_SCHEMA), ("ptx_schema", PTX_SCHEMA)):
        if (theirs := getattr(card, name)) != ours:
            raise SchemaMismatch(
                f"{file.parent}: trained with {name} {theirs}, this release computes {ours}; "
                f"train the model again"
            )
    require_columns(file, card.features, FEATURES)
    require_columns(file, card.config_features, CONFIG_FEATURES)
    if not card.files:
        parts = [part for part in _PARTS if part != TORCH or card.torch_hash]
        card = replace(card, files={part: part for part in parts})
    return card


def _check(card: Card) -> None:
    """Refuse what a card of the right types may not say.

    Raises:
        InvalidInput: with what is wrong.
    """
    Target.from_dict(card.target.to_dict())
    if not set(card.dtypes) <= set(kinds()):
        raise InvalidInput(f"dtypes={card.dtypes!r:.80}: expected some of {list(kinds())}")
    if (own := card.target.device.name) not in card.devices:
        raise InvalidInput(f"devices={card.devices!r:.80}: expected names, {own!r} among them")
    if card.files and not set(HEADS.values()) <= set(card.files) <= set(_PARTS):
        raise InvalidInput(f"files: expected some of {list(_PARTS)}, both heads among them")
    if any(Path(name).name != name for name in card.files.values()):
        raise InvalidInput(f"files={card.files!r:.200}: expected names without folders")


def _read(path: Path, name: str) -> bytes:
    """Read a small file of a model.

    Raises:
        CorruptFile: it is not there, or no regular file. FileError: it cannot be read.
    """
    with file_errors(path / name):
        try:
            return read_small_file(path / name)
        except FileNotFoundError:
            raise CorruptFile(f"{path}: not a model directory, {name} is not there") from None
