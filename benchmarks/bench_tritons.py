"""How much speed the ranking keeps when its features come from another Triton than the timings.

The timings stay those that were recorded. The PTX head sees what each Triton with a shipped table
makes of the same configurations, beside what it was trained on and the head that sees none of it.
Judged by the aligned eval workloads in float16, all operands row-major. Needs no GPU, compiles
nothing; writes ``tritons-<target>.json``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np
from common import Results, Row, at_exit_code, find_model, note, recorded_torch, versions
from numpy.typing import NDArray

from costmodel.data.artifact_files import class_specs, read_tables, table_path
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset
from costmodel.errors import MissingData
from costmodel.evaluation.evaluate import evaluate
from costmodel.evaluation.heldout import is_ragged
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import XgbCostModel, model_directory
from costmodel.reports.comparison import ConfigOnly
from costmodel.tuning.shipped import recording

CODE = Workload.dense(4096, 4096, 4096).code


class SeenBy:
    """A learned model that is shown the binaries of one toolchain, whichever the timings are of."""

    kind = "learned"
    predicts_latency = True

    def __init__(self, model: XgbCostModel, toolchain: Toolchain, table: ArtifactTable) -> None:
        self._model, self._toolchain, self._table = model, toolchain, table
        self.name = f"PTX head, Triton {toolchain.triton}"
        self.asked = self.known = 0

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Latency in us of each candidate, float64 [n]."""
        made_by = Target(target.device, self._toolchain)
        keys = [artifact_key(specialize(workload, c), made_by) for c in candidates.configs]
        seen = self._table.find(keys)
        self.asked += len(seen)
        self.known += sum(a is not None and a.ok for a in seen)
        # What this Triton cannot compile is shown as not known: it was timed, so it is ranked.
        ok = [a if a is not None and a.ok else None for a in seen]
        return self._model.predict(workload, Candidates.of(candidates.configs, ok), target)


def shipped_tables(folder: Path, target: Target) -> dict[Toolchain, ArtifactTable]:
    """The further tables beside a model, the oldest Triton first."""
    name = re.compile(r"artifacts-triton-([0-9.]+)-ptxas-([0-9.]+)\.parquet")
    found = filter(None, (name.fullmatch(path.name) for path in folder.iterdir()))
    toolchains = sorted(
        (Toolchain(match[1], match[2]) for match in found),
        key=lambda t: [int(part or 0) for part in t.triton.split(".")],
    )
    return {
        toolchain: ArtifactTable(
            read_tables([table_path(folder, toolchain)], Target(target.device, toolchain))
        )
        for toolchain in toolchains
        if toolchain != target.toolchain
    }


def same_share(
    table: ArtifactTable, toolchain: Toolchain, base: ArtifactTable, target: Target, code: CodeClass
) -> float | None:
    """The share of a class's binaries, in percent, whose PTX is that of the first toolchain."""
    other = Target(target.device, toolchain)
    pairs = [
        (base.get(artifact_key(spec, target)), table.get(artifact_key(spec, other)))
        for spec in class_specs(code, target)
    ]
    both = [(a, b) for a, b in pairs if a is not None and b is not None and a.ok and b.ok]
    if not both:
        return None
    return round(100 * sum(a.ptx_hash == b.ptx_hash for a, b in both) / len(both), 1)


def summarize(rows: list[Row]) -> Row:
    """What the features of another Triton cost, at worst."""
    heads = {row["features_of"]: row for row in rows if row["features_of"] != "none"}
    own, *others = heads.values()
    blind = next(row for row in rows if row["features_of"] == "none")
    summary: Row = {"workloads": own["workloads"], "timed_with": own["features_of"]}
    for k in ("1", "8"):
        kept = {name: row["regret"][k]["geomean_pct"] for name, row in heads.items()}
        summary[f"top{k}_geomean_pct"] = kept[own["features_of"]]
        summary[f"other_tritons_least_top{k}_geomean_pct"] = min(
            (kept[row["features_of"]] for row in others), default=None
        )
        summary[f"config_only_top{k}_geomean_pct"] = blind["regret"][k]["geomean_pct"]
    return summary


def rows_of(
    dataset: Dataset, model: XgbCostModel, tables: dict[Toolchain, ArtifactTable]
) -> list[Row]:
    """An entry of ``evaluate`` for each toolchain, and one for the configuration-only head."""
    target = dataset.target
    wanted = {w for w in dataset.workloads("eval") if w.code == CODE and not is_ragged(w)}
    if not wanted or model.artifacts is None:
        raise MissingData(f"{dataset.path} or its model lacks the class {CODE.key()}")
    all_tables = {target.toolchain: model.artifacts, **tables}
    heads = [SeenBy(model, toolchain, table) for toolchain, table in all_tables.items()]
    entries = evaluate(dataset, [*heads, ConfigOnly(model)], target, wanted)
    rows: list[Row] = []
    for head, (toolchain, table), entry in zip(heads, all_tables.items(), entries, strict=False):
        shares = {
            "known_pct": round(100 * head.known / head.asked, 1),
            "same_ptx_pct": same_share(table, toolchain, model.artifacts, target, CODE),
        }
        rows.append({"features_of": toolchain.triton, "ptxas": toolchain.ptxas, **shares, **entry})
    blind = entries[len(heads)] | {"name": "configuration-only head"}
    return [*rows, {"features_of": "none", "ptxas": None, "known_pct": 0, "same_ptx_pct": None,
                    **blind}]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    parser.add_argument("--tables", type=Path, help="folder of tables; default: the shipped ones")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    model = find_model(args.model, dataset.target)
    folder = args.tables or args.model or model_directory(dataset.target)
    tables = shipped_tables(folder, dataset.target) if folder else {}
    if not tables:
        note(f"no table of another Triton in {folder}: `costmodel compile --table` makes one")
    software = versions(
        dataset.target, torch=recorded_torch(dataset), model=f"{model.name} {model.hash}"
    )
    results = Results("tritons", dataset.target, args.results, software, summarize)
    results.add(*rows_of(dataset, model, tables))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
