"""fp8 and int8 products on a GPU: each configuration against float64, and beside torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

import costmodel
from costmodel.scaled.configs import prune
from costmodel.scaled.launch import Kernels, repeated, tuned
from costmodel.scaled.product import int_call, scaled_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that multiplies fp8",
    ),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 512, 1024), (64, 640, 896), (2100, 2304, 640)]  # the last: several tiles a program
ALSO = [(240, 384, 1152)]
FORMS = {
    "row": SHAPES, "block": SHAPES, "int8": SHAPES, "int32": ALSO, "tensor": ALSO,
    "row_fast": SHAPES, "block_both": ALSO, "block_a": ALSO,
}  # fmt: skip


@pytest.fixture(autouse=True)
def everything_is_compiled() -> Iterator[None]:
    """Compile all configurations, in parallel, and not only those that promise to be fast."""
    costmodel.set_mode("exhaustive")
    yield
    costmodel.set_mode("auto")


def operands(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, k), dtype=dtype, device="cuda")
    return torch.randn(rows, k, device="cuda").to(dtype)


def scales_of(form: str, m: int, n: int, k: int) -> tuple[torch.Tensor, Any, torch.Tensor, Any]:
    """Scales over twelve orders of magnitude, in torch's layouts, and their recipes."""

    def draw(*shape: int) -> torch.Tensor:
        return 10.0 ** (12 * torch.rand(shape, device="cuda") - 6)

    blocks = -(-k // 128)

    def of_blocks(rows: int) -> torch.Tensor:
        return draw(-(-rows // 128), -(-blocks // 4) * 4).T

    by_row, by_block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    if form == "tensor":
        return draw(1), ScalingType.TensorWise, draw(1), ScalingType.TensorWise
    if form == "block":
        return draw(blocks, m).T, by_row, of_blocks(n), by_block
    if form == "block_both":
        return draw(blocks, m).T, by_row, draw(blocks, n).T, by_row
    if form == "block_a":
        return of_blocks(m), by_block, draw(blocks, n).T, by_row
    return draw(m, 1), ScalingType.RowWise, draw(1, n), ScalingType.RowWise


def dequantised(x: torch.Tensor, scale: torch.Tensor | None, recipe: Any) -> torch.Tensor:
    """Return float64 operands; scales are [rows, ...], or those of blocks by K."""
    wide = x.float().double()
    if scale is None:
        return wide
    if recipe == ScalingType.BlockWise1x128:
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    elif recipe == ScalingType.BlockWise128x128:
        scale = scale.T.repeat_interleave(128, 0)[: len(x)]
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    return wide * scale.double()


class Case:
    """One product, its float64 result and the sum of the sizes of what is added up."""

    def __init__(
        self, form: str, m: int, n: int, k: int, dtype: torch.dtype = E4M3,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        dtype = torch.int8 if form.startswith("int") else dtype
        self.a, self.b = operands(m, k, dtype), operands(n, k, dtype)
        if form == "int32":
            self.call = int_call(self.a, self.b.T)
            left, right = dequantised(self.a, None, None), dequantised(self.b, None, None)
        else:
            sa, ra, sb, rb = scales_of(form, m, n, k)
            fast = form.endswith("fast")
            self.call = scaled_call(self.a, self.b.T, sa, ra, sb, rb, None, out_dtype, fast)
            left = dequantised(self.a, sa, ra)
            right = dequantised(self.b, sb.T if rb == ScalingType.RowWise else sb, rb)
        self.exact, self.size = left @ right.T, left.abs() @ right.abs().T
        self.out: torch.Tensor = self.call[5]

    def run(self, **options: Any) -> torch.Tensor:
        self.out.view(torch.uint8).fill_(0x7F)  # large numbers
        Kernels().run(*self.call, **options)
        return self.out

    def error(self) -> float:
        """Return the largest error, of the sum of the sizes of what was added up."""
        off = (self.out.double() - self.exact).abs() / self.size.clamp(min=1e-300)
        return float(off.max())


def configurations(case: Case) -> list[Any]:
    return prune(tuned.configs, dict(zip(Kernels.arg_names, case.call, strict=True)))


@pytest.mark.parametrize("form", FORMS)
def test_every_configuration_is_right(form: str) -> None:
    wrong = []
    for m, n, k in FORMS[form]:
        case = Case(form, m, n, k)
        tuned.run(*case.call, warmup=False)  # compiles in parallel
        for config in configurations(case):
            options = config.all_kwargs()
            if options["kernel"] == "torch":
                continue
            try:
                case.run(**options)
            except Exception as error:
                if type(error).__name__ != "OutOfResources":
                    wrong.append(f"{m}x{n}x{k} {config}: {error}")
                continue
            if not case.error() < (0.0 if form == "int32" else 2e-3) + 1e-300:
                wrong.append(f"{m}x{n}x{k} {config}: off by {case.error()}")
    assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("form", ["row", "block", "int8", "int32"])
def test_what_is_repeated_with_other_operands_is_right(form: str) -> None:
    """On a stream of its own, and in a graph, each of which has other scratch memory."""
    first, other = (Case(form, 48, 512, 2048) for _ in range(2))
    tuned.run(*first.call, warmup=False)
    for config in configurations(first):
        options = config.all_kwargs()
        if options["kernel"] == "torch":
            continue
        loaded = Kernels().run(*first.call, warmup=True, **options)
        again = repeated(first.call, loaded=loaded, **options)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other.out.zero_()
            again(other.call[:6])
            assert other.error() < 2e-3, config
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again(other.call[:6])
        other.out.zero_()
        graph.replay()
        assert other.error() < 2e-3, config


def test_int8_with_scales_and_sizes_that_no_vector_divides() -> None:
    for form in ("int8", "int32", "row", "block"):
        case = Case(form, 33, 129, 333)
        tuned.run(*case.call, warmup=False)
        assert case.error() < 1e-3, form


@pytest.mark.parametrize("m", [16, 128])  # up to 64 some steps are 256 of K
@pytest.mark.parametrize("form", ["row", "tensor"])
def test_error_is_not_above_that_of_cublas(form: str, m: int) -> None:
    case = Case(form, m, 256, 16384)
    try:
        case.run(kernel="torch")
    except costmodel.CompileError:  # some have float32 results of scales of the tensor only
        case = Case(form, m, 256, 16384, out_dtype=torch.bfloat16)
        case.run(kernel="torch")
    torchs = case.error()
    for config in configurations(case):
        if config.kwargs["kernel"] != "torch":
            case.run(**config.all_kwargs())
            assert case.error() <= 1.2 * torchs, config


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("form", ["row", "block"])
def test_nan_and_infinity_reach_their_rows_and_columns_only(form: str, dtype: torch.dtype) -> None:
    m, n, k = 130, 256, 512
    a, b = operands(m, k, dtype), operands(n, k, dtype)
    bits_a, bits_b = a.view(torch.uint8), b.view(torch.uint8)
    bits_a[3, 5] = 0x7F  # NaN in both types
    bits_b[7, 200] = 0x7F if dtype == E4M3 else 0x7C  # infinity
    bits_a[9], bits_b[11] = 0, 0
    sa, ra, sb, rb = scales_of(form, m, n, k)
    out = costmodel.scaled_mm(a, b.T, sa, ra, sb, rb, output_dtype=torch.float32)
    exact = dequantised(a, sa, ra) @ dequantised(b, sb.T if form == "row" else sb, rb).T
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())
    assert not out[9][~exact[9].isnan()].any()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_bias_and_activation(out_dtype: torch.dtype, activation: str | None) -> None:
    m, n, k = 96, 256, 512
    a, b = operands(m, k, E4M3), operands(n, k, E4M3)
    sa, sb = torch.rand(m, 1, device="cuda") / 16, torch.rand(1, n, device="cuda") / 16
    bias = torch.randn(n, device="cuda", dtype=out_dtype)
    row = ScalingType.RowWise
    out = costmodel.scaled_mm(
        a, b.T, sa, row, sb, row, bias=bias, output_dtype=out_dtype, activation=activation
    )
    exact = (dequantised(a, None, None) * sa) @ (dequantised(b, None, None).T * sb) + bias.double()
    if activation:
        exact = getattr(torch.nn.functional, activation)(exact)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("form", ["row", "block"])
def test_scales_that_lie_apart_after_some_that_do_not(form: str) -> None:
    """Torch refuses such blocks, and reads such rows elsewhere."""
    m, n, k = 32, 256, 512
    a, b = operands(m, k, E4M3), operands(n, k, E4M3)
    sa, ra, sb, rb = scales_of(form, m, n, k)
    left, right = dequantised(a, sa, ra), dequantised(b, sb.T if form == "row" else sb, rb)
    exact, size = left @ right.T, left.abs() @ right.abs().T
    wide = torch.zeros(3 * m, 7 * sa.shape[1], device="cuda")
    apart = wide[::3, 3::7]
    apart.copy_(sa)
    for scale in (sa, apart, sa.contiguous()):
        out = costmodel.scaled_mm(a, b.T, scale, ra, sb, rb, output_dtype=torch.float32)
        assert float(((out.double() - exact).abs() / size).max()) < 2e-3


@pytest.mark.parametrize("scales", ["row", "block"])
def test_a_layer_is_near_its_dequantised_checkpoint(scales: str) -> None:
    n, k = 640, 1024
    weight = operands(n, k, E4M3)
    if scales == "row":
        scale = torch.rand(n, device="cuda") / 16
        state, wide = {"weight_scale": scale}, scale[:, None]
    else:
        scale = torch.rand(n // 128, k // 128, device="cuda") / 16
        state = {"weight_scale_inv": scale}
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    layer = costmodel.nn.ScaledLinear(k, n, scales=scales, device="cuda")
    layer.load_state_dict({"weight": weight, **state})
    x = torch.randn(3, 5, k, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ (dequantised(weight, None, None) * wide).T
    assert float((layer(x).double() - exact).norm() / exact.norm()) < 0.05


def test_a_captured_graph_replays() -> None:
    case = Case("block", 16, 512, 4096)
    for _ in range(2):
        tuned.run(*case.call, warmup=False)
    split = next(c for c in configurations(case) if c.kwargs.get("splits", 1) > 1)
    graph = torch.cuda.CUDAGraph()
    case.run(**split.all_kwargs())
    with torch.cuda.graph(graph):
        Kernels().run(*case.call, **split.all_kwargs())
        Kernels().run(*case.call, **split.all_kwargs())
    case.out.zero_()
    for _ in range(3):
        graph.replay()
    assert case.error() < 1e-3


def test_choices_are_kept_and_never_slower_than_torch() -> None:
    case = Case("row", 16, 2112, 7168, out_dtype=torch.bfloat16)
    for _ in range(2):
        tuned.run(*case.call, warmup=False)
    times = {c.kwargs["kernel"]: t[0] for c, t in tuned.configs_timings.items()}
    assert "torch" in times
    assert tuned.best_config in tuned.configs_timings
    best = tuned.configs_timings[tuned.best_config][0]
    assert best <= 1.02 * times["torch"]
