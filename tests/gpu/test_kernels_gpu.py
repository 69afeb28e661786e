"""The kernels on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan, Repack, Workspace
from costmodel.launch.problem import GemmProblem
from costmodel.measure.protocol import TimingProtocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIGS = [
    GemmConfig("pointer", 16, 32, 16, 1, 1),
    GemmConfig("pointer", 16, 64, 128, 4, 5, split_k=4),
    GemmConfig("pointer", 64, 64, 64, 4, 4),
    GemmConfig("pointer", 128, 128, 64, 8, 3, group_m=1),
    GemmConfig("pointer", 128, 64, 64, 4, 4, maxnreg=96),
    GemmConfig("tma", 16, 32, 256, 4, 4, split_k=8),
    GemmConfig("tma", 32, 16, 256, 4, 4, split_k=32),
    GemmConfig("tma", 64, 16, 128, 4, 4),
    GemmConfig("tma", 128, 16, 128, 4, 4, split_k=4),
    GemmConfig("tma", 128, 128, 64, 4, 4, split_k=4),
    GemmConfig("tma", 64, 128, 64, 4, 4),
    GemmConfig("tma", 128, 256, 64, 8, 4, halves=True),
    GemmConfig("tma", 64, 64, 64, 4, 4, split_k=4),
    GemmConfig("tma_persistent", 128, 128, 64, 4, 4, flatten=True),
    GemmConfig("tma_persistent", 128, 256, 64, 8, 3, halves=True),
    GemmConfig("warp_specialized", 128, 256, 64, 8, 3),
    GemmConfig("warp_specialized", 256, 128, 64, 8, 3, halves=True),
    GemmConfig("warp_specialized", 128, 160, 64, 8, 4),
    GemmConfig("warp_specialized", 128, 192, 64, 8, 5, group_m=1),
    GemmConfig("warp_specialized", 256, 160, 64, 8, 4),
    GemmConfig("warp_specialized", 192, 96, 128, 12, 2),
    GemmConfig("warp_specialized", 192, 128, 64, 12, 4, halves=True),
    GemmConfig("warp_specialized", 128, 64, 64, 8, 6, repack=True),
    GemmConfig("tma", 64, 128, 64, 4, 4, repack=True),
    GemmConfig("tma", 64, 64, 64, 4, 4, split_k=4, repack=True),
    GemmConfig("tma_persistent", 128, 256, 64, 8, 3, halves=True, repack=True),
]
SHAPES = [(1, 1, 1), (1, 64, 40), (17, 33, 2), (33, 777, 555), (128, 128, 1001), (250, 466, 1000),
          (256, 512, 4096), (1000, 1000, 1000), (333, 50257, 64), (5, 7, 15),
          (2040, 3080, 200)]  # fmt: skip


def launch(a, b, out, config, bias=None, activation="none", tf32=False):
    workload = Workload.from_tensors(
        a, b, out, bias=bias is not None, activation=activation, tf32=tf32
    )
    target = Target.current()
    if reason := why_illegal(config, workload, target.device):
        return reason
    plan = Plan(workload, config, target.device.sm_count)
    kernel = load(specialize(workload, config), target, 0)
    stream = torch.cuda.current_stream().cuda_stream
    workspace = Workspace(a.device)
    if config.repack:
        a, b = Repack(plan, target, 0)(a, b, workspace, stream)
    kernel(plan.blocks, stream, plan.arguments(a, b, out, bias, plan.scratch(workspace)))
    torch.cuda.synchronize()
    return ""


def nan_framed(rows, cols, dtype, transposed, pad):
    """A random matrix inside a buffer of NaN, with ``pad`` elements between rows."""
    shape = (cols, rows) if transposed else (rows, cols)
    buffer = torch.full((shape[0] + 2, shape[1] + pad), float("nan"), dtype=dtype, device="cuda")
    view = buffer[1:-1, : shape[1]]
    view.copy_(torch.randn(shape, device="cuda"))
    return view.T if transposed else view


FLOAT32_CONFIGS = [
    GemmConfig("pointer", 16, 32, 16, 1, 1),
    GemmConfig("pointer", 16, 64, 64, 4, 3, split_k=4),
    GemmConfig("pointer", 32, 32, 32, 2, 2),
    GemmConfig("pointer", 64, 64, 32, 4, 3),
    GemmConfig("tma", 16, 32, 64, 4, 4, split_k=8),
    GemmConfig("tma", 64, 64, 32, 4, 4),
    GemmConfig("tma", 64, 64, 32, 4, 3, repack=True),
    GemmConfig("tma_persistent", 64, 64, 32, 4, 3, flatten=True),
]
TF32_CONFIGS = [
    *FLOAT32_CONFIGS,
    GemmConfig("pointer", 128, 256, 32, 8, 4),
    GemmConfig("pointer", 128, 128, 32, 8, 3, group_m=1),
    GemmConfig("tma", 64, 128, 64, 4, 4),
    GemmConfig("tma", 64, 64, 64, 4, 4, split_k=4),
    GemmConfig("tma", 128, 128, 64, 8, 3, halves=True),
    GemmConfig("tma", 64, 32, 64, 4, 4, repack=True),
    GemmConfig("tma_persistent", 128, 128, 64, 8, 2),
]


@pytest.mark.fault("B01", "B19", "B57")
@pytest.mark.parametrize(
    ("config", "dtype", "tf32"),
    [
        *((c, torch.float16, False) for c in CONFIGS),
        *((c, torch.bfloat16, False) for c in CONFIGS),
        *((c, torch.float32, False) for c in FLOAT32_CONFIGS),
        *((c, torch.float32, True) for c in TF32_CONFIGS),
    ],
    ids=str,
)
def test_matches_float64_in_every_layout(config, dtype, tf32):
    """As exactly as the gate asks: what is called IEEE is not TF32."""
    torch.manual_seed(0)
    ran = 0
    for m, n, k in SHAPES:
        for a_t, b_t in ((False, False), (True, False), (False, True), (True, True)):
            for pad in (0, 16 // dtype.itemsize, 3):
                a = nan_framed(m, k, dtype, a_t, pad)
                b = nan_framed(k, n, dtype, b_t, pad)
                out = torch.full((m + 2, n), float("nan"), dtype=dtype, device="cuda")
                if launch(a, b, out[1:-1], config, tf32=tf32):
                    continue
                ran += 1
                ref = a.double() @ b.double()
                if dtype == torch.float32:
                    problem = GemmProblem(Workload.from_tensors(a, b, out[1:-1], tf32=tf32))
                    atol, rtol = TimingProtocol().tolerance(problem.precision, k)
                    tolerance = atol + rtol * ref.abs()
                else:
                    tolerance = (2e-3 if dtype == torch.float16 else 1.6e-2) * (ref.abs() + k**0.5)
                bad = ~((out[1:-1].double() - ref).abs() <= tolerance)
                assert not bad.any(), (m, n, k, a_t, b_t, pad, int(bad.sum()))
                assert out[0].isnan().all(), "wrote before the output"
                assert out[-1].isnan().all(), "wrote past the output"
    assert ran >= 10


@pytest.mark.parametrize("config", TF32_CONFIGS, ids=str)
def test_tf32_is_what_was_asked_for(config):
    """It errs as 10 bits of mantissa do, so the tensor cores are in use."""
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 384, device="cuda")
    ref = a.double() @ b.double()
    errors = []
    for tf32 in (False, True):
        if max(config.block_m, config.block_n) > 64 and not tf32:
            errors.append(1e-4)  # large tiles without tensor cores take long to compile
            continue
        out = torch.empty(256, 384, device="cuda")
        assert not launch(a, b, out, config, tf32=tf32)
        errors.append(float((out.double() - ref).abs().max()))
    ieee, coarse = errors
    assert ieee <= 1e-3 < coarse


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_float32_results_of_16_bits(config, dtype, activation):
    """The accumulator is stored as it is: bias and activation in float32, nothing rounded."""
    torch.manual_seed(0)
    function = getattr(torch.nn.functional, activation, lambda x: x)
    for m, n, k in ((256, 384, 512), (40, 776, 1000)):
        a, b = (torch.randn(s, device="cuda").to(dtype) for s in ((m, k), (k, n)))
        for b_ in (b, b.T.contiguous().T):
            for bias in (None, torch.randn(n, device="cuda")):
                out = torch.full((m, n), float("nan"), device="cuda")
                if reason := launch(a, b_, out, config, bias, activation):
                    # A float32 tile takes twice the place, so that fewer stages fit.
                    assert reason.startswith(("shared memory", "TMA"))
                    continue
                problem = GemmProblem(Workload.from_tensors(a, b_, out))
                atol, rtol = TimingProtocol().tolerance(problem.precision, k)
                ref = function(a.double() @ b.double() + (0 if bias is None else bias.double()))
                torch.testing.assert_close(out.double(), ref, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("config", "dtype", "tf32", "atol", "rtol"),
    [
        *((c, torch.float16, False, 0.05, 5e-3) for c in CONFIGS),
        *((c, torch.float32, False, 5e-4, 5e-5) for c in FLOAT32_CONFIGS),
        *((c, torch.float32, True, 0.1, 1e-2) for c in FLOAT32_CONFIGS),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_epilogue(config, dtype, tf32, atol, rtol, activation):
    a = torch.randn(256, 512, device="cuda", dtype=dtype)
    b = torch.randn(512, 384, device="cuda", dtype=dtype)
    bias = torch.randn(384, device="cuda", dtype=dtype)
    out = torch.full((256, 384), float("nan"), device="cuda", dtype=dtype)
    assert not launch(a, b, out, config, bias, activation, tf32)
    ref = a.double() @ b.double() + bias.double()
    function = getattr(torch.nn.functional, activation, lambda x: x)
    torch.testing.assert_close(out.double(), function(ref), atol=atol, rtol=rtol)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.split_k > 1], ids=str)
def test_split_k_is_bitwise_repeatable(config):
    a = torch.randn(100, 8192, device="cuda", dtype=torch.float16)
    b = torch.randn(8192, 320, device="cuda", dtype=torch.float16)
    results = []
    for _ in range(50):
        out = torch.full((100, 320), float("nan"), device="cuda", dtype=torch.float16)
        assert not launch(a, b, out, config)
        results.append(out)
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.split_k > 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_split_k_is_as_exact_as_torch(config, dtype):
    """In the root of the mean square and in the worst element, at most twice torch's error."""
    torch.manual_seed(0)
    for m, n, k in ((64, 320, 8192), (128, 128, 16384)):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        b = torch.randn(k, n, device="cuda", dtype=dtype)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        assert not launch(a, b, out, config)
        ref = a.double() @ b.double()
        ours, torchs = ((x.double() - ref).abs() for x in (out, a @ b))
        assert ours.max() <= 2 * torchs.max()
        assert ours.square().mean().sqrt() <= 2 * torchs.square().mean().sqrt()


@pytest.mark.fault("B08")
def test_offsets_past_32_bits():
    config = GemmConfig("pointer", 64, 64, 32, 4, 3)
    a = torch.randn(64, 32, device="cuda", dtype=torch.float16)
    base = torch.empty(2**26 * 64, device="cuda", dtype=torch.float16)
    b = torch.as_strided(base, (32, 64), (2**26, 1))
    b.copy_(torch.randn(32, 64))
    out = torch.empty(64, 64, device="cuda", dtype=torch.float16)
    assert not launch(a, b, out, config)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=0.05, rtol=5e-3)
    del base, b
    a = torch.randn(50000, 16, device="cuda", dtype=torch.float16)
    b = torch.randn(16, 50000, device="cuda", dtype=torch.float16)
    for other in (config, GemmConfig("tma", 128, 256, 64, 8, 3)):
        out = torch.full((50000, 50000), float("nan"), device="cuda", dtype=torch.float16)
        assert not launch(a, b, out, other)
        ref = a[-64:].double() @ b.double()
        torch.testing.assert_close(out[-64:].double(), ref, atol=0.02, rtol=5e-3)


@pytest.mark.fault("B19")
@pytest.mark.parametrize(
    "config",
    [GemmConfig("pointer", 32, 32, 32, 4, 2), GemmConfig("tma", 64, 32, 64, 4, 3, repack=True)],
    ids=str,
)
def test_strides_of_any_kind(config):
    base = torch.randn(200, 300, device="cuda", dtype=torch.float16)
    out = torch.empty(50, 2, 60, device="cuda", dtype=torch.float16)[:, 1, ::2]
    a, b = base[:100:2, :90:3], base[10:40, 5:95:3]
    assert not launch(a, b, out, config)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=0.05, rtol=5e-3)
    expanded = torch.randn(1, 30, device="cuda", dtype=torch.float16).expand(50, 30)
    assert not launch(expanded, b, out, config)
    torch.testing.assert_close(out.double(), expanded.double() @ b.double(), atol=0.05, rtol=5e-3)
