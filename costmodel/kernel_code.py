"""The kernels by name, and the identity of their code."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from importlib import import_module
from typing import Any

from costmodel.target import Toolchain

__all__ = ["kernel_function", "kernel_hash", "kernel_trouble"]

_MODULES = {
    "pointer": "pointer", "tma": "tma", "tma_persistent": "tma",
    "warp_specialized": "warp_specialized",
}  # fmt: skip


@functools.cache
def kernel_function(name: str) -> Any:
    """The kernel of a configuration; Triton is imported when the first is asked for.

    Raises:
        ImportError, AttributeError: the installed Triton lacks what this kernel uses.
    """
    return getattr(import_module(f"costmodel.kernels.{_MODULES[name]}"), f"gemm_{name}")


def kernel_trouble(name: str, toolchain: Toolchain) -> str:
    """Why a toolchain cannot have a kernel, as far as the installed Triton tells; else empty."""
    import triton

    return _trouble(name) if triton.__version__ == toolchain.triton else ""


@functools.cache
def _trouble(name: str) -> str:
    import triton

    try:
        kernel_function(name)
    except (ImportError, AttributeError) as error:  # Gluon is experimental: its names may go
        return f"toolchain: Triton {triton.__version__} has no {name} kernel ({error})"
    return ""


def _launched(name: str) -> list[Any]:
    """What a measurement of this kernel may launch: itself, and before it the copies it needs."""
    from costmodel.kernels.repack import repack_operands

    kernel = kernel_function(name)
    return [kernel] if name == "pointer" else [kernel, repack_operands]


@functools.cache
def kernel_hash(name: str) -> str:
    """Hash of a kernel's code and of all it uses: comments, names of files and lines left out.

    Empty for a kernel that the installed Triton cannot have.
    """
    if _trouble(name):
        return ""
    seen: dict[str, str] = {}
    queue = _launched(name)
    while queue:
        fn = queue.pop()
        if fn.__name__ in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn.fn)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        # Unparsed, since what ast.dump prints differs from one Python to the next.
        seen[fn.__name__] = ast.unparse(tree)
        # Not only what is called: a warp-specialised region is given its functions by name.
        names = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        scope = fn.fn.__globals__
        queue += [scope[n] for n in names if hasattr(scope.get(n), "arg_names")]
    text = "\n".join(f"{k}:{v}" for k, v in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
