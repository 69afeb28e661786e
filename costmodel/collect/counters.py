"""Hardware counters of a few rows, by Nsight Compute, beside the PTX counts of their binaries.

Nsight Compute (``ncu``) runs this file as a program. The program launches each of these rows once,
and prints the recorded facts of the row as a line of JSON. ncu prints the counters as a line of
CSV.
"""

import json
import sys
from csv import DictReader
from pathlib import Path
from subprocess import run

from costmodel.collect import best_recorded
from costmodel.data.dataset import Dataset
from costmodel.errors import MissingData
from costmodel.files import write_json
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.launch.problem import GemmProblem

_METRICS = (
    "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors.sum,"
    "lts__t_sector_hit_rate.pct,smsp__inst_executed.sum,launch__registers_per_thread,"
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,"
    "sm__warps_active.avg.pct_of_peak_sustained_active"
)
_NCU = f"ncu --csv --page raw --print-units base --kernel-name regex:^gemm_ --metrics {_METRICS}"


def record_counters(folder: Path) -> None:
    """Count what a few rows of a dataset do in hardware; write ``counters.json`` into its folder.

    Counters are in their base units, such as bytes and nanoseconds. A counter that the card lacks
    is left out.

    Raises:
        MissingData: ncu did not count, for example because it lacks the permission.
    """
    program = [sys.executable, "-m", __name__, str(folder)]
    done = run([*_NCU.split(), *program], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    rows = [json.loads(line) for line in lines if line[:1] == "{"]
    counted = [x for x in DictReader(line for line in lines if line[:1] == '"') if x["ID"]]
    if not rows or len(rows) != len(counted):
        told = [line for line in lines if "==ERROR==" in line] or lines[-1:]
        raise MissingData(
            f"ncu has counted {len(counted)} of {len(rows)} rows, the best of workloads from "
            f"16 MiB on: {' '.join(told)}"
        )
    for row, counters in zip(rows, counted):
        # ncu adds about 350 counters that were not asked for.
        texts = {name: counters.get(name, "").replace(",", "") for name in _METRICS.split(",")}
        row |= {name: float(x) for name, x in texts.items() if x[:1].isdigit()}
    write_json(folder / "counters.json", rows)


def launch_each(dataset: Dataset) -> None:
    """Launch the best of a few large workloads once each; print a line of JSON about each."""
    import torch

    def draw(dtype: str, elements: int) -> torch.Tensor:
        return torch.randn(elements, dtype=getattr(torch, dtype), device="cuda")

    known, target = dataset.artifacts(), dataset.target
    for job, us in best_recorded(dataset).items():
        problem, (config,) = GemmProblem(job.workload), job.configs
        problem.launcher(config, target, 0, 0, {})(*problem.operands(draw, 1))
        torch.cuda.synchronize()
        ptx = known[artifact_key(specialize(job.workload, config), target)].ptx
        row = {"workload": job.workload.key(), "config": str(config), "latency_us": us, **ptx}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    launch_each(Dataset.open(sys.argv[1]))
