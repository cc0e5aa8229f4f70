"""The README and the pages of the site, with the programs and commands that they show."""

import re

from tests.helpers import ROOT

PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}


def blocks(language):
    """The blocks of code in a language: {"page:line": text}."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        f"{page}:{text.count(chr(10), 0, match.start()) + 2}": match[1]
        for page, text in PAGES.items()
        for match in pattern.finditer(text)
    }
