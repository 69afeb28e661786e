"""``python -m costmodel.autotune script.py ...`` or ``-m module ...``: runs a program, tuned."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from costmodel.autotune.replace import replace_triton_autotune


def main() -> None:
    """Run a program in which costmodel tunes what ``triton.autotune`` would."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("expected a script or -m MODULE, such as: python -m costmodel.autotune train.py")
    if arguments[0] in ("-h", "--help"):
        print("python -m costmodel.autotune SCRIPT.py ... (or -m MODULE ...): run it, tuned by us")
        return
    is_module = arguments[0] == "-m"
    name = arguments[is_module]
    if not (_finds(name) if is_module else Path(name).exists()):
        sys.exit(f"there is no {'module' if is_module else 'file'} {name}")
    replace_triton_autotune()
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


def _finds(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return False
        raise  # a package above it imports a module that is missing


if __name__ == "__main__":
    main()
