"""The CSV file of ``costmodel collect --shapes``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from costmodel.cli import output
from costmodel.errors import InvalidInput, MissingData
from costmodel.files import file_errors
from costmodel.gemm.workload import MOST, Workload
from costmodel.validation import one_line


def read_shapes(path: Path) -> list[tuple[int, int, int]]:
    """Read sizes (m, n, k) from a CSV file with the columns m, n and k; ignore other columns.

    Raises:
        MissingData: no such file. InvalidInput: a column or a row is missing, or holds no size.
        FileError: it cannot be read.
    """
    if not path.is_file():
        raise MissingData(f"no file {path}: expected a CSV with the columns name,m,n,k")
    with file_errors(path), path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            lacking = [name for name in "mnk" if name not in (rows.fieldnames or ())]
            if lacking:
                raise InvalidInput(f"no column {', '.join(lacking)}: expected m, n and k by name")
            found = [(_size(row, "m"), _size(row, "n"), _size(row, "k")) for row in rows]
        except UnicodeDecodeError:  # read ahead: the line is not known
            raise InvalidInput(f"{path}: expected a CSV in UTF-8, found other bytes") from None
        except (InvalidInput, csv.Error) as error:
            line = max(rows.reader.line_num, 1)
            raise InvalidInput(f"{path}, line {line}: {one_line(error)}") from None
    if not found:
        raise InvalidInput(f"{path}: no row under its header: expected a product in each")
    return found


def _size(row: dict[str, str | None], name: str) -> int:
    """Return one size of a row, which may be shorter than the header."""
    text = (row[name] or "").strip()
    # int() takes more than digits, and refuses thousands of them in words of its own.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= MOST):
        raise InvalidInput(f"{name}={text!r:.40}: expected a whole number from 1 to {MOST}")
    return int(text)


def not_held_out(shapes: Path, workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads that may be trained on, and tell people how many others there are.

    Raises:
        InvalidInput: all are held out.
    """
    from costmodel.evaluation.heldout import HELD_OUT, is_held_out

    found = [w for w in workloads if not is_held_out(w)]
    left_out = len(workloads) - len(found)
    why = f"{HELD_OUT} (docs/protocol.md), so that no model may learn from them"
    if not found:
        raise InvalidInput(
            f"{shapes}: all {left_out} workloads are {why}: expected others, or `--role eval` to "
            f"judge by them"
        )
    if left_out:
        output.note(f"{left_out} of {len(workloads)} workloads left out: {why}")
    return found
