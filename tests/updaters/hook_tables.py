"""The tables of hooks that docs/howto/own_algorithm.md prints."""

import re

from tests.documents import PAGES

_PAGE = PAGES["docs/howto/own_algorithm.md"]
ROWS = dict(re.findall(r"^\| `(\w+)\(.*?\)` \|.*?\| (.*?) \|.*\|$", _PAGE, re.MULTILINE))
ARGUMENTS = {
    name: set(re.findall(r"`(\w+)`", hooks))
    for name, hooks in re.findall(
        r"^\| `(\w+)` \| [^|]*\| ((?:`\w+`(?:, )?)+) \|", _PAGE, re.MULTILINE
    )
}
