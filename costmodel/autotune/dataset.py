"""A dataset of kernels' timings: a model of any Triton kernel is trained and judged on it.

::

    datasets/kernels-h200-sxm/
      card.json          device, toolchain, protocol; kernels and packages, with counts
      timings.parquet    one row for each kernel, key and configuration

``costmodel kernels record`` makes it from the timings that tuning has kept
(:mod:`costmodel.autotune.store`). A *list* is all configurations that were timed for one kernel
under one key.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from math import nan, prod
from operator import itemgetter, mul
from pathlib import Path
from re import findall
from typing import Any, Literal, Self

from costmodel.arrays import ArrowSchema, ArrowTable
from costmodel.autotune.store import KernelEntry
from costmodel.compile.ptx import PTX_FEATURES, PTX_SCHEMA
from costmodel.data.shards import CARD, Identity, read_shards, require_place, text_type, write_shard
from costmodel.errors import InvalidInput, MissingData
from costmodel.files import Named, file_errors, make_folder, read_json, write_json
from costmodel.hardware.target import Target, Toolchain, known_device

# --- Which kernels may be learned from ------------------------------------------------------------

_OF_FLA = """gla gated_delta_rule delta_rule simple_gla retention rwkv6 hgrn based linear_attn
gated_delta_product generalized_delta_rule common utils"""
LEARNED_FROM = (*(f"fla.ops.{name}." for name in _OF_FLA.split()), "fla.modules.")
"""Exceptions to :data:`NEVER`: modules whose kernels the shipped model learns from."""

_OF_OTHERS = "fla.ops.abc. fla.ops.gsa. fla.ops.nsa. fla.ops.ttt. liger_kernel. gemlite."
HELD_OUT = tuple(_OF_OTHERS.split())
"""Modules whose kernels are timed to judge models with."""

NEVER = (
    "fla.", "vllm.",
    # Copies of kernels of those two, and kernels of RWKV-7.
    *(f"flag_gems.fused.{x}." for x in ("FLA", "fused_moe", "rwkv_ka_fusion", "rwkv_mm_sparsity")),
)  # fmt: skip
"""Modules whose kernels are in no dataset, except those above: others judge costmodel by them."""


def role_of(module: str) -> Literal["train", "eval"] | None:
    """Return the role of a module's kernels, or of one kernel by its full name; None: no dataset.

    Models may learn from kernels of modules that are not named above.
    """
    name = f"{module}."
    if name.startswith(HELD_OUT):
        return "eval"
    return None if name.startswith(NEVER) and not name.startswith(LEARNED_FROM) else "train"


# --- Columns --------------------------------------------------------------------------------------

_OPERATIONS = """tt.load tt.store tt.dot tt.dot_scaled tt.reduce tt.scan tt.addptr tt.splat
tt.broadcast tt.expand_dims tt.reshape tt.trans tt.gather tt.atomic_rmw tt.atomic_cas
tt.make_tensor_ptr tt.descriptor_load tt.descriptor_store tt.elementwise_inline_asm scf.for scf.if
scf.while math.exp math.exp2 math.log math.sqrt math.rsqrt arith.addf arith.subf arith.mulf
arith.divf arith.cmpf arith.maxnumf arith.addi arith.muli arith.divsi arith.remsi arith.cmpi
arith.select arith.xori arith.truncf arith.extf arith.sitofp"""
TTIR_OPERATIONS = tuple(_OPERATIONS.split())
"""Operations of TTIR that are counted, each in a column with its name."""

_TEXTS = "list kernel package role key arguments config status"
_TIMES = "latency_us p10_us p90_us repeats"
_KNOWN = """num_warps num_stages num_ctas maxnreg grid_0 grid_1 grid_2 registers spill_bytes
shared_bytes compile_s tensors tensor_bytes largest_elements widest_bytes"""

FEATURES = (*_KNOWN.split(), *(f"ptx_{name}" for name in PTX_FEATURES), *TTIR_OPERATIONS)
"""Columns of numbers that are known before a timing, float32; NaN: unknown."""

_FILE = "timings.parquet"
_HEADER: Named = {"kernel_schema": 1, "ptx_schema": PTX_SCHEMA}
_PROTOCOL = {"timing": "cold L2, warm clock, device events"}
_NOTHING: Named = {}
_place = itemgetter("device", "sm_count", "triton", "ptxas")  # of a key


@dataclass(frozen=True)
class KernelDataset:
    """Timings of kernels on one device with one toolchain.

    Attributes:
        identity: device, toolchain and protocol of all rows.
        rows: an Arrow table of :meth:`schema`, a row for each list and configuration: ``list``
            (kernel and hash of the key), ``kernel`` (full name), ``package`` (with its version),
            ``role``; ``key``, ``arguments`` and ``config`` as JSON; ``widened`` (not in the
            kernel's own list of configurations); the measurement; :data:`FEATURES`.
    """

    identity: Identity
    rows: ArrowTable

    @staticmethod
    def schema() -> ArrowSchema:
        """Return the columns of the rows."""
        import pyarrow as pa

        texts = dict.fromkeys(_TEXTS.split(), text_type())
        numbers = dict.fromkeys((*_TIMES.split(), *FEATURES), pa.float32())
        return pa.schema(texts | {"widened": pa.bool_()} | numbers)

    @classmethod
    def of(
        cls,
        entries: Sequence[KernelEntry],
        packages: dict[str, str] = _NOTHING,
        listed: Mapping[str, Collection[str]] = _NOTHING,
        base: Self | None = None,
    ) -> Self:
        """Make a dataset of the entries of one store, or of several.

        Args:
            entries: entries of one device and toolchain are taken: those of ``base``, or without
                it those of the entry that was tuned last.
            packages: name and version of packages that are not installed here, by the name that
                is imported: ``{"fla": "fla-core 0.6.0"}``. Lists in ``base`` keep their package.
            listed: names of the configurations in a kernel's own list, by full name of the
                kernel; needed for kernels that were tuned over a wider list.
            base: a dataset whose rows stay, except those that were timed again.

        Raises:
            MissingData: no timings. InvalidInput: timings of a kernel of :data:`NEVER`, or of a
                device that is not known here.
        """
        import pyarrow as pa

        found = base.rows.to_pylist() if base else []
        if not (found or entries):
            raise MissingData("no timings of kernels: tune some first (docs/own-kernels.md)")
        key = json.loads(found[0]["key"]) if found else max(entries, key=lambda e: e.when).key
        identity = base.identity if base else Identity(_target(*_place(key)), _PROTOCOL)
        lists = {row["list"]: row["package"] for row in found}
        names = {row["kernel"].split(".")[0]: row["package"] for row in found}
        names |= _installed() | packages
        for entry in entries:
            if _place(entry.key) == _place(key):
                kernel = entry.key["name"]
                package = lists.get(entry.path.stem) or names.get(kernel.split(".")[0], "")
                found.extend(_rows(entry, package, listed.get(kernel, entry.measured)))
        rows = {(row["list"], row["config"]): row for row in found}
        table = pa.Table.from_pylist([rows[place] for place in sorted(rows)], cls.schema())
        return cls(identity, table)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a dataset; this runs no code.

        Raises:
            CorruptFile: a damaged or foreign file. WrongVersion: of a schema that this release does
                not read. MixedData: rows of another target or protocol than the card's.
            FileError: a file is missing, or cannot be read.
        """
        card, file = folder / CARD, folder / _FILE
        with file_errors(card):
            identity = Identity.from_dict(read_json(card), card)
        with file_errors(file):
            return cls(identity, read_shards([file], cls.schema(), identity, **_HEADER))

    @classmethod
    def read_all(cls, folders: Sequence[Path]) -> Self:
        """Read datasets of one device, toolchain and protocol as one.

        Raises:
            MixedData: they are of several. Others as :meth:`read`.
        """
        import pyarrow as pa

        first, *others = map(cls.read, folders)
        for folder, other in zip(folders[1:], others):
            first.identity.require_same(other.identity, folder)
        return cls(first.identity, pa.concat_tables([first.rows, *(o.rows for o in others)]))

    def write(self, folder: Path) -> None:
        """Write the dataset, in place of one that is there.

        Raises:
            FileError: something else is there, or it cannot be written.
        """
        require_place(folder, "dataset of kernels")
        with file_errors(folder):
            make_folder(folder)
            write_shard(folder / _FILE, self.rows, self.identity, **_HEADER)
            write_json(folder / CARD, self.card())

    def card(self) -> Named:
        """Return the content of ``card.json``: identity, drivers, packages and kernels."""
        keys = map(json.loads, self.rows.column("key").unique().to_pylist())
        return {
            **self.identity.to_dict(),
            **_HEADER,
            "drivers": sorted({key["driver"] for key in keys}),
            "packages": self._counts("package"),
            "kernels": self._counts("package", "kernel", "role"),
        }

    def _counts(self, *names: str) -> list[Named]:
        """Count kernels, lists and rows for each value of some columns."""
        totals = [("kernel", "count_distinct"), ("list", "count_distinct"), ("config", "count")]
        found = self.rows.group_by(names, use_threads=False).aggregate(totals)
        return found.rename_columns([*names, "kernels", "lists", "rows"]).to_pylist()


# --- Rows -----------------------------------------------------------------------------------------


def _target(product: str, sm_count: int, triton: str, ptxas: str) -> Target:
    """Return a target; its device is in the table of known ones, or is this machine's."""
    device = known_device(product, sm_count) or Target.current().device
    if device.product != product:
        raise InvalidInput(f"timings on a {product}: make the dataset on a machine that has one")
    return Target(device, Toolchain(triton, ptxas))


def _installed() -> dict[str, str]:
    """Return name and version of each installed package, by the name that is imported."""
    found = metadata.packages_distributions()
    return {top: f"{min(names)} {metadata.version(min(names))}" for top, names in found.items()}


def _rows(entry: KernelEntry, package: str, own: Collection[str]) -> Iterator[Named]:
    """Make the rows of one list.

    Args:
        own: names of the configurations in the kernel's own list.
    """
    kernel = entry.key["name"]
    role = role_of(kernel)
    if role is None:
        raise InvalidInput(f"{kernel}: no dataset may hold its timings (NEVER in {__name__})")
    texts = {
        "list": entry.path.stem, "kernel": kernel, "package": package, "role": role,
        "key": json.dumps(entry.key), "arguments": json.dumps(entry.arguments),
    }  # fmt: skip
    for config, measurement in entry.measured.items():
        about = {"config": config, "widened": config not in own} | asdict(measurement)
        yield texts | about | numbers(config, entry.arguments, entry.binaries.get(config, {}))


def numbers(
    config: str, arguments: Mapping[str, Any], binary: Mapping[str, Any]
) -> dict[str, float]:
    """Return :data:`FEATURES` of a configuration, from its name and the facts in the store.

    Args:
        binary: as in the store; before compiling only ``grid`` and ``ttir``, or empty.
    """
    grid = [*(binary.get("grid") or [nan] * 3), 1, 1]
    found = {
        **json.loads(config), **_sizes(arguments), **binary,
        **{f"grid_{i}": size for i, size in enumerate(grid)},
    }  # fmt: skip
    for part, names, start in (("ttir", TTIR_OPERATIONS, ""), ("ptx", PTX_FEATURES, "ptx_")):
        if (counts := binary.get(part)) is not None:  # the counts do not contain zeros
            found |= {f"{start}{name}": counts.get(name, 0) for name in names}
    return {name: nan if (x := found.get(name)) is None else float(x) for name in FEATURES}


def _sizes(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the tensors, from their types and shapes."""
    tensors = [value for value in arguments.values() if isinstance(value, list)]
    elements = [prod(shape) for _, shape in tensors]
    # The first number in the name of a type is its bits. A bool has none, and takes a byte.
    widths = [int((findall(r"\d+", dtype) or [8])[0]) // 8 or 1 for dtype, _ in tensors]
    return {
        "tensors": len(tensors),
        "tensor_bytes": sum(map(mul, elements, widths)),
        "largest_elements": max(elements, default=0),
        "widest_bytes": max(widths, default=0),
    }
