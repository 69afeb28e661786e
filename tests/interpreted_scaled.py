"""Scaled products against float64 on the CPU; ``test_kernels.py`` runs these.

Results are float16 and float32: the interpreter of Triton 3.6.0 computes garbage in bfloat16, and
knows no NaN of fp8. Those, and the kernels in Gluon, are tested on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from costmodel.scaled import layer, layouts
from costmodel.scaled.launch import Kernels
from costmodel.scaled.product import int_call, scaled_call

# The interpreter of Triton 3.6.0 asks this of NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
TENSOR, ROW = ScalingType.TensorWise, ScalingType.RowWise
BY_ROW, BY_BLOCK = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (TENSOR, ROW), (BY_ROW, BY_BLOCK), (BY_ROW, BY_ROW),
         (BY_BLOCK, BY_ROW)]  # fmt: skip
TILES = [
    {"kernel": "pointer", "block_m": 16, "block_n": 64, "splits": 1},
    {"kernel": "pointer", "block_m": 64, "block_n": 128, "splits": 3},
    {"kernel": "tma", "block_m": 128, "block_n": 64, "splits": 1},
    {"kernel": "tma", "block_m": 16, "block_n": 64, "splits": 2},
    {"kernel": "pointer", "block_m": 128, "block_n": 128, "splits": 2},
    {"kernel": "tma", "block_m": 64, "block_n": 32, "splits": 1},
]
TINY = 1e-30


def operand(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix inside a buffer whose rest is large numbers; rows are aligned to 16 bytes."""
    frame = torch.full((rows + 2, -(-k // 16) * 16 + 16), 100.0).to(dtype)
    x = frame[1:-1, :k]
    if dtype == INT8:
        x.copy_(torch.randint(-128, 128, (rows, k)))
    else:
        x.copy_(torch.randn(rows, k).to(dtype))
    return x


def scale(recipe: ScalingType, rows: int, k: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale over twelve orders of magnitude, as torch has it and as [rows, k] of float64."""

    def draw(*shape: int) -> torch.Tensor:
        return 10.0 ** (12 * torch.rand(shape) - 6)

    blocks = -(-k // 128)
    if recipe == TENSOR:
        one = draw(1)
        return one, one.double().expand(rows, k)
    if recipe == ROW:
        column = draw(rows, 1)
        return column if name == "a" else column.T, column.double().expand(rows, k)
    if recipe == BY_ROW:
        found = draw(blocks, rows).T
        return found, found.double().repeat_interleave(128, 1)[:, :k]
    found = draw(-(-rows // 128), -(-blocks // 4) * 4).T
    wide = found.T.double().repeat_interleave(128, 0)[:rows]
    return found, wide.repeat_interleave(128, 1)[:, :k]


def product(
    m: int, n: int, k: int, recipes: Any = (ROW, ROW), dtype: torch.dtype = E4M3, tile: Any = None,
    step: int = 128, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return a result, the exact one, and the sum of the sizes of what was added up."""
    a, b = operand(m, k, dtype), operand(n, k, dtype)
    (sa, wide_a), (sb, wide_b) = scale(recipes[0], m, k, "a"), scale(recipes[1], n, k, "b")
    call = scaled_call(
        a, b.T, sa, recipes[0], sb, recipes[1], **{"output_dtype": torch.float32, **options}
    )
    launch(call, tile or TILES[0], step)
    left, right = a.double() * wide_a, b.double() * wide_b
    return call[5], left @ right.T, left.abs() @ right.abs().T


def launch(call: tuple[Any, ...], tile: dict[str, Any], step: int = 128) -> None:
    Kernels().run(*call, step=step, num_warps=4, num_stages=3, **tile)


def check(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tolerance: float = 1e-6) -> None:
    out, exact, size = found
    assert float(((out.double() - exact).abs() / size.clamp(min=TINY)).max()) < tolerance


@pytest.mark.parametrize("recipes", PAIRS, ids=lambda pair: "-".join(r.name for r in pair))
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_form_of_scales(recipes: Any, tile: dict[str, Any]) -> None:
    for m, n, k in ((1, 72, 384), (70, 130, 208)):
        check(product(m, n, k, recipes, tile=tile))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_int8_is_exact(tile: dict[str, Any]) -> None:
    for m, n, k in ((1, 72, 384), (70, 130, 333)):
        if tile["kernel"] == "tma" and k % 16:
            k = 336
        a, b = operand(m, k, INT8), operand(n, k, INT8)
        call = int_call(a, b.T)
        launch(call, tile)
        assert torch.equal(call[5].long(), a.long() @ b.long().T)


def test_int8_whose_sums_no_float32_holds() -> None:
    a, b = torch.full((3, 16640), -128).to(INT8), torch.full((64, 16640), -128).to(INT8)
    a[:, -1] = 1
    call = int_call(a, b.T)
    launch(call, TILES[1])
    assert torch.equal(call[5].long(), a.long() @ b.long().T)


@pytest.mark.parametrize("dtype", [E5M2, INT8])
def test_other_operands_with_scales(dtype: torch.dtype) -> None:
    for recipes in ((TENSOR, TENSOR), (ROW, ROW)):
        check(product(5, 72, 256, recipes, dtype))


@pytest.mark.parametrize("recipes", [(ROW, ROW), (BY_ROW, BY_BLOCK)])
def test_long_k(recipes: Any) -> None:
    check(product(2, 64, 16512, recipes, tile=TILES[3]))
    check(product(2, 64, 16512, recipes, tile=TILES[0]), 1e-6)


def test_fast_accumulation_and_wide_steps() -> None:
    for fast in (True, False):
        check(product(5, 72, 640, fast=fast, tile=TILES[3], step=256))
    check(product(5, 72, 512, (BY_ROW, BY_BLOCK), fast=True, tile=TILES[3]))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_bias_activation_and_a_result_of_half_precision(activation: str) -> None:
    m, n, k = 9, 72, 256
    a, b, bias = operand(m, k, E4M3), operand(n, k, E4M3), torch.randn(n)
    sa, sb = torch.rand(m, 1) / 16, torch.rand(1, n) / 16
    call = scaled_call(a, b.T, sa, ROW, sb, ROW, bias, torch.float16, False, activation)
    launch(call, TILES[3])
    exact = (a.double() * sa) @ (b.double().T * sb) + bias
    if activation != "none":
        exact = getattr(torch.nn.functional, activation)(exact)
    torch.testing.assert_close(call[5].double(), exact, atol=2e-3, rtol=2e-3)


def test_zeros_and_a_result_inside_a_larger_one() -> None:
    m, n, k = 20, 72, 256
    frame = torch.full((m + 2, 96), 7.0)
    a, b = torch.zeros(m, k).to(E4M3), operand(n, k, E4M3)
    out = frame[1:-1, :n]
    call = scaled_call(a, b.T, torch.ones(1), TENSOR, torch.ones(1), TENSOR,
                       output_dtype=torch.float32, out=out)  # fmt: skip
    launch(call, TILES[2])
    assert not out.any()
    assert (frame[0] == 7).all()
    assert (frame[-1] == 7).all()
    assert (frame[:, n:] == 7).all()


# --- Layers, and what other packages call ---------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch one configuration on the CPU wherever the package multiplies."""

    def multiply(
        a: Any, b: Any, sa: Any, ra: Any, sb: Any, rb: Any, *, bias: Any = None,
        output_dtype: Any = None, activation: Any = None, out: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        name = activation or "none"
        call = scaled_call(a, b, sa, ra, sb, rb, bias, output_dtype, False, name, out)
        launch(call, TILES[0])
        return call[5]

    monkeypatch.setattr(layouts, "scaled_mm", multiply)
    monkeypatch.setattr(layer, "scaled_mm", multiply)


def blocks(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [rows / 128, k / 128], and float64 ones [rows, k]."""
    found = torch.rand(-(-rows // 128), k // 128) + 0.5
    return found, found.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)


@pytest.mark.usefixtures("on_cpu")
def test_layouts_of_other_packages() -> None:
    m, n, k = 6, 200, 256
    a, b = operand(m, k, E4M3), operand(n, k, E4M3)
    sa, (sb, wide_b) = torch.rand(m, 2) + 0.5, blocks(n, k)
    exact = (a.double() * sa.double().repeat_interleave(128, 1)) @ (b.double() * wide_b).T
    d = torch.empty(m, n)
    layouts.fp8_gemm_nt((a, sa.T.contiguous().T), (b, sb), d)
    parts = a.reshape(2, 3, k), sa.reshape(2, 3, 2)
    vllm = layouts.w8a8_triton_block_scaled_mm(parts[0], b, parts[1], sb, [128, 128], torch.float32)
    aiter = layouts.gemm_a8w8_blockscale(a, b, sa, sb, torch.float32)
    for found in (d, vllm.view(m, n), aiter):
        torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-4)
    assert vllm.shape == (2, 3, n)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_vllms_scales_of_rows_and_of_one_element(dtype: torch.dtype) -> None:
    m, n, k = 6, 200, 256
    a, b = operand(m, k, dtype), operand(n, k, dtype)
    for sa, sb in ((torch.rand(m, 1), torch.rand(n, 1)), (torch.rand(1), torch.rand(n))):
        found = layouts.triton_scaled_mm(a, b.T, sa, sb, torch.float32)
        exact = (a.double() * sa) @ (b.double() * sb.reshape(-1, 1)).T
        torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-4)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("scales", "dtype"), [("row", E4M3), ("row", INT8), ("block", E4M3)])
def test_a_layer_computes_what_its_dequantised_checkpoint_does(scales: str, dtype: Any) -> None:
    n, k = 200, 256
    weight, bias = operand(n, k, dtype).contiguous(), torch.randn(n)
    wide: torch.Tensor
    if scales == "row":
        scale = torch.rand(n) / 8
        state, wide = {"weight_scale": scale}, scale.double()[:, None]
    else:
        scale, wide = blocks(n, k)
        state = {"weight_scale_inv": scale}
    made = layer.ScaledLinear(k, n, bias=True, scales=scales, dtype=dtype, activation="relu")
    made.load_state_dict({"weight": weight, "bias": bias, **state})
    x = torch.randn(2, 3, k, dtype=torch.float16)
    exact = torch.relu(x.double() @ (weight.double() * wide).T + bias)
    off = (made(x).double() - exact).abs().max() / exact.abs().max()
    assert made(x).dtype == torch.float16
    assert off < 0.05  # x is rounded to 3 bits
    assert not any(p.requires_grad for p in made.parameters())
