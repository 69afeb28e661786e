"""The product by torch, on the CPU: right in every type, and torch's switch is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costmodel.launch.fast import (
    TorchLaunch,
    float32_precision,
    reference_product,
    torch_multiplies_in_tf32,
    torch_product,
)

SWITCH: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _switch() -> Iterator[None]:
    yield
    set_all()


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float32, torch.float32), (torch.float16, torch.float16),
        (torch.float16, torch.float32), (torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_it_is_the_product(dtype: torch.dtype, out_dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(9, 30).to(dtype), torch.randn(30, 7).to(dtype)
    function = getattr(torch.nn.functional, activation, lambda x: x)
    for bias in (None, torch.randn(7).to(out_dtype)):
        out = torch.full((9, 7), float("nan"), dtype=out_dtype)
        torch_product(a, b, out, bias, activation)
        ref = function(a.double() @ b.double() + (0 if bias is None else bias.double()))
        tolerance = 1e-5 if out_dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), ref, atol=tolerance, rtol=tolerance)


class Watch(TorchDispatchMode):
    """Notes what torch's switch says at each product, which fails if ``error`` is set."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.seen: list[str] = []
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.seen.append(SWITCH.fp32_precision)
            if self.error:
                raise RuntimeError(self.error)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("switch", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_precision_is_what_is_asked_for_and_then_what_it_was(switch: str, tf32: bool) -> None:
    SWITCH.fp32_precision = switch
    one = torch.ones(1, 1)
    with Watch() as watch:
        torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
    assert [found == "tf32" for found in watch.seen] == [tf32]
    assert SWITCH.fp32_precision == switch
    with Watch("out of memory"), pytest.raises(RuntimeError, match="out of memory"):
        torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
    assert SWITCH.fp32_precision == switch
    with Watch() as watch:
        torch.testing.assert_close(reference_product(one, one, None, "none"), one)
    assert watch.seen in (["ieee"], ["none"])
    assert SWITCH.fp32_precision == switch


def test_a_switch_that_says_the_same_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads multiply by it too."""
    SWITCH.fp32_precision = "tf32"
    for name in ("fp32_precision_setter", "cublas_allow_tf32", "float32_matmul_precision"):
        monkeypatch.setattr(torch._C, f"_set_{name}", lambda *_: pytest.fail("touched"))
    with float32_precision(tf32=True):
        assert torch_multiplies_in_tf32()
    monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda *_: pytest.fail("asked"))
    half = torch.ones(2, 2).half()  # which the switch says nothing of
    torch_product(half, half, torch.empty_like(half), None, "none")
    monkeypatch.undo()


@pytest.mark.parametrize("old_name", [False, True])
def test_either_name_of_the_switch_is_followed(old_name: bool) -> None:
    for tf32 in (True, False):
        if old_name:
            SWITCH.allow_tf32 = tf32
        else:
            SWITCH.fp32_precision = "tf32" if tf32 else "ieee"
        assert torch_multiplies_in_tf32() == tf32


# --- the switch inherits, and has older names ---------------------------------------------------

SETTINGS: Any = torch.backends
PARENTS = [(SETTINGS, value) for value in ("none", "ieee", "tf32", "bf16")]
PARENTS += [(SETTINGS.cudnn, value) for value in ("ieee", "tf32")]  # of all CUDA, despite its name
OTHERS = [(None, ""), *PARENTS, *((SETTINGS.mkldnn.matmul, value) for value in ("tf32", "bf16"))]


def set_all(old: str | bool = "highest", *later: tuple[Any, str]) -> None:
    """Set the switch as after a start of torch, then by an old name, then by new ones."""
    torch.set_float32_matmul_precision("highest")
    for switch in (SETTINGS, SETTINGS.cudnn, SWITCH, SETTINGS.mkldnn.matmul):
        switch.fp32_precision = "none"
    if isinstance(old, bool):
        SWITCH.allow_tf32 = old
    elif old != "highest":
        torch.set_float32_matmul_precision(old)
    for switch, value in later:
        switch.fp32_precision = value


def read_by_old_names() -> list[str]:
    """Return what each old name says, or "error"."""
    found = []
    for read in (torch.get_float32_matmul_precision, lambda: SWITCH.allow_tf32):
        try:
            found.append(str(read()))
        except RuntimeError:
            found.append("error")
    return found


def told_by_all() -> list[str]:
    """Return what all names say now, and what the new ones say after each change of a parent."""
    told = read_by_old_names()
    of_cpu = SETTINGS.mkldnn.matmul
    for parent, value in (None, None), *PARENTS, (SETTINGS, "none"), (SETTINGS.cudnn, "none"):
        if parent is not None:
            parent.fp32_precision = value
        told += [SWITCH.fp32_precision, of_cpu.fp32_precision, SETTINGS.cudnn.fp32_precision]
    SWITCH.fp32_precision = of_cpu.fp32_precision = "ieee"  # so that one old name can be read
    return [*told, *read_by_old_names()]


@pytest.mark.fault("N2")
@pytest.mark.parametrize("own", ["", "none", "ieee", "tf32"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other[1])
@pytest.mark.parametrize("old", ["highest", "high", "medium", True, False])
def test_it_inherits_as_before(old: str | bool, other: tuple[Any, str], own: str) -> None:
    """And no old name that could be read before raises meanwhile."""
    others = [other] if other[1] else []
    own_setting = [(SWITCH, own)] if own else []
    for later in (others + own_setting, own_setting + others):
        set_all(old, *later)
        expected = told_by_all()
        for tf32 in (False, True):
            for action in (multiply, multiply_nested, fail):
                set_all(old, *later)
                is_tf32, readable = torch_multiplies_in_tf32(), read_by_old_names()
                assert is_tf32 == (SWITCH.fp32_precision == "tf32")
                meanwhile = action(tf32)
                for before, now in zip(readable, meanwhile, strict=True):
                    assert before == "error" or now != "error"
                assert torch_multiplies_in_tf32() == is_tf32
                assert told_by_all() == expected


def multiply(tf32: bool) -> list[str]:
    """Multiply in a precision; return what the old names say meanwhile in another thread."""
    one, of_cpu = torch.ones(1, 1), SETTINGS.mkldnn.matmul.fp32_precision
    with float32_precision(tf32):
        assert (SWITCH.fp32_precision == "tf32") == tf32
        assert SETTINGS.mkldnn.matmul.fp32_precision in (of_cpu, "ieee")
        torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(read_by_old_names).result()


def multiply_nested(tf32: bool) -> list[str]:
    """Multiply in the other precision inside."""
    with float32_precision(tf32):
        found = multiply(not tf32)
        assert (SWITCH.fp32_precision == "tf32") == tf32
    return found


def fail(tf32: bool) -> list[str]:
    """Multiply and fail."""
    one = torch.ones(1, 1)
    with float32_precision(tf32), Watch("out of memory"):
        with pytest.raises(RuntimeError, match="out of memory"):
            torch_product(one, one, torch.empty(1, 1), None, "none", not tf32)
        return read_by_old_names()


@pytest.mark.fault("N2")
@pytest.mark.parametrize("tf32", [False, True])
def test_a_thread_does_not_take_a_product_for_the_setting(tf32: bool) -> None:
    """It waits until the switch is as the user has set it."""
    SWITCH.fp32_precision = "ieee" if tf32 else "tf32"
    with ThreadPoolExecutor(1) as pool:
        with float32_precision(tf32):
            asked = pool.submit(torch_multiplies_in_tf32)
            assert not wait([asked], timeout=0.05).done
        assert asked.result() != tf32


@pytest.mark.fault("N2")
def test_products_of_two_threads_are_each_in_their_precision() -> None:
    def work(tf32: bool) -> None:
        for _ in range(200):
            with Watch() as watch:
                torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
            assert watch.seen == ["tf32" if tf32 else "none"]

    one = torch.ones(1, 1)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, True), pool.submit(work, True)]:
            done.result()
    assert SWITCH.fp32_precision == "none"


def test_autocast_of_another_kind_of_device_is_left_alone() -> None:
    """Autocast is on in the process then, and stays on when it is switched off here."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        found = TorchLaunch("none").multiplied(a, b, None)
    finally:
        torch.set_autocast_enabled("cuda", before)
    torch.testing.assert_close(found, a @ b)
