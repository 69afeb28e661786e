"""``.ci/setup``, with a Python that installs nothing and reaches no index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/sh
case "$*" in
    *"pip "*"install "*) exit 0;;
    *"pip config list"*) exit 0;;
    *urlopen*) exit 1;;
esac
exec {sys.executable} "$@"
"""


@pytest.mark.parametrize(
    ("version", "warned"), [("2.13.0+cpu", False), ("2.13.0", False), ("2.12.1", True)]
)
def test_a_download_is_announced_only_where_there_is_one(
    tmp_path: Path, version: str, warned: bool
) -> None:
    """PyTorch's index does not answer, so that torch would come from PyPI."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "setup", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in ((".venv/bin/python", PYTHON), ("bin/nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    card = tmp_path / "site" / "torch-0.dist-info" / "METADATA"
    card.parent.mkdir(parents=True)
    card.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "site"),
    }
    done = subprocess.run(
        ["bash", ".ci/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("takes 4 GB" in done.stderr) is warned
    assert "setup: done" in done.stderr
