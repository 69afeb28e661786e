"""The whole way to a product by a model of your own: collect, train, save, tune, matmul.

No shipped model may help: if there is one, the script runs itself again on a copy of the package
that has none. Exit code 0 says that the model just trained answered (its name and hash agree), and
that the products agree with torch in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import costmodel
from costmodel.errors import CostModelError

if TYPE_CHECKING:
    import torch

    from costmodel.tuning.tuning_result import TuningResult

NAME = "own"
SIZES = ((1024, 4096, 2048), (1000, 3000, 1000))


def copy_without_models(folder: Path) -> Path:
    """Copy the package to a folder, its kernels but not its models; returns the folder."""
    package = Path(costmodel.__file__).parent
    ignored = shutil.ignore_patterns("_models", "__pycache__")
    shutil.copytree(package, folder / "costmodel", ignore=ignored)
    return folder


def collect(path: Path, workloads: int, configs: int, budget_s: float) -> dict[str, Any]:
    """Time a few configurations of a few workloads; return how many, with their statuses."""
    import numpy as np

    from costmodel.collect import Job
    from costmodel.collect import collect as run_jobs
    from costmodel.collect.sampling import RandomSampler, training_workloads
    from costmodel.data.dataset import Dataset
    from costmodel.gemm.space import SearchSpace
    from costmodel.measure.card import current_run
    from costmodel.measure.device import DeviceRunner

    target = costmodel.Target.current()
    rng, sampler = np.random.default_rng(0), RandomSampler(configs)
    jobs = [
        Job(w, tuple(sampler.sample(SearchSpace.of(w, target), rng)))
        for w in training_workloads(workloads, target)
    ]
    with DeviceRunner() as runner:
        dataset = Dataset.create(path, target, runner.protocol.to_dict())
        progress = run_jobs(jobs, dataset, runner, current_run(), budget_s=budget_s)
    return {"workloads": progress.jobs_done, "rows": progress.rows, "statuses": progress.statuses}


def worst_error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return how far c is off a @ b in float64, and how far it may be; NaN counts as infinity."""
    expected = a.double() @ b.double()
    error = (c.double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
    return error, 2e-3 * expected.abs().max().item()


def multiply(m: int, n: int, k: int, model: Path | None) -> tuple[dict[str, Any], TuningResult]:
    """Multiply once, by the model at a path or by the one in use."""
    import torch

    torch.manual_seed(0)
    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    c = costmodel.matmul(a, b, model=model)
    error, allowed = worst_error(c, a, b)
    result = costmodel.result_for(a, b, model=model)
    assert result is not None, "matmul was called with these operands"
    row = {"workload": f"{m}x{n}x{k}", "worst_error": error, "allowed": allowed, **told(result)}
    return row, result


def told(result: TuningResult) -> dict[str, Any]:
    """Return what a result says about how it was found."""
    return {
        "model": result.model, "model_hash": result.model_hash, "mode": result.mode,
        "source": result.source, "chosen": str(result.chosen), "why": result.why,
        "timed": result.costs.timed, "compiled": result.costs.compiled,
        "seconds": round(result.costs.total_s, 2),
    }  # fmt: skip


def failures_of(
    steps: dict[str, dict[str, Any]], trained_hash: str, shipped: list[str]
) -> list[str]:
    """List what is wrong: another model answered, or a product is off."""
    failures = [f"a shipped model is visible: {name}" for name in shipped]
    for step, row in steps.items():
        if (row["model"], row["model_hash"]) != (NAME, trained_hash):
            failures.append(f"{step}: answered by {row['model']} {row['model_hash']}")
        if "worst_error" in row and not row["worst_error"] <= row["allowed"]:
            failures.append(f"{step}: off by {row['worst_error']:g}, allowed {row['allowed']:g}")
    return failures


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Go the whole way; return a report whose ``failures`` are empty if all is well."""
    from costmodel.models import shipped_models

    start = time.monotonic()
    data, path = folder / "data", folder / "model"
    collected = collect(data, args.workloads, args.configs, args.budget_s)
    trained = costmodel.train(data, name=NAME)
    trained.save(path)
    tuned = costmodel.tune(*SIZES[0], model=path)
    by_path, _ = multiply(*SIZES[0], path)
    costmodel.use(path)
    in_use, _ = multiply(*SIZES[1], None)
    steps = {"tune(model=path)": told(tuned), "matmul(model=path)": by_path, "use(path)": in_use}
    return {
        "device": costmodel.Target.current().device.product,
        "package": costmodel.__file__,
        "collected": collected,
        "trained": {"name": trained.name, "hash": trained.hash},
        **steps,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures_of(steps, trained.hash, list(shipped_models())),
    }


def show(report: dict[str, Any]) -> None:
    """Print the report for people."""
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"    {key}: {item}")
        elif name != "failures":
            print(f"{name}: {value}")
    for failure in report["failures"]:
        print(f"FAILED: {failure}")
    if not report["failures"]:
        print("the model just trained answered, and the products agree with torch in float64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=12)
    parser.add_argument("--configs", type=int, default=60)
    parser.add_argument("--budget-s", type=float, default=60.0, help="of collecting")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from costmodel.models import shipped_models

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if shipped_models():
            print("a model is shipped: going on with a copy without it", file=sys.stderr)
            paths = [str(copy_without_models(folder)), *filter(None, [os.getenv("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, __file__, *sys.argv[1:]]
            return subprocess.run(command, env=environment, check=False).returncode
        # Winners of earlier runs must not answer, and those of this run must not stay.
        os.environ["COSTMODEL_CACHE_DIR"] = str(folder / "winners")
        try:
            report = run(folder, args)
        except CostModelError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
