"""The layer of 8-bit weights: what it loads, what casts leave of it, and what it refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import costmodel
from costmodel.errors import DeviceError, InvalidInput, ShapeError
from costmodel.nn import ScaledLinear

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
KINDS = [("block", E4M3), ("block", E5M2), ("row", E4M3), ("row", INT8)]
N, K = 200, 256


def scale_name(scales: str) -> str:
    return "weight_scale" if scales == "row" else "weight_scale_inv"


def checkpoint(scales: str, dtype: torch.dtype) -> dict[str, Tensor]:
    weight = torch.randint(-100, 100, (N, K)).to(dtype)
    scale = torch.rand(N) if scales == "row" else torch.rand(2, 2)
    return {"weight": weight, scale_name(scales): scale, "bias": torch.rand(N).bfloat16()}


def loaded(scales: str, dtype: torch.dtype) -> ScaledLinear:
    made = ScaledLinear(K, N, bias=True, scales=scales, dtype=dtype)
    made.load_state_dict(checkpoint(scales, dtype))
    return made


def written_and_read(layer: ScaledLinear) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.bfloat16(),
    "float": lambda layer: layer.float(),
    "to": lambda layer: layer.to("cpu", torch.float16),
    "inside": lambda layer: torch.nn.Sequential(layer).to(torch.bfloat16)[0],
    "copy": copy.deepcopy,
    "file": written_and_read,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("scales", "dtype"), KINDS)
def test_a_cast_of_a_model_leaves_8_bit_weights_and_their_scales(
    scales: str, dtype: torch.dtype, cast: str
) -> None:
    made = loaded(scales, dtype)
    before = {name: p.clone() for name, p in made.named_parameters()}
    after = CASTS[cast](made)
    for name in ("weight", scale_name(scales)):
        assert after.get_parameter(name).dtype == before[name].dtype
        assert torch.equal(after.get_parameter(name).float(), before[name].float())
    torch.testing.assert_close(after.bias.float(), before["bias"].float())
    kinds = {"half": torch.float16, "to": torch.float16, "float": torch.float32}
    assert after.bias.dtype == kinds.get(cast, torch.bfloat16)


def test_a_layer_without_memory_is_cast_and_given_some() -> None:
    made = ScaledLinear(K, N, bias=True, device="meta").half().to_empty(device="cpu")
    assert made.weight.dtype == E4M3
    assert made.weight.device.type == "cpu"


@pytest.mark.parametrize(("scales", "dtype"), KINDS)
def test_scales_are_float32_whatever_the_default_is(scales: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = ScaledLinear(K, N, scales=scales, dtype=dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.get_parameter(scale_name(scales)).dtype == torch.float32


@pytest.mark.parametrize("of_scale", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prefix", ["", "0."])
@pytest.mark.parametrize("scales", ["row", "block"])
def test_scales_of_any_float_type_are_loaded_as_float32(
    scales: str, prefix: str, assign: bool, of_scale: torch.dtype
) -> None:
    state, name = checkpoint(scales, E4M3), scale_name(scales)
    state[name] = state[name].to(of_scale)
    layer = ScaledLinear(K, N, bias=True, scales=scales, device="meta" if assign else "cpu")
    model = torch.nn.Sequential(layer) if prefix else layer
    given = {prefix + key: value for key, value in state.items()}
    model.load_state_dict(given, assign=assign)
    found = layer.get_parameter(name)
    assert found.dtype == torch.float32
    assert torch.equal(found.flatten(), state[name].float().flatten())
    assert given[prefix + name] is state[name]  # the caller's


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("scales", "dtype"), KINDS)
def test_weights_of_another_type_are_refused(scales: str, dtype: torch.dtype, assign: bool) -> None:
    """Cast without their scales they would be other numbers."""
    made = loaded(scales, dtype)
    for other in {E4M3, E5M2, INT8, torch.bfloat16, torch.uint8} - {dtype}:
        before = made.weight.clone()
        state = made.state_dict() | {"weight": torch.ones(N, K).to(other)}
        with pytest.raises(RuntimeError, match=f"weight is {other}: expected {dtype}"):
            made.load_state_dict(state, assign=assign)
        assert torch.equal(made.weight.float(), before.float())


@pytest.mark.parametrize(("scales", "dtype"), KINDS)
@pytest.mark.parametrize("shape", [(2, K - 56), (2, K + 128), (3, 2, 1), (0, 100), (), (0,)])
def test_an_input_of_other_features_is_named(
    scales: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ShapeError, match=r"x .*256"):
        loaded(scales, dtype)(torch.ones(shape))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"scales": "column"}, "row or block"), ({"in_features": 100}, "128"),
        ({"dtype": INT8}, "fp8"), ({"dtype": torch.float16}, "float8_e4m3fn"),
        ({"dtype": torch.float32, "scales": "row"}, "int8"), ({"activation": "tanh"}, "relu"),
    ],
)  # fmt: skip
def test_a_layer_that_no_kernel_serves_is_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        ScaledLinear(**{"in_features": 256, "out_features": 64, **wrong})


def of_layer(x: Tensor, weight: Tensor, made: ScaledLinear) -> Tensor:
    return made(x) + 1


def of_function(x: Tensor, weight: Tensor, made: ScaledLinear) -> Tensor:
    one = torch.ones(1)
    return costmodel.scaled_mm(x.to(weight.dtype), weight.T, one, 0, one, 0) + 1


def of_int_mm(x: Tensor, weight: Tensor, made: ScaledLinear) -> Tensor:
    return costmodel.int_mm(x.to(torch.int8), weight.to(torch.int8).T) + 1


@pytest.mark.parametrize("call", [of_layer, of_function, of_int_mm])
def test_torch_compile_traces_no_product_anew_for_each_m(call: Any) -> None:
    """Each time costs a second, and after eight torch warns and gives up."""
    torch._dynamo.reset()
    compiled, made = torch.compile(call, backend="eager"), loaded("block", E4M3)
    found = []
    for m in range(2, 13):
        with pytest.raises(DeviceError):  # after all checks: the operands are on a CPU
            compiled(torch.ones(m, K), made.weight, made)
        found.append(counters["stats"]["unique_graphs"])
    assert found[2] == found[-1]  # torch takes m for a constant at first
