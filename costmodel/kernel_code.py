"""The kernels by name, and the identity of their code."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from typing import Any

__all__ = ["kernel_function", "kernel_hash"]


@functools.cache
def kernel_function(name: str) -> Any:
    """The kernel of a configuration; Triton is imported when the first is asked for."""
    from costmodel.kernels import pointer, tma, warp_specialized

    return {
        "pointer": pointer.gemm_pointer,
        "tma": tma.gemm_tma,
        "tma_persistent": tma.gemm_tma_persistent,
        "warp_specialized": warp_specialized.gemm_warp_specialized,
    }[name]


def _launched(name: str) -> list[Any]:
    """What a measurement of this kernel may launch: itself, and before it the copies it needs."""
    from costmodel.kernels.repack import repack_operands

    kernel = kernel_function(name)
    return [kernel] if name == "pointer" else [kernel, repack_operands]


@functools.cache
def kernel_hash(name: str) -> str:
    """Hash of a kernel's code and of all it uses: comments, names of files and lines left out."""
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
