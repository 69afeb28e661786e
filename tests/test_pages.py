"""mkdocs builds the pages of README and docs without a warning, and all of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, pages, text_of

PAGES = [page for page in pages() if page != "costmodel/README.md"]  # that is for an index


def test_readme_can_be_read_in_one_go() -> None:
    assert len(text_of("README.md").splitlines()) <= 180


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("docs/")])
def test_every_page_is_in_the_navigation(page: str) -> None:
    assert f": {page}\n" in (ROOT / "docs" / "mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, built as `.ci/docs` does."""
    if find_spec("material") is None and not os.environ.get("CI"):
        pytest.skip("no mkdocs-material: `bash .ci/setup test docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "docs"), str(folder)], check=False, text=True,
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_all_of_a_page_is_built(site: Path, page: str) -> None:
    """No table, list or block became a paragraph. Links and anchors are checked by mkdocs."""
    html = (site / page.replace(".md", ".html").replace("README", "index")).read_text()
    assert html.count("<pre") == len(blocks_of(page))
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    assert html.count("<table") == len(re.findall(r"^\|[ |:-]*---[ |:-]*\|$", text, re.MULTILINE))
    paragraphs = re.findall(r"<p>(.*?)</p>", html, re.DOTALL)
    assert [p for p in paragraphs if re.search(r"^(?:[-*|] ?|\d+\. )\S", p, re.MULTILINE)] == []
    for picture in re.findall(r'<img [^>]*src="([^"]*)"', html):
        assert (site / page).parent.joinpath(picture).is_file() or picture.startswith("data:")


def test_names_on_pages_for_users_are_there_after_import_costmodel() -> None:
    """Each is looked up in a process of its own: what another name loads must not help."""
    pattern = r"(?<!from )(?<!import )(?<![\w/.])costmodel(?:\.\w+){2,}(?![/\w])"
    users = [page for page in PAGES if page.startswith(("README", "docs/"))]
    names = {name for page in users for name in re.findall(pattern, text_of(page))}
    modules = {name for name in names if (ROOT / f"{name.replace('.', '/')}.py").is_file()}
    assert names - modules, "such as costmodel.nn.ScaledLinear"
    for name in names - modules:
        program = f"import costmodel; {name}"
        done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
