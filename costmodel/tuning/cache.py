"""Folders of the cache: where files are, and what happens where none can be written."""

import re
import threading
import warnings
from pathlib import Path

from costmodel.errors import InvalidInput
from costmodel.files import CACHE_VARIABLE, cache_directory, digest


class CacheFolder:
    """A folder of results. If it cannot be used: one warning, and no more is written there.

    Args:
        directory: default: one in :func:`cache_directory`, looked up when it is used.
        name: the name of the default one.
    """

    def __init__(self, directory: str | Path | None = None, name: str = ""):
        self._named = None if directory is None else Path(directory)
        self._name = name
        self._gave_up = False
        self._lock = threading.Lock()

    @property
    def path(self) -> Path | None:
        """The directory, which may not exist yet; None where there can be none."""
        try:
            return self._named or cache_directory() / self._name
        except InvalidInput as error:
            self._give_up(error)
            return None

    def files(self, pattern: str) -> list[Path]:
        """The files whose names fit a pattern."""
        return sorted(self.path.glob(pattern)) if self.path else []

    def _give_up(self, error: object) -> None:
        with self._lock:
            first, self._gave_up = not self._gave_up, True
        if first:
            warnings.warn(
                f"the cache cannot be used, so what is found lasts for this process only: {error} "
                f"({CACHE_VARIABLE}=DIR names another directory)",
                RuntimeWarning,
                stacklevel=4,
            )


def file_stem(name: str, key: str) -> str:
    """Return the name of a key's file, without its ending: readable, and then the key's hash."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[-80:]}-{digest(key, 20)}"
