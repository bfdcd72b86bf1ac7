"""README.md's links lead somewhere, and the error texts that the documentation quotes are those of the code.

(`mkdocs build --strict` looks after the links of the other pages.)
"""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT, blocks

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(path):
    """Those of a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("target", "anchor"), LINK.findall((ROOT / "README.md").read_text()))
def test_a_link_of_the_readme_leads_somewhere(target, anchor):
    path = ROOT / (target or "README.md")
    assert path.exists()
    assert not anchor or anchor in anchors(path)


def literals():
    """The pieces of text in the code, without what an f-string fills in."""
    for path in (ROOT / "horovod_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("block", blocks("text"), ids=lambda block: f"{block.page}:{block.line}")
def test_a_quoted_error_is_in_the_code(block):
    fragments = [fragment.strip(" .\n") for fragment in block.text.split("...")]
    assert any(fragments)
    for fragment in fragments:
        assert any(fragment in literal for literal in literals()), fragment
