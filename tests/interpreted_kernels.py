"""The kernels against float64 on the CPU; ``test_kernels.py`` runs these where Triton interprets.

In float16 and float32 only: the interpreter of Triton 3.6.0 computes garbage in bfloat16, and knows
no TF32. Those are tested on a GPU (``gpu/test_kernels_gpu.py``). Tiles are small, since an
interpreted program takes some milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_interpreter import repack_by_triton, run_by_triton

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import DEVICES
from costmodel.kernels.check import count_mismatches
from costmodel.launch.plan import Plan, Workspace
from costmodel.launch.problem import GemmProblem
from costmodel.measure.protocol import TimingProtocol

# The interpreter of Triton 3.6.0 asks this of NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

NAN = float("nan")
SM_COUNT = 3  # few, so that the programs of a persistent kernel walk over several tiles
DEPTHS = (1, 2, 15, 17, 34, 1001)

POINTER = GemmConfig("pointer", 16, 16, 16)
TMA = GemmConfig("tma", 16, 16, 16)
PERSISTENT = GemmConfig("tma_persistent", 16, 16, 16)
CONFIGS = [
    POINTER,
    replace(POINTER, block_n=32, split_k=4),
    TMA,
    replace(TMA, block_n=32, halves=True),
    replace(TMA, split_k=4),
    replace(TMA, block_n=32, halves=True, split_k=2),
    PERSISTENT,
    replace(PERSISTENT, block_n=32, halves=True, flatten=True),
]


def framed(
    rows: int,
    cols: int,
    layout: str = "row",
    fill: float | None = None,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """A matrix inside a buffer of NaN: rows before and after, and 8 elements between its rows.

    Its base and its rows are 16-byte aligned, so that what TMA asks of them holds if the extent
    does. It is random, or all ``fill``.
    """
    if layout == "strided":
        buffer = torch.full((2 * rows + 2, 3 * cols), NAN, dtype=dtype)
        view = buffer[1:-1:2, 1::3]
    else:
        outer, inner = (rows, cols) if layout == "row" else (cols, rows)
        lead = -(-inner // 8) * 8 + 8
        view = torch.full((outer + 2, lead), NAN, dtype=dtype)[1:-1, :inner]
        view = view if layout == "row" else view.T
    view.copy_(torch.randn(rows, cols) if fill is None else torch.full((rows, cols), fill))
    return view


def whole(view: torch.Tensor) -> torch.Tensor:
    """The buffer that a view of ``framed`` lies in."""
    assert view._base is not None
    return view._base


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: GemmConfig,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    *,
    wide: bool | None = None,
    sm_count: int = SM_COUNT,
    workspace: Workspace | None = None,
) -> None:
    workload = Workload.from_tensors(a, b, out, bias=bias is not None, activation=activation)
    assert not why_illegal(config, workload, DEVICES["h100-sxm"])
    if wide is not None:
        workload = replace(workload, code=replace(workload.code, wide=wide))
    plan = Plan(workload, config, sm_count)
    workspace = workspace or Workspace(a.device)
    copies = plan.aligned(a, b, workspace)
    for x, copy in zip((a, b), copies, strict=True):
        if copy is not x:
            whole(copy).fill_(NAN)
    repack_by_triton(plan, (a, b), copies)
    run_by_triton(plan, plan.arguments(*copies, out, bias, plan.scratch(workspace)))


def check(
    a: torch.Tensor, b: torch.Tensor, config: GemmConfig, out: torch.Tensor, **options: Any
) -> None:
    """Run on a poisoned output: right everywhere, and nothing written beside it."""
    run(a, b, out, config, **options)
    precision = GemmProblem(Workload.from_tensors(a, b, out)).precision
    atol, rtol = TimingProtocol().tolerance(precision, a.shape[1])
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=atol, rtol=rtol)
    assert int(whole(out).isnan().sum()) == whole(out).numel() - out.numel(), "wrote beside C"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.fault("B01", "B19")
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_depth(config: GemmConfig, k: int) -> None:
    """A tail of K neither reads past the operands nor counts twice; whole columns are aligned."""
    m, n = (24, 40) if k < 1000 else (16, 32)
    layouts = ("row", "col") if config.kernel == "pointer" else ("col", "row")
    a, b = framed(m, k, layouts[0]), framed(k, n, layouts[1])
    if k > 1000:
        config = replace(config, block_k=64)
    check(a, b, config, framed(m, n, fill=NAN))


@pytest.mark.fault("B01", "B19")
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 40), (37, 1), (15, 17), (16, 16), (37, 23)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ragged_edges(config: GemmConfig, m: int, n: int) -> None:
    """With TMA, K is contiguous and aligned: then m and n may be anything. C is clipped anyway."""
    k, b_layout = (20, "row") if config.kernel == "pointer" else (24, "col")
    check(framed(m, k), framed(k, n, b_layout), config, framed(m, n, fill=NAN))


@pytest.mark.fault("B01")
def test_nothing_to_add_up() -> None:
    out = framed(5, 7, fill=NAN)
    bias = torch.randn(7).half()
    run(torch.empty(5, 0).half(), torch.empty(0, 7).half(), out, POINTER, bias)
    assert torch.equal(out, bias.expand(5, 7))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.fault("B19")
@pytest.mark.parametrize("c_layout", ["row", "col", "strided"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
@pytest.mark.parametrize("a_layout", ["row", "col"])
def test_any_layout_by_tma(a_layout: str, b_layout: str, c_layout: str) -> None:
    """C goes by descriptor where it is row-major and aligned (n = 40), else by pointers."""
    a = framed(24, 40, a_layout)
    for config in (TMA, replace(PERSISTENT, block_n=32, halves=True)):
        check(a, framed(40, 40, b_layout), config, framed(24, 40, c_layout, NAN))
        if b_layout == "col":
            check(a, framed(40, 23, "col"), config, framed(24, 23, c_layout, NAN))


@pytest.mark.fault("B01", "B19")
@pytest.mark.parametrize("b_layout", ["row", "col", "strided"])
@pytest.mark.parametrize("a_layout", ["row", "col", "strided"])
def test_tma_by_aligned_copies(a_layout: str, b_layout: str) -> None:
    """Operands that TMA cannot address: neither their gaps nor those of the copies get in."""
    a, b = framed(21, 17, a_layout), framed(17, 35, b_layout)
    for config in (replace(TMA, split_k=2), replace(PERSISTENT, block_n=32, halves=True)):
        check(a, b, replace(config, repack=True), framed(21, 35, fill=NAN))


def check_copy(x: torch.Tensor, copy: torch.Tensor, memory: torch.Tensor, layout: str) -> None:
    """As ``x``, its rows aligned and padded with zeros, and nothing written past the last."""
    assert torch.equal(copy, x)
    rows = copy.T if layout == "col" else copy
    lead = rows.stride(0)
    assert rows.stride(1) == 1
    assert (2 * lead) % (128 if rows.shape[1] >= 64 else 16) == 0
    filled = memory[: rows.shape[0] * lead].view(-1, lead)
    assert not filled[:, rows.shape[1] :].any()
    assert memory[filled.numel() :].isnan().all()


@pytest.mark.fault("B19")
@pytest.mark.parametrize(
    ("a", "b", "copied"),
    [
        ((21, 24, "col"), (24, 40, "row"), (True, False)),
        ((37, 280, "strided"), (280, 5, "col"), (True, False)),
        ((21, 24, "row"), (24, 35, "row"), (False, True)),
        ((24, 21, "col"), (21, 300, "strided"), (False, True)),
        ((19, 301, "row"), (301, 70, "col"), (True, True)),
        ((70, 19, "col"), (19, 515, "row"), (True, True)),
        ((33, 17, "strided"), (17, 66, "strided"), (True, True)),
        ((1, 1, "row"), (1, 1, "row"), (True, True)),
    ],
)
def test_copies_in_one_launch(
    a: tuple[int, int, str], b: tuple[int, int, str], copied: tuple[bool, bool]
) -> None:
    """Of A, B or both, of several blocks each way; the frames of the operands are not read."""
    operands, out = (framed(*a), framed(*b)), framed(a[0], b[1])
    workload = Workload.from_tensors(*operands, out)
    assert workload.code.needs_repack() == copied
    plan = Plan(workload, replace(TMA, repack=True), SM_COUNT)
    workspace = Workspace(out.device)
    for name, x, elements in zip("ab", operands, plan.repacked, strict=True):
        # More memory than the copy takes, as an earlier call may have left it behind.
        workspace.copy_of(name, x.new_empty(1, 1), "row", elements + 100)
    copies = plan.aligned(*operands, workspace)
    for copy, is_copied in zip(copies, copied, strict=True):
        if is_copied:
            whole(copy).fill_(NAN)
    repack_by_triton(plan, operands, copies)
    for x, copy, is_copied, (_, _, layout) in zip(operands, copies, copied, (a, b), strict=True):
        assert (copy is not x) == is_copied
        if is_copied:
            check_copy(x, copy, whole(copy), layout)


def test_operands_with_one_value_for_all_rows() -> None:
    a, b = torch.randn(1, 20).half().expand(18, 20), torch.randn(20, 1).half().expand(20, 17)
    check(a, b, POINTER, framed(18, 17, fill=NAN))


@pytest.mark.fault("B08")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_wide_offsets_are_the_same_offsets(config: GemmConfig) -> None:
    a, b = framed(24, 40), framed(40, 40)
    narrow, wide = framed(24, 40, "col", NAN), framed(24, 40, "col", NAN)
    check(a, b, config, narrow, wide=False)
    check(a, b, config, wide, wide=True)
    assert torch.equal(narrow, wide)


@pytest.mark.fault("B08")
def test_offsets_past_32_bits() -> None:
    """Operands whose rows are 2**26 elements apart; only the pages that are touched are real."""
    far = torch.empty(2**26 * 33, dtype=torch.float16)
    a = far.as_strided((33, 16), (2**26, 1))
    a.copy_(torch.randn(33, 16))
    b = torch.randn(16, 16).half()
    check(a, b, POINTER, framed(33, 16, fill=NAN))
    out = far.as_strided((33, 16), (2**26, 1), 64)
    a = framed(33, 16)
    assert Workload.from_tensors(a, b, out).code.wide
    run(a, b, out, POINTER)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=4e-3, rtol=2e-3)


# --- other types ---------------------------------------------------------------------------------

TYPES = [(torch.float32, torch.float32), (torch.float16, torch.float32)]
"""Types of A and B, and of C, beside float16 throughout."""


@pytest.mark.fault("B01", "B19", "B57")
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_float32_of_ragged_sizes(
    config: GemmConfig, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """The other dimension of what is contiguous may be anything; an aligned C goes by TMA."""
    for m, n, k in ((24, 40, 35), (37, 8, 1)):
        a_layout, b_layout = ("row", "col") if config.kernel == "pointer" else ("col", "row")
        m = m if config.kernel == "pointer" else 24
        a, b = framed(m, k, a_layout, dtype=dtype), framed(k, n, b_layout, dtype=dtype)
        check(a, b, config, framed(m, n, fill=NAN, dtype=out_dtype))


@pytest.mark.fault("B19", "B57")
@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float16, torch.float16), *TYPES])
@pytest.mark.parametrize("c_layout", ["row", "col", "strided"])
@pytest.mark.parametrize("b_layout", ["row", "col", "strided"])
@pytest.mark.parametrize("a_layout", ["row", "col", "strided"])
def test_any_layout(
    a_layout: str, b_layout: str, c_layout: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """By pointers, and by TMA from aligned copies of what it cannot address."""
    a, b = framed(20, 34, a_layout, dtype=dtype), framed(34, 18, b_layout, dtype=dtype)
    for config in (POINTER, replace(TMA, repack=True)):
        check(a, b, config, framed(20, 18, c_layout, NAN, out_dtype))


# --- order of tiles, splits ----------------------------------------------------------------------


@pytest.mark.parametrize("group_m", [1, 2, 3, 8])
@pytest.mark.parametrize("config", [POINTER, TMA, PERSISTENT], ids=str)
def test_any_order_of_tiles_covers_all(config: GemmConfig, group_m: int) -> None:
    a, b = framed(5 * 16, 16), framed(16, 3 * 16)
    check(a, b, replace(config, group_m=group_m), framed(5 * 16, 3 * 16, fill=NAN))


@pytest.mark.parametrize("sm_count", [1, 4, 100])
@pytest.mark.parametrize("flatten", [False, True])
def test_persistent_programs_on_any_number_of_processors(flatten: bool, sm_count: int) -> None:
    a, b = framed(40, 24), framed(24, 48)
    config = replace(PERSISTENT, flatten=flatten)
    check(a, b, config, framed(40, 48, fill=NAN), sm_count=sm_count)


@pytest.mark.fault("B01")
@pytest.mark.parametrize(("k", "split_k"), [(104, 2), (104, 5), (40, 3), (8, 4)])
@pytest.mark.parametrize("config", [POINTER, TMA, replace(TMA, block_n=32, halves=True)], ids=str)
def test_splits(config: GemmConfig, k: int, split_k: int) -> None:
    """Of 7, 3 and 1 steps, so that some splits have fewer than others, or none.

    The workspace may hold anything; its counters end at zero.
    """
    config = replace(config, split_k=split_k)
    a, b = framed(20, k), framed(k, 40)
    out = framed(20, 40, fill=NAN)
    workspace = Workspace(torch.device("cpu"))
    plan = Plan(Workload.from_tensors(a, b, out), config, SM_COUNT)
    partial, arrivals = workspace.get(plan.workspace_bytes, plan.tiles)
    partial.fill_(NAN)
    check(a, b, config, out, workspace=workspace)
    assert not arrivals.any()
    again = framed(20, 40, fill=NAN)
    check(a, b, config, again, workspace=workspace)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("config", "split_k"),
    [(TMA, 2), (TMA, 8), (TMA, 11), (POINTER, 17), (replace(TMA, block_m=64, block_n=64), 3),
     (replace(POINTER, block_m=128, block_n=128), 3)],
    ids=str,
)  # fmt: skip
def test_splits_are_added_in_order(config: GemmConfig, split_k: int) -> None:
    """Batches of 8, 2 and 1 partial tiles, full and not; the largest tile in two pieces."""
    config = replace(config, split_k=split_k)
    m, n, k = config.block_m, config.block_n, 16 * split_k
    a, b, out = framed(m, k), framed(k, n), framed(m, n, fill=NAN)
    a[:, -1], b[-1], a[0, 0] = 0.0, 0.0, float("inf")  # of the last split and of the first
    a[1, -1], b[-1, 0] = NAN, 1.0
    workspace = Workspace(a.device)
    run(a, b, out, config, workspace=workspace)
    partial, _ = workspace.get(4 * split_k * m * n, 1)
    total = torch.zeros(m, n)
    for part in partial[: split_k * m * n].view(split_k, m, n):
        total += part
    assert torch.equal(out.nan_to_num(7.0), total.half().nan_to_num(7.0))
    assert out[1].isnan().all()
    assert out[0].isinf().all()
    assert out[2:].isfinite().all()


# --- epilogue ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(
    ("config", "types"),
    [
        *((config, (torch.float16, torch.float16)) for config in CONFIGS),
        *((config, types) for config in (POINTER, CONFIGS[5], CONFIGS[7]) for types in TYPES),
    ],
    ids=str,
)
def test_epilogue(
    config: GemmConfig, types: tuple[torch.dtype, torch.dtype], activation: str
) -> None:
    """Bias, activation and result are float32: only a 16-bit result is rounded, at the end."""
    dtype, out_dtype = types
    a, b = framed(20, 24, dtype=dtype), framed(24, 40, dtype=dtype)
    function = getattr(torch.nn.functional, activation, lambda x: x)
    for bias in (None, framed(1, 40, dtype=out_dtype)[0]):
        out = framed(20, 40, fill=NAN, dtype=out_dtype)
        run(a, b, out, config, bias, activation)
        ref = function(a.double() @ b.double() + (0 if bias is None else bias.double()))
        atol, rtol = (2e-5, 1e-5) if out_dtype == torch.float32 else (6e-3, 3e-3)
        torch.testing.assert_close(out.double(), ref, atol=atol, rtol=rtol)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_activations_keep_nan(activation: str) -> None:
    a, b = framed(4, 16), framed(16, 16)
    a[2, 3] = NAN
    out = framed(4, 16, fill=0.0)
    run(a, b, out, POINTER, activation=activation)
    assert out.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert int(out.isnan().sum()) == 16


# --- the correctness gate ------------------------------------------------------------------------


def mismatches(
    out: torch.Tensor, ref: torch.Tensor, size: int, atol: float = 0.25, rtol: float = 0.0
) -> int:
    count = torch.zeros(1, dtype=torch.int32)
    count_mismatches[(-(-size // 16),)](out, ref, count, size, atol, rtol, BLOCK=16)
    return int(count)


@pytest.mark.fault("B09")
@pytest.mark.parametrize(
    ("out", "ref", "wrong"),
    [
        (1.0, 1.0, False),
        (1.25, 1.0, False),  # just within
        (1.2509765625, 1.0, True),  # just not
        (0.75, 1.0, False),
        (0.5, 1.0, True),
        (NAN, 1.0, True),
        (1.0, NAN, True),
        (NAN, NAN, True),
        (float("inf"), 1.0, True),
        (float("-inf"), 1.0, True),
        (float("inf"), 70_000.0, False),  # past the range of float16
        (65_504.0, 70_000.0, True),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_what_counts_as_wrong(out: float, ref: float, wrong: bool) -> None:
    outs, refs = torch.ones(40, dtype=torch.float16), torch.ones(40)
    outs[37], refs[37] = out, ref
    assert mismatches(outs, refs, 40) == wrong


@pytest.mark.fault("B09")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_every_wrong_element_counts_and_no_other() -> None:
    refs = torch.randn(100)
    outs = refs.half()
    outs[::3] = NAN
    outs[90:] = NAN  # past the size
    assert mismatches(outs, refs, 90) == 30
    assert mismatches(torch.full((100,), NAN).half(), refs, 100) == 100
    infinite = torch.full((20,), float("inf"))  # which has no tolerance
    assert mismatches(torch.ones(20).half(), infinite, 20, rtol=1e-2) == 20
    assert mismatches(infinite.half(), infinite, 20, rtol=1e-2) == 0
    refs = torch.tensor([1.0, 100.0, -100.0, 0.0])  # with which the tolerance grows
    outs = (refs + 0.5).half()
    assert mismatches(outs, refs, 4, atol=0.0, rtol=0.01) == 2
    assert mismatches(outs, refs, 4, atol=0.5, rtol=0.0) == 0
