"""Rows of Arrow tables: numbered, sorted, and checked alike when written and when read."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from costmodel.arrays import ArrowSchema, ArrowTable, Integers, Mask
from costmodel.errors import CostModelError, InvalidInput
from costmodel.files import Named

Faults = Callable[[ArrowTable], Mapping[str, Mask]]
"""Marks the rows of a table that cannot be used, bool [rows], by what was expected of them."""


def lay_out(rows: Sequence[Named], schema: ArrowSchema, faults: Faults) -> ArrowTable:
    """Lay out rows as an Arrow table.

    Raises:
        InvalidInput: a value that its column cannot hold, or a row that reading would leave out.
    """
    import pyarrow as pa

    columns, told = [], ""
    for field in schema:
        try:
            columns.append(pa.array([row[field.name] for row in rows], field.type))
            told = "None" if columns[-1].null_count and not field.nullable else ""
        except (TypeError, ValueError, OverflowError) as error:
            told = f"{error!s:.200}"
        if told:
            raise _refusal(f"{field.name} as {field.type}: {told}")
    table = pa.Table.from_arrays(columns, schema=schema)
    for expected, bad in faults(table).items():
        for row in table.filter(bad).slice(0, 1).to_pylist():
            raise _refusal(f"{expected}, found {row!s:.600}")
    return table


def _refusal(told: str) -> InvalidInput:
    return InvalidInput(
        f"a row that cannot be recorded: expected {told}: mend what measured it, or leave it out"
    )


def leave_out(
    rows: ArrowTable, faults: Faults, files: Sequence[Path], counts: Sequence[int]
) -> ArrowTable:
    """Return the rows that can be used, with one warning if there are others.

    Args:
        files, counts: the files that the rows come from, in order, and how many rows of each.
    """
    found = {expected: bad for expected, bad in faults(rows).items() if bad.any()}
    if not found:
        return rows
    bad = np.logical_or.reduce([*found.values()])
    names = np.repeat([*map(str, files)], counts)[bad]
    places = [f"{count} of {name}" for name, count in Counter(names.tolist()).most_common(4)]
    warnings.warn(
        f"rows that cannot be used are left out: {', '.join(places)}; expected "
        f"{'; '.join(found)}: restore the file from a copy, or collect these rows again",
        RuntimeWarning,
        stacklevel=2,
    )
    return rows.filter(~bad).combine_chunks()


def refused(table: ArrowTable, names: Sequence[str], make: Callable[[Named], object]) -> Mask:
    """Mark the rows whose values ``make`` refuses with a CostModelError, bool [rows]."""

    def fails(values: Named) -> bool:
        try:
            make(values)
        except CostModelError:
            return True
        return False

    index, distinct = number_rows(table, names)
    return np.array([*map(fails, distinct)], dtype=bool)[index]


def number_rows(table: ArrowTable, names: Sequence[str]) -> tuple[Integers, list[Named]]:
    """Number the distinct values of some columns, in the order in which they first appear.

    Returns:
        (index, values): int64 [rows], and the values of the columns for each number.
    """
    import pyarrow as pa

    rows = table.select(names).append_column("row", pa.array(np.arange(len(table))))
    groups = rows.group_by(names).aggregate([("row", "list"), ("row", "min")]).sort_by("row_min")
    members = groups.column("row_list").combine_chunks()
    index = np.empty(len(table), dtype=np.int64)
    numbers = np.arange(len(groups))
    index[members.flatten().to_numpy()] = np.repeat(numbers, members.value_lengths().to_numpy())
    return index, groups.select(names).to_pylist()


def sort_rows(table: ArrowTable, names: Sequence[str]) -> ArrowTable:
    """Sort rows by the given columns, ascending."""
    import pyarrow as pa
    from pyarrow import compute

    columns = (table.column(name) for name in names)
    keys = {  # Arrow does not sort by a dictionary
        name: column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for name, column in zip(names, columns)
    }
    order = [(name, "ascending") for name in names]
    return table.take(compute.sort_indices(pa.table(keys), sort_keys=order))
