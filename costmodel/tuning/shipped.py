"""Finds recorded datasets: those of a checkout of the repository, else the wheel's sample."""

import re
from pathlib import Path

from costmodel.errors import MissingData, UnknownTarget

_PACKAGE = Path(__file__).resolve().parents[1]


def checkout(name: str) -> Path:
    """A top-level folder of a checkout of the repository.

    Raises:
        MissingData: costmodel is installed without its repository, or the folder is not there.
    """
    folder = _PACKAGE.parent / name
    if not ((_PACKAGE.parent / "pyproject.toml").is_file() and folder.is_dir()):
        raise MissingData(
            f"no folder {folder}: {name}/ does not come with the installed package; run "
            f"costmodel from a checkout of its repository (pip install -e .), or name a folder of "
            f"your own"
        )
    return folder


def recording(device: str, *, sample: bool = True) -> Path:
    """The dataset recorded on a device: the whole one of a checkout, else the wheel's sample.

    Args:
        device: short name, such as ``h100-sxm``.
        sample: accept the sample too; it has a few workloads to replay and no others.

    Raises:
        MissingData: neither is there. UnknownTarget: ``device`` is no short name, such as a path.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", device):
        raise UnknownTarget(f"target {device!r}: expected a short name, such as h100-sxm")
    places = [_PACKAGE / "_models" / device / "replay"] * sample
    try:
        places.insert(0, checkout("datasets") / device)
    except MissingData as error:
        if not sample:
            raise MissingData(f"the dataset of {device} is not here; {error}") from None
    found = next((path for path in places if (path / "card.json").is_file()), None)
    if found is None:
        raise MissingData(
            f"nothing was recorded on {device}: expected a dataset at "
            f"{' or '.join(map(str, places))}; name another with `--data DIR`"
        )
    return found
