"""Links between the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*/*.md"), *ROOT.glob("*/README.md")]
PAGES += [ROOT / "engine" / "kernels" / "README.md"]
CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text("utf8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text("utf8")))
    for link in (link for link in links if not link.startswith("http")):
        path, _, anchor = link.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), link
        assert not anchor or anchor in anchors(goal), link
