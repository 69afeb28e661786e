"""Which arguments a kernel may write, by its TTIR; copies of tensors that undo what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_kernels
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.language.extra import libdevice
from triton.runtime.jit import reinterpret
from triton.tools.tensor_descriptor import TensorDescriptor

from costmodel.autotune.arguments import Snapshot, tensors_of, written


def raw_ttir(fn: Any, signature: dict[str, Any], constants: dict[str, Any] | None = None) -> str:
    """Run Triton's front end alone, which needs no GPU."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source = ASTSource(fn, signature, constants)
    return str(source.make_ir(target, options, codegen, modules, context))


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + i, i < n) + tl.load(y + i, i < n)
    tl.store(out + i, total, i < n)


@triton.jit
def add_in_place(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def atomics(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i))
    tl.atomic_cas(y, 0.0, 1.0)


@triton.jit
def advancing(x, y, out, n, BLOCK: tl.constexpr):
    """Three pointers advance together, and only one of them is written through."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(n):
        total += tl.load(x + i) * tl.load(y + i)
        tl.store(out + i, total)
        x += BLOCK
        y += BLOCK
        out += BLOCK


@triton.jit
def advanced_before(x, y, out, n, BLOCK: tl.constexpr):
    """The pointer that is written through becomes another argument's in the loop."""
    p = y
    for _ in range(n):
        tl.store(p, 1.0)
        p = out
    tl.store(p, tl.load(x))


@triton.jit
def rotated(x, y, out, n, BLOCK: tl.constexpr):
    a, b, c = x, y, out
    for _ in range(n):
        a, b, c = b, c, a
    tl.store(a, 1.0)


@triton.jit
def two_loops(x, y, out, n, BLOCK: tl.constexpr):
    """Values of both loops have the same names in the TTIR."""
    for i in range(n):
        tl.store(y + i, tl.load(x + i))
    for i in range(n):
        tl.store(out + i, 1.0)
        tl.store(out + i, 3.0)


@triton.jit
def by_while(x, y, out, n, BLOCK: tl.constexpr):
    q = x
    p = out
    while tl.load(q) > 0:
        tl.store(p, 0.0)
        q += 1
        p += 1
    tl.store(p, tl.load(y))


@triton.jit
def chosen_by_where(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(tl.where(i < n, x + i, out + i), tl.load(y + i))


@triton.jit
def chosen_by_if(x, y, out, n, BLOCK: tl.constexpr):
    if n > 3:
        p = y
        q = x
    else:
        p = out
        q = x + 1
    tl.store(p, tl.load(q))


@triton.jit
def early_return(x, y, out, n, BLOCK: tl.constexpr):
    if n > 3:
        tl.store(x, 1.0)
        return
    tl.store(out, 1.0)


@triton.jit
def return_in_branch(x, y, out, n, BLOCK: tl.constexpr):
    """Blocks of a function have arguments: pointers, here."""
    if n > 3:
        if n > 5:
            return
        p = y
        q = x
    else:
        p = out
        q = x + 1
    tl.store(p, tl.load(q))


@triton.jit
def reshaped(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    left, _ = tl.split(tl.join(out + i, y + i))
    tile = tl.trans(left[:, None] + i[None, :])
    tl.device_print("tile", tile)
    tl.store(tl.reshape(tile, [BLOCK * BLOCK]), tl.load(x))


@triton.jit
def block_pointers(x, y, out, n, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (n, n), (n, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    target = tl.make_block_ptr(out, (n, n), (n, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    for _ in range(n):
        tl.store(target, tl.load(source, boundary_check=(0,)), boundary_check=(0,))
        source = tl.advance(source, (0, BLOCK))
        target = tl.advance(target, (0, BLOCK))


@triton.jit
def device_descriptors(x, y, out, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n, n], [n, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [n, n], [n, 1], [BLOCK, BLOCK])
    sums = tl.make_tensor_descriptor(y, [n, n], [n, 1], [BLOCK, BLOCK])
    for i in range(n):
        target.store([i, 0], source.load([i, 0]))
        sums.atomic_add([i, 0], source.load([i, 0]))


@triton.jit
def descriptor_scatter(x, y, out, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n, n], [n, 1], [1, BLOCK])
    target = tl.make_tensor_descriptor(out, [n, n], [n, 1], [1, BLOCK])
    rows = tl.arange(0, BLOCK)
    target.scatter(source.gather(rows, 0), rows, 0)


@triton.jit
def passed_descriptors(x, y, out, n, BLOCK: tl.constexpr):
    out.store([0, 0], x.load([0, 0]))


@triton.jit
def put(pointer, value):
    tl.store(pointer, value)


@triton.jit(noinline=True)
def put_apart(pointer, value):
    tl.store(pointer, value)


@triton.jit
def moved(pointer, by):
    return pointer + by


@triton.jit
def both_moved(a, b, by):
    return moved(a, by), moved(b, by)


@triton.jit
def through_helper(x, y, out, n, BLOCK: tl.constexpr):
    put(out, tl.load(moved(x, n)))


@triton.jit
def through_noinline(x, y, out, n, BLOCK: tl.constexpr):
    put_apart(moved(out, n), tl.load(moved(x, n)))


@triton.jit
def through_tuple(x, y, out, n, BLOCK: tl.constexpr):
    """One helper moves all pointers, and gives back two of them."""
    a, b = both_moved(x, y, n)
    c, _ = both_moved(out, a, n)
    tl.store(c, tl.load(a) + tl.load(b))


@triton.jit
def tuples(x, y, out, n, BLOCK: tl.constexpr):
    tl.store(y[1], tl.load(y[0]) + tl.load(x))


@triton.jit
def loaded_pointer(x, y, out, n, BLOCK: tl.constexpr):
    tl.store(tl.load(y.to(tl.pointer_type(tl.pointer_type(tl.float32)))), tl.load(x))


@triton.jit
def loaded_or_passed(x, y, out, n, BLOCK: tl.constexpr):
    loaded = tl.load(y.to(tl.pointer_type(tl.pointer_type(tl.float32))))
    tl.store(tl.where(n > 1, loaded, out), tl.load(x))


@triton.jit
def put_at(address, value):
    tl.store(address.to(tl.pointer_type(tl.float32)), value)


@triton.jit
def through_number(x, y, out, n, BLOCK: tl.constexpr):
    put_at(n.to(tl.int64), tl.load(x))


@triton.jit
def number_or_passed(x, y, out, n, BLOCK: tl.constexpr):
    number = n.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(tl.where(n > 1, number, out), tl.load(x))


@triton.jit
def number_as_pointer(x, y, out, n, BLOCK: tl.constexpr):
    tl.store(n.to(tl.int64).to(tl.pointer_type(tl.float32)), tl.load(x))


@triton.jit
def loaded_addresses(x, y, out, n, BLOCK: tl.constexpr):
    """Addresses are read from memory, but only to load from them."""
    p = tl.load(y.to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(p))


@triton.jit
def assembly_on_pointer(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], 0; mov.b32 $0, 0;", "=r,l", [out + i], tl.int32, False, 1
    )


@triton.jit
def assembly_on_values(x, y, out, n, BLOCK: tl.constexpr):
    """The assembly's text looks like MLIR."""
    i = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        '{ mov.b32 $0, $1; // %x = "tt.store" @y {', "=r,r", [tl.load(x + i)], tl.float32, True, 1
    )
    tl.device_print("%y = tt.store {", n)
    tl.store(out + i, libdevice.pow(value, value))


@triton.jit
def reduces(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.sort(tl.cumsum(tl.load(x + i), 0))
    tl.device_assert(n > 0, "{")
    tl.store(out, tl.sum(value, 0) + tl.max(tl.load(y + i), 0))


@triton.jit
def assembly_on_address(x, y, out, n, BLOCK: tl.constexpr):
    """The address goes into the assembly as a number."""
    at = out.to(tl.int64) + 4
    tl.store(x, tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,l", [at], tl.int32, True, 1))


@triton.jit
def assembly_with_effects(x, y, out, n, BLOCK: tl.constexpr):
    """The assembly gets an address that was loaded."""
    at = tl.load(x.to(tl.pointer_type(tl.int64)))
    tl.inline_asm_elementwise("st.global.b32 [$1], 0;", "=r,l", [at], tl.int32, False, 1)


@triton.jit
def writes_nothing(x, y, out, n, BLOCK: tl.constexpr):
    tl.device_print("sum", tl.load(x) + tl.load(y))


POINTERS = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
DESCRIPTORS = POINTERS | {"x": "tensordesc<fp32[32,32]>", "out": "tensordesc<fp32[32,32]>"}
TUPLES = POINTERS | {"y": ("*fp32", "*fp32", "constexpr"), "out": "constexpr"}

KERNELS: list[tuple[Any, set[str] | None]] = [
    (add, {"out"}),
    (add_in_place, {"x"}),
    (atomics, {"y", "out"}),
    (advancing, {"out"}),
    (advanced_before, {"y", "out"}),
    (rotated, {"x", "y", "out"}),
    (two_loops, {"y", "out"}),
    (by_while, {"out"}),
    (chosen_by_where, {"x", "out"}),
    (chosen_by_if, {"y", "out"}),
    (early_return, {"x", "out"}),
    (return_in_branch, {"x", "y", "out"}),  # arguments of blocks are not told apart
    (reshaped, {"y", "out"}),
    (block_pointers, {"out"}),
    (device_descriptors, {"y", "out"}),
    (descriptor_scatter, {"out"}),
    (passed_descriptors, {"out"}),
    (through_helper, {"out"}),
    (through_noinline, {"out"}),
    (through_tuple, {"out"}),
    (tuples, {"y[1]"}),
    (loaded_pointer, None),
    (loaded_or_passed, None),
    (number_as_pointer, None),
    (number_or_passed, None),
    (through_number, None),
    (loaded_addresses, {"out"}),
    (assembly_on_pointer, None),
    (assembly_on_values, {"out"}),
    (reduces, {"out"}),
    (assembly_on_address, None),
    (assembly_with_effects, None),
    (writes_nothing, set()),
]


def written_by(fn: Any) -> frozenset[str] | None:
    """Ask about one of the kernels above."""
    signature = {passed_descriptors: DESCRIPTORS, tuples: TUPLES}.get(fn, POINTERS)
    constants: dict[Any, Any] = {"BLOCK": 32}
    if fn is tuples:
        constants |= {"out": None, (1, 2): 7}
    return written(raw_ttir(fn, signature, constants), signature)


@pytest.mark.parametrize(("fn", "expected"), KERNELS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_kernel_writes_these_arguments(fn: Any, expected: set[str] | None) -> None:
    """An argument that is only read is not counted, and none that is written is missed."""
    assert written_by(fn) == expected


def test_what_is_not_ttir_may_write_all() -> None:
    """Text without an entry function, or of Gluon, is not understood."""
    ttir = raw_ttir(add, POINTERS, {"BLOCK": 32})
    assert written("", POINTERS) is None
    assert written(ttir.replace("module {", 'module attributes {"ttg.num-warps" = 4 : i32} {'),
                   POINTERS) is None  # fmt: skip
    assert written(ttir, {"x": "*fp32"}) is None, "another kernel's signature"


@pytest.mark.parametrize(
    "line",
    [
        "tt.new_operation %out : !tt.ptr<f32>",
        "%0 = tt.call @elsewhere(%out) : (!tt.ptr<f32>) -> i32",
        "tt.store %unknown, %n : !tt.ptr<f32>",
    ],
)
def test_an_operation_that_is_not_known_may_write_all(line: str) -> None:
    """A later Triton may have operations that write."""
    ttir = raw_ttir(add, POINTERS, {"BLOCK": 32})
    assert written(ttir.replace("    tt.return", f"    {line}\n    tt.return"), POINTERS) is None


def test_tensors_are_found_wherever_triton_takes_them() -> None:
    a, b = torch.zeros(16, 16), torch.zeros(4)
    descriptor = TensorDescriptor.from_tensor(a, [8, 8])
    args = {
        "plain": a,
        "pair": (1, (b, None)),
        "descriptor": descriptor,
        "wrapper": reinterpret(b, tl.int32),
        "both": TensorDescriptor(reinterpret(a, tl.int32), [16, 16], [16, 1], [8, 8]),
        "none": None,
        "number": 3,
        "hidden": SimpleNamespace(data_ptr=lambda: 0),
    }
    found = tensors_of(args)
    assert set(found) == {"plain", "pair[1][0]", "descriptor", "wrapper", "both"}
    assert all(found[name] is a for name in ("plain", "descriptor", "both"))
    assert all(found[name] is b for name in ("pair[1][0]", "wrapper"))
    assert set(tensors_of(args, {"plain", "pair"})) == {"plain", "pair[1][0]"}
    assert set(tensors_of(args, {"pair[1][0]"})) == {"pair[1][0]"}


def changes(before: Snapshot) -> str:
    """Compare with what the tensors hold now."""
    return before.differs_from(Snapshot(before.tensors))


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool]


@st.composite
def views(draw: st.DrawFn, storage: torch.UntypedStorage) -> torch.Tensor:
    """Draw any view of a storage: strides of 0, overlapping elements, any dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    left = len(storage) // dtype.itemsize - 1
    offset = draw(st.integers(0, left))
    left -= offset
    size, stride = [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 7))
        n = draw(st.integers(0, 4 if not step else min(4, left // step + 1)))
        left -= max(n - 1, 0) * step
        size.append(n)
        stride.append(step)
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_restoring_undoes_every_write(data: st.DataObject) -> None:
    """Whatever views of one or two storages are written, all bytes are as before."""
    storages = [torch.randint(256, (n,), dtype=torch.uint8) for n in (80, 128)]
    before = [x.clone() for x in storages]
    tensors = {
        f"t{i}": data.draw(views(data.draw(st.sampled_from(storages)).untyped_storage()))
        for i in range(data.draw(st.integers(0, 4)))
    }
    snapshot = Snapshot(tensors)
    assert changes(snapshot) == ""
    for tensor in tensors.values():
        for index in product(*map(range, tensor.shape)):
            steps = zip(index, tensor.stride(), strict=True)
            where = tensor.storage_offset() + sum(i * step for i, step in steps)
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw[where * tensor.itemsize :][: tensor.itemsize] += 77
    snapshot.restore()
    assert all(torch.equal(x, y) for x, y in zip(storages, before, strict=True))
    assert changes(snapshot) == ""


def test_only_what_the_tensors_span_is_copied_and_put_back() -> None:
    """What lies beside a tensor is another's: it changes meanwhile, and stays."""
    base = torch.zeros(100)
    snapshot = Snapshot({"a": base[21:40], "b": base[30:51], "c": base[81:90:2]})
    base += 1
    snapshot.restore()
    kept = [*range(21), *range(51, 81), *range(90, 100)]
    assert base.nonzero().flatten().tolist() == kept


def test_autograd_does_not_see_the_restoring() -> None:
    """A tensor that a backward pass has saved keeps its version."""
    x = torch.ones(4, requires_grad=True)
    y = (x * 2).exp()
    snapshot = Snapshot({"x": x, "y": y})
    y.untyped_storage().fill_(0)
    snapshot.restore()
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach())


def test_a_difference_names_the_tensor_and_says_how_much() -> None:
    out, count = torch.ones(8), torch.ones(8, dtype=torch.int32)
    first = Snapshot({"out": out, "state[1]": count})
    out[3] += 5
    count[0] += 1
    count[1] += 1
    said = changes(first)
    assert "out: 1 of 8 elements differ" in said
    assert "at most by 5" in said
    assert "state[1]: 2 of 8 elements differ" in said
    second = Snapshot({"out": out, "state[1]": count})
    first.restore()
    assert changes(first) == ""
    assert first.differs_from(second) == said
    assert "2 of 8" in second.differs_from(first)


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [
        (torch.float64, 1e-9, 1e-4),
        (torch.float32, 1e-4, 0.1),
        (torch.float16, 2e-3, 0.1),
        (torch.bfloat16, 8e-3, 0.1),
        (torch.float8_e4m3fn, 0.125, 4.0),
        (torch.complex64, 1e-4, 0.1),
    ],
)
def test_floats_may_differ_by_their_rounding(dtype: torch.dtype, near: float, far: float) -> None:
    """Two right candidates add in different orders."""
    torch.manual_seed(0)
    values = torch.randn(64, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    values[0] = values[10:60] = 0
    out = values.to(dtype)
    snapshot = Snapshot({"out": out})
    out.copy_(values * (1 + near))
    out[0] = near  # where terms have cancelled
    assert changes(snapshot) == ""
    out.copy_(torch.where(torch.arange(64) == 5, values + far * 2, values))
    assert "out: 1 of " in changes(snapshot)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_agrees_only_with_itself(value: float) -> None:
    out = torch.tensor([1.0, value, 3.0])
    snapshot = Snapshot({"out": out})
    assert changes(snapshot) == ""
    for other in (1.0, torch.nan, torch.inf, -torch.inf):
        out[1] = other
        same = other == value or (other != other and value != value)
        assert bool(changes(snapshot)) is not same
    snapshot.restore()
    out[0] = value
    assert "1 of 3" in changes(snapshot), "a number became one that is not finite"


def test_bools_and_odd_floats_are_compared_too() -> None:
    flags = torch.tensor([True, False])
    scales = torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu)
    snapshot = Snapshot({"flags": flags, "scales": scales})
    flags[1] = True
    scales.view(torch.uint8)[0] += 9
    assert "flags: 1 of 2" in changes(snapshot)
    assert "scales: 1 of 2" in changes(snapshot)


@pytest.mark.slow
def test_random_kernels_write_no_more_than_is_said(tmp_path: Path) -> None:
    """Triton's interpreter runs them: what has changed in memory is the truth."""
    count = 150
    path = tmp_path / "random_kernels_file.py"
    path.write_text(random_kernels.random_source(count))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", random_kernels.__file__, path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    truth = {name: set(changed) for name, changed in json.loads(done.stdout).items()}
    signature = {**dict.fromkeys(random_kernels.ARGUMENTS, "*fp32"), "n": "i32"}
    said = {
        name: written(raw_ttir(kernel, signature), signature)
        for name, kernel in random_kernels.load(path).items()
    }
    assert len(truth) == len(said) == count
    missed = [name for name, found in said.items() if found is None or truth[name] - found]
    assert not missed
    # Some branches are taken for no `n`, so that not all can be equal.
    assert sum(said[name] == truth[name] for name in said) > count / 2
