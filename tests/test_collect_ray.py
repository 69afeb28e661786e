"""A collection on a Ray cluster of four nodes, one of which is lost; skipped without Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from kernel_replay import collect_on_cpu
from made_up_recording import TARGET, write_recording
from test_bundle import SCRIPT, timings
from test_collect_parts import command, rows_of

from costmodel.autotune.bundle import collect_kernels, merge_kernels, write_kernel_bundle
from costmodel.collect import Job, ray_engine
from costmodel.collect.bundle import pack, unpack, write_bundle
from costmodel.collect.parts import merge, part_of, recorded_jobs
from costmodel.collect.ray_engine import collect_on_ray
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity
from costmodel.errors import NoGpu
from costmodel.hardware.target import Target

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without a GPU, and four nodes with one each."""
    from ray.cluster_utils import Cluster

    # Where the nodes' processes find what the tests do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        found.nodes = [found.add_node(num_cpus=1, num_gpus=1) for _ in range(4)]
        ray.init(address=found.address, log_to_driver=False)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.mark.fault("B31", "B33")
def test_a_node_that_is_lost_costs_no_row(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = write_recording(tmp_path / "recording")
    jobs = recorded_jobs(recording)
    halves = [Job(j.workload, j.configs[i::2], j.role) for j in jobs for i in (0, 1)]
    out = Dataset.create(tmp_path / "out", recording.target, recording.protocol)
    told: list[str] = []

    def lose_a_node(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            cluster.remove_node(cluster.nodes[1], allow_graceful=False)

    monkeypatch.setattr(ray_engine, "_CHUNK", 1)
    collect_on_ray(halves, out.identity, out.absorb, lose_a_node, inf, recording.path)
    out.compact()
    assert sum("are timed" in line for line in told) == len(halves)
    assert rows_of(out.path) == rows_of(recording.path)
    assert set(rows_of(out.path).values()) == {1}
    cards = {run.device_uuid for run in Dataset.open(out.path).measurements().runs}
    assert len(cards) >= 3


def test_a_bundle_is_cut_among_the_gpus(cluster: Any, tmp_path: Path) -> None:
    """Of a part of several, only that part: a list has other parts on other clusters."""
    recording, file = write_recording(tmp_path / "recording"), tmp_path / "work.zip"
    known, protocol = recording.artifacts(), dict(recording.protocol)
    jobs = recorded_jobs(recording)
    write_bundle(file, jobs, recording.target, protocol, known=known)
    parts = [tmp_path / name for name in ("one", "two")]
    for number, out in enumerate(parts, 1):
        done = command("--bundle", file, "--replay", recording.path, "--engine", "ray", "--out",
                       out, "--part", f"{number}/2", RAY_ADDRESS=cluster.address)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "16 of 16 chunks are timed" in done.stderr
        expected = {job.workload for job in part_of(jobs, number, 2) if job.role != "anchor"}
        assert set(Dataset.open(out).workloads()) == expected
    assert rows_of(merge(tmp_path / "all", parts).path) == rows_of(recording.path)


def test_a_node_that_cannot_time_a_users_kernel_says_why(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pack(folder, tmp_path / "k.zip", TARGET, {"calls": 1})
    kernels = partial(collect_kernels, f"{tmp_path}/mine.py:call")
    with pytest.raises(NoGpu, match="no usable NVIDIA GPU"):
        collect_on_ray(
            tmp_path / "k.zip", Identity(TARGET, {}), print, print, inf, None, kernels
        )  # fmt: skip


@pytest.mark.fault("B31", "B33")
def test_a_users_calls_are_shared_out_among_the_nodes_and_a_lost_one_costs_none(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What calls, binds and keeps is real on every node; no node has a GPU to launch on."""
    script, out, whole = (tmp_path / name for name in ("my_kernel.py", "out", "whole"))
    script.write_text(SCRIPT)
    place = f"{script}:calls"
    (work := tmp_path / "work").mkdir()
    made = Target.named("h100-sxm")
    write_kernel_bundle(tmp_path / "k.zip", place, made, work)
    unpack(tmp_path / "k.zip", there := tmp_path / "there")
    collect_on_cpu(place, there, whole)
    told: list[str] = []

    def lose_a_node(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            cluster.remove_node(cluster.nodes[1], allow_graceful=False)

    monkeypatch.setattr(ray_engine, "_PARTS", 2)
    kernels = partial(collect_on_cpu, place)
    absorb = partial(merge_kernels, out)
    collect_on_ray(
        tmp_path / "k.zip", Identity(made, {}), absorb, lose_a_node, inf, tmp_path, kernels
    )
    assert told[-1] == "8 of 8 chunks are timed"
    assert len(timings(whole)) == 3
    assert timings(out) == timings(whole)
