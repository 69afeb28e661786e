"""A model on disk: JSON, UBJ and Parquet only, so that loading one runs no code.

Each part is named by its content (the shipped model's parts have plain names), and ``card.json``
names the parts and their hashes. A save writes the new parts and replaces the card last. So there
is one whole model at any time, for a reader meanwhile and after the process is killed. Parts that
the card no longer names stay until the next save, for processes that have read the old card.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.rows import sort_rows
from costmodel.data.shards import (
    CARD,
    Identity,
    compaction_lock,
    read_shards,
    require_place,
    shard_bytes,
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
from costmodel.files import (
    Named,
    decode,
    digest,
    encode,
    file_errors,
    make_folder,
    parse_json,
    read_small_file,
    replace_file,
)
from costmodel.hardware.target import Target
from costmodel.models.confidence import Confidence
from costmodel.models.torch_time import TORCH_FEATURES
from costmodel.models.trees import Names, Trees, XgbParams, require_columns

FORMAT = 1
"""Version of the layout of the directory and of its card."""

HEADS = {True: "model.ubj", False: "config.ubj"}
"""The parts that hold the two heads; True is the one that sees the compiled artifact."""
TORCH = "torch.ubj"
COLUMNS = {HEADS[True]: FEATURES, HEADS[False]: CONFIG_FEATURES, TORCH: TORCH_FEATURES}
"""The columns that the trees of each part expect."""
ARTIFACTS = "artifacts.parquet"
_ANY_DIGEST = "[0-9a-f]" * 16


@dataclass(frozen=True)
class Card:
    """The content of ``card.json``: what a model was trained on, and where its parts are.

    Attributes:
        hash: identity of the heads, see :func:`content_hash`.
        target: what it was trained on; of several targets the first.
        dtypes: the kinds of ``gemm.dtypes`` that it was trained on.
        devices: the names of all devices with a row that worked among the training rows, that of
            the target first.
        training: rows, workloads, dropped failures, hash of the data and date.
        features, config_features: the columns that the two heads expect.
        torch_hash, artifacts_hash: of the content of these parts; empty for a part that is not
            there. :func:`save` fills in these and the two below.
        files: the name of each part's file.
        canaries: a prediction that each part must give when it is read.
    """

    name: str
    hash: str
    target: Target
    dtypes: Names
    devices: Names
    params: XgbParams
    training: Named
    confidence: Confidence | None = None
    format: int = FORMAT
    feature_schema: int = FEATURE_SCHEMA
    ptx_schema: int = PTX_SCHEMA
    features: Names = FEATURES
    config_features: Names = CONFIG_FEATURES
    torch_hash: str = ""
    artifacts_hash: str = ""
    files: dict[str, str] = field(default_factory=dict)
    canaries: dict[str, float] = field(default_factory=dict)


def content_hash(model: bytes, config: bytes) -> str:
    """Return the identity of a trained model: its trees and the columns that they expect."""
    return digest("\n".join(FEATURES).encode() + model + config)


def card_stamp(directory: str | PathLike[str]) -> tuple[int, int, int]:
    """Return what changes when a model is saved to a directory again.

    Raises:
        OSError: no model is there.
    """
    # A new file may bear the time of the old one, by a coarse clock or one that was set back.
    card = os.stat(os.path.join(directory, CARD))
    return card.st_mtime_ns, card.st_ino, card.st_size


def save(
    path: Path, card: Card, trees: Mapping[str, Trees], artifacts: ArtifactTable | None
) -> Path:
    """Write the parts of a model, and the card with their hashes; all of it or nothing.

    Args:
        trees: those of both heads and, if there are any, of :data:`TORCH`.

    Raises:
        InvalidInput: the model could not be loaded again, for example if its name is no text.
        FileError: the folder holds something else than a model, or cannot be written.
    """
    require_place(path, "model")
    parts = {part: each.raw for part, each in trees.items()}  # read before any is overwritten
    if artifacts:
        rows, identity = sort_rows(artifacts.arrow(), ("kernel", "key")), Identity(card.target, {})
        parts[ARTIFACTS] = shard_bytes("artifacts", rows, identity, ptx_schema=PTX_SCHEMA)
    hashes = {part: digest(data) for part, data in parts.items()}
    card = replace(
        card,
        torch_hash=hashes.get(TORCH, ""),
        artifacts_hash=hashes.get(ARTIFACTS, ""),
        files={part: _file_name(part, each) for part, each in hashes.items()},
        canaries={part: each.canary() for part, each in trees.items()},
    )
    written = _card_bytes(card)  # refused before anything is written
    with file_errors(path):
        make_folder(path)
        with compaction_lock(path):  # of two that save at once, one is first
            _remove_unnamed(path)
            for part, data in parts.items():
                replace_file(path / card.files[part], data)
            replace_file(path / CARD, written)
    return path


def read_card(path: Path) -> Card:
    """Read the card of a model directory.

    Raises:
        NoModel: nothing at this path.
        CorruptFile: foreign or damaged. WrongVersion: written by a newer release.
        SchemaMismatch: trained on other columns than this release computes.
    """
    if not os.path.exists(path):  # which takes names of any length
        raise NoModel(f"no model at {path}: expected a directory that save() wrote")
    if not path.is_dir():
        raise CorruptFile(f"{path} is a file: expected the directory that save() wrote")
    return _parse_card(path / CARD, read_part(path / CARD))


def read_trees(path: Path, card: Card) -> dict[str, Trees]:
    """Return the trees of each part, which are read at their first use."""

    @functools.cache
    def heads() -> dict[str, bytes]:
        found = {part: read_part(path / card.files[part]) for part in HEADS.values()}
        if content_hash(*found.values()) != card.hash:
            raise CorruptFile(f"{path}: the heads are not those of {CARD}; save the model again")
        return found

    def read(part: str) -> bytes:
        if part == TORCH:
            return read_part(path / card.files[TORCH], card.torch_hash)
        return heads()[part]

    return {
        part: Trees(
            columns,
            functools.partial(read, part),
            file=path / card.files[part],
            expected=card.canaries.get(part),
        )
        for part, columns in COLUMNS.items()
        if part in card.files
    }


def read_artifacts(path: Path, card: Card) -> ArtifactTable:
    """Read the artifact table of a model directory; empty if it has none.

    Raises:
        CorruptFile: unreadable, or not that of the card. WrongVersion: of another PTX schema.
        FileError: it cannot be read.
    """
    files = [path / card.files[ARTIFACTS]] if ARTIFACTS in card.files else []
    for file in files:
        read_part(file, card.artifacts_hash)
    identity = Identity(card.target, {})
    schema = ArtifactTable.schema()
    return ArtifactTable(
        read_shards(files, schema, identity, ArtifactTable.faults, ptx_schema=PTX_SCHEMA)
    )


def _file_name(part: str, content_hash: str) -> str:
    stem, suffix = part.split(".")
    return f"{stem}-{content_hash}.{suffix}"


def _remove_unnamed(path: Path) -> None:
    """Remove parts that the card does not name: of a model before, or of a save that was killed."""
    try:
        named = set(read_card(path).files.values())
    except (FileError, ModelError):
        named = set()
    for part in (*COLUMNS, ARTIFACTS):
        for file in (path / part, *path.glob(_file_name(part, _ANY_DIGEST))):
            if file.name not in named:
                file.unlink(missing_ok=True)


def _card_bytes(card: Card) -> bytes:
    """Return a card as it is written, checked as in :func:`read_card`.

    Raises:
        InvalidInput: it could not be read, for example for parameters of another type than
            declared.
    """
    try:
        data = encode(card)
        _parse_card(Path(CARD), data)
    except (CorruptFile, InvalidInput, TypeError) as error:
        raise InvalidInput(
            f"the model cannot be saved, since it could not be loaded again ({error!s:.200}): "
            f"nothing was written; train it with the name and the parameters put right"
        ) from None
    return data


def _parse_card(file: Path, data: bytes) -> Card:
    try:
        found = parse_json(data)
        version = found.get("format") if isinstance(found, dict) else None
        if type(version) is not int or version < 1:
            raise InvalidInput(
                "not the card of a model of products (models of kernels and of scaled products "
                "rank nothing else)"
            )
        if version > FORMAT:
            raise WrongVersion(
                f"{file}: format {version}, this release reads up to {FORMAT}; upgrade costmodel"
            )
        card = decode(found, Card)
        card.target.check_figures()
        if not card.files.keys() >= {*HEADS.values()}:
            raise InvalidInput(f"files: expected both heads, {[*HEADS.values()]}, among them")
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
    return card


def read_part(file: Path, expected_hash: str = "") -> bytes:
    """Read a small file of a model.

    Raises:
        CorruptFile: not there, no regular file, or not that of the card.
        FileError: it cannot be read.
    """
    with file_errors(file):
        try:
            data = read_small_file(file)
        except FileNotFoundError:
            raise CorruptFile(
                f"{file.parent}: not a model directory, {file.name} is not there"
            ) from None
    if expected_hash and digest(data) != expected_hash:
        raise CorruptFile(f"{file}: not that of {CARD}; save or train the model again")
    return data
