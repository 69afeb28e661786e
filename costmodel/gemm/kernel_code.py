"""The kernels by name, and the identity of their code.

The identity is read from the files: a process that only looks up what was tuned before needs
neither Triton nor the kernels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from costmodel.files import cached_fact
from costmodel.gemm.family import families, family
from costmodel.hardware.target import Toolchain

_Function = tuple[str, str]  # module, name


@functools.cache
def kernel_function(name: str) -> Any:
    """Return the kernel of a family; Triton is imported when the first is asked for.

    Raises:
        ImportError, AttributeError: the installed Triton lacks what this kernel uses.
    """
    module, function = _split(family(name).kernel)
    return getattr(import_module(module), function)


def import_kernels() -> None:
    """Import all that this Triton can have, and have it hash them: a tenth of a second each."""
    for name in families():
        with suppress(ImportError, AttributeError):
            _ = kernel_function(name).cache_key


def kernel_trouble(name: str, toolchain: Toolchain) -> str:
    """Return why a toolchain cannot have a kernel, if the installed Triton tells; else empty."""
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


def kernel_hash(name: str) -> str:
    """Return the hash of a kernel's code and of all it uses, without comments and names of files.

    The copies of operands that a launch may make before it are part of it.
    """
    return _hashes()[name]


def kernel_hashes() -> dict[str, str]:
    """Return :func:`kernel_hash` of every kernel, by name."""
    return dict(_hashes())


@functools.cache
def _hashes() -> dict[str, str]:
    # Parsing takes 20 ms, which a program that only looks up a winner need not wait for.
    files = {Path(__file__)}
    for one in families().values():
        file = _file(_split(one.kernel)[0])
        files |= {file, *file.parent.glob("*.py")} if "." in one.kernel else {file}
    found = cached_fact("kernels", files, _work_out_hashes)
    return found if found.keys() == families().keys() else _work_out_hashes()


def _work_out_hashes() -> dict[str, str]:
    return {name: _hash((one.kernel, *one.beside)) for name, one in families().items()}


def _split(kernel: str) -> _Function:
    module, _, function = kernel.partition(":")
    return module, function


def _hash(kernels: tuple[str, ...]) -> str:
    seen: dict[str, str] = {}
    queue = [_split(kernel) for kernel in kernels]
    while queue:
        module, function = queue.pop()
        if function in seen:
            continue
        node = _functions(module)[function]
        # Unparsed, since what ast.dump prints differs from one Python to the next.
        seen[function] = ast.unparse(_without_docstring(node))
        queue += _used(module, node)
    text = "\n".join(f"{k}:{v}" for k, v in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _used(module: str, node: ast.FunctionDef) -> Iterator[_Function]:
    """Yield the functions of the kernels' files that are named in one of them.

    Not only those called: a warp-specialised region is given its functions by name.
    """
    scope = _scope(module)
    names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return (scope[name] for name in names if name in scope)


@functools.cache
def _scope(module: str) -> dict[str, _Function]:
    """Return the functions that a file knows by name: its own, and those of files beside it."""
    found: dict[str, _Function] = {name: (module, name) for name in _functions(module)}
    for node in _tree(module).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        source = f"{module.rpartition('.')[0]}.{node.module}" if node.level else node.module
        if node.level == 1 or source.startswith("costmodel.kernels."):
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


@functools.cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    """Return the file of a module without importing it."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no file of {module}, which a kernel family names")
    return Path(found.origin)


def _without_docstring(node: ast.FunctionDef) -> ast.FunctionDef:
    if ast.get_docstring(node) is None:
        return node
    rest = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": node.body[1:]})
    return ast.copy_location(rest, node)
