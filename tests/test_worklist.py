"""Lists of work: they come back as drawn, in an order that shares binaries, for one card only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from costmodel.cli import app
from costmodel.collect import Job
from costmodel.collect.sampling import (
    RandomSampler,
    by_code,
    read_worklist,
    training_workloads,
    write_worklist,
)
from costmodel.data.shards import Identity
from costmodel.errors import CorruptFile, MissingData, MixedData
from costmodel.evaluation.heldout import is_held_out
from costmodel.gemm.space import SearchSpace
from costmodel.hardware.target import Target, Toolchain
from costmodel.measure.protocol import TimingProtocol

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
IDENTITY = Identity(H100, TimingProtocol().to_dict())


def jobs_of(count: int, seed: int = 0) -> list[Job]:
    import numpy as np

    rng = np.random.default_rng(seed)
    workloads = training_workloads(count, H100, ("float16", "bfloat16"), seed)
    return [Job(w, tuple(RandomSampler(7).sample(SearchSpace.of(w, H100), rng))) for w in workloads]


@settings(deadline=None, max_examples=10)
@given(count=st.integers(1, 12), seed=st.integers(0, 99))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("lists") / "list.parquet"
    jobs = jobs_of(count, seed)
    jobs[0] = Job(jobs[0].workload, jobs[0].configs, "eval")
    write_worklist(path, jobs, IDENTITY)
    assert read_worklist(path, IDENTITY) == jobs


def test_workloads_of_one_class_of_code_follow_each_other_the_commonest_first() -> None:
    jobs = jobs_of(60)
    ordered = by_code(jobs)
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))
    codes = [job.workload.code for job in ordered]
    runs = [code for i, code in enumerate(codes) if i == 0 or code != codes[i - 1]]
    assert len(runs) == len(set(codes)) > 3
    lengths = [codes.count(code) for code in runs]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.fault("B16")
def test_a_list_for_another_card_triton_or_protocol_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    write_worklist(path, jobs_of(1), IDENTITY)
    others = (
        Identity(Target.named("h200-sxm", H100.toolchain), IDENTITY.protocol),
        Identity(Target.named("h100-sxm", Toolchain("3.7.0", "12.8")), IDENTITY.protocol),
        Identity(H100, TimingProtocol(repeats=6).to_dict()),
    )
    for other in others:
        with pytest.raises(MixedData):
            read_worklist(path, other)


def test_what_is_no_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    with pytest.raises(MissingData, match="--write-worklist"):
        read_worklist(path, IDENTITY)
    for content in (b"", b"PAR1", b"\0" * 400):
        path.write_bytes(content)
        with pytest.raises(CorruptFile):
            read_worklist(path, IDENTITY)


def test_a_list_with_a_role_that_no_release_knows_is_refused(tmp_path: Path) -> None:
    (job,) = jobs_of(1)
    path = tmp_path / "list.parquet"
    write_worklist(path, [Job(job.workload, job.configs, "other")], IDENTITY)  # type: ignore[arg-type]
    with pytest.raises(CorruptFile, match="other"):
        read_worklist(path, IDENTITY)


@pytest.mark.fault("B11")
def test_drawing_needs_no_gpu(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    options = ["--write-worklist", str(path), "--target", "h100-sxm", "--workloads", "6"]
    drawn = ["--sampler", "model", "--configs", "20", "--seed", "5"]
    result = CliRunner().invoke(app, ["collect", *options, *drawn])
    assert result.exit_code == 0, result.output
    jobs = read_worklist(path, Identity(Target.named("h100-sxm"), IDENTITY.protocol))
    assert len(jobs) == 6
    assert all(len(job.configs) == 20 for job in jobs)
    assert not any(is_held_out(job.workload) for job in jobs)


def test_element_types_have_their_short_names(tmp_path: Path) -> None:
    drawn = []
    for names in ("fp16,bf16,fp32,tf32", "float16,bfloat16,float32,tf32"):
        path = tmp_path / f"{names}.parquet"
        options = ["--target", "h100", "--workloads", "24", "--configs", "2", "--dtypes", names]
        result = CliRunner().invoke(app, ["collect", "--write-worklist", str(path), *options])
        assert result.exit_code == 0, result.output
        drawn.append(read_worklist(path, IDENTITY))
    assert drawn[0] == drawn[1]
    assert {job.workload.code.kind for job in drawn[0]} == {*names.split(",")}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--target", "h100-sxm", "--out", "x"], "--target"),
        ([], "--out"),
        (["--write-worklist", "x", "--worklist", "y", "--target", "h100-sxm"], "--worklist"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], name: str) -> None:
    result = CliRunner().invoke(app, ["collect", *options])
    assert result.exit_code == 2
    assert name in result.output
