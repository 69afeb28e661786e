"""Speed that each model's ranking keeps on the held-out workloads; needs no GPU.

Writes ``evaluate-<target>.json`` from recorded timings. The file holds what ``costmodel evaluate``
prints, and nvMatmulHeuristics if it is installed.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from common import Results, Row, at_exit_code, find_model, note, recorded_torch, versions
from peers import NvMatmulHeuristics

from costmodel.data.dataset import Dataset
from costmodel.errors import NoModel
from costmodel.evaluation.evaluate import evaluate
from costmodel.evaluation.heldout import eval_list
from costmodel.gemm.workload import Workload
from costmodel.reports.comparison import compared_models
from costmodel.tuning.shipped import recording


def summarize(rows: list[Row]) -> Row:
    """The model's figures, and those of the hand-weighted score that it is to replace."""
    by_name = {row["name"]: row for row in rows}
    summary: Row = {"model": rows[0]["name"], "workloads": rows[0]["workloads"],
                    "of_eval_list": len(eval_list())}  # fmt: skip
    for prefix, name in (("", rows[0]["name"]), ("ptx_score_", "ptx-score")):
        for k in ("1", "8"):
            kept = by_name[name]["regret"][k]
            summary[f"{prefix}top{k}_geomean_pct"] = kept["geomean_pct"]
            summary[f"{prefix}top{k}_worst_pct"] = kept["worst_pct"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    model = find_model(args.model, dataset.target)
    models, left_out = compared_models(dataset, model)
    peer, reasons = NvMatmulHeuristics(), [left_out]
    try:
        peer.propose(Workload.dense(1024, 1024, 1024), dataset.target)
        models.append(peer)
    except NoModel as error:
        reasons.append(str(error))
    if left_out := "; ".join(filter(None, reasons)):
        note(f"left out: {left_out}")
    software = versions(
        dataset.target, torch=recorded_torch(dataset), model=f"{model.name} {model.hash}"
    )
    if peer in models:
        software["nvMatmulHeuristics"] = version("nvidia-matmul-heuristics")
    results = Results("evaluate", dataset.target, args.results, software, summarize)
    results.add(*evaluate(dataset, models, dataset.target))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
