"""Draws the pictures of the pages, for light and for dark backgrounds.

    python docs/pictures/draw.py

choosing_*.svg is the decision tree of choosing.md, benchmarks_*.svg the ratios of
benchmarks/RESULTS.md.
"""

import re
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "RESULTS.md"
# theme: (text, lines, background of questions, background of answers, two kinds of bars)
THEMES = {
    "light": ("#1b1b1b", "#767676", "#eef3f8", "#dcefe4", "#0072b2", "#e69f00"),
    "dark": ("#ececec", "#8f8f8f", "#223041", "#1d3b2e", "#56b4e9", "#e69f00"),
}
# (x, y, width, lines of text), in a picture of WIDTH x HEIGHT; an answer begins with its code.
WIDTH, HEIGHT = 480, 462
QUESTIONS = [
    (130, 2, 220, ["Can you train?"]),
    (170, 90, 300, ["May it be dense at first?"]),
    (130, 300, 220, ["What should sparsity buy?"]),
]
ANSWERS = [
    (2, 190, 148, ["oneshot", "a few batches"]),
    (166, 190, 148, ["magnitude", "along a ramp"]),
    (330, 190, 148, ["rigl", "with ERK"]),
    (2, 396, 148, ["Unstructured()", "accuracy, storage"]),
    (166, 396, 148, ["graph.nm(2, 4)", "NVIDIA GPUs"]),
    (330, 396, 148, ["Coupled, shrink", "smaller arrays"]),
]
# (x and y of both ends, label)
ARROWS = [
    (180, 40, 76, 190, "no"),
    (300, 40, 320, 90, "yes"),
    (270, 128, 240, 190, "yes"),
    (370, 128, 404, 190, "no"),
    (76, 250, 180, 300, ""),
    (240, 250, 240, 300, ""),
    (404, 250, 300, 300, ""),
    (180, 338, 76, 396, ""),
    (240, 338, 240, 396, ""),
    (300, 338, 404, 396, ""),
]


def svg(width, height, theme, content):
    """A picture with an arrow head and the fonts of the site."""
    text, lines = THEMES[theme][:2]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="system-ui, sans-serif" font-size="15" fill="{text}">',
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{lines}"/></marker>',
            *content,
            "</svg>\n",
        ]
    )


def label(x, y, text, anchor="middle", style=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def box(x, y, width, texts, color, line):
    """A question of one line, or an answer of two."""
    height = 38 if len(texts) == 1 else 60
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{color}" '
        f'stroke="{line}"/>'
    )
    code = 'font-family="ui-monospace, monospace" font-weight="600"'
    for i, text in enumerate(texts):
        style = code if len(texts) == 2 and i == 0 else ""
        yield label(x + width / 2, y + 25 + 22 * i, text, style=style)


def choosing(theme):
    _, lines, question, answer, *_ = THEMES[theme]
    content = []
    for x1, y1, x2, y2, text in ARROWS:
        content.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{lines}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )
        if text:
            content.append(label((x1 + x2) / 2 - 8, (y1 + y2) / 2 + 2, text, "end"))
    for boxes, color in ((QUESTIONS, question), (ANSWERS, answer)):
        for place in boxes:
            content += box(*place, color, lines)
    return svg(WIDTH, HEIGHT, theme, content)


def benchmarks(theme):
    """Bars of the ordinary and the update step of each algorithm; those above 3 end there."""
    _, lines, _, _, ordinary, update = THEMES[theme]
    pattern = r"^\| (\w+) +\| +off \| +([\d.]+) \| +([\d.]+) \|"
    _, section = RESULTS.read_text(encoding="utf-8").split("\n## Training step\n")
    rows = re.findall(pattern, section.split("\n## ")[0], re.MULTILINE)
    left, unit, top = 150, 96, 34
    height = top + 34 * len(rows) + 4
    content = [
        f'<rect x="{left}" y="6" width="12" height="12" fill="{ordinary}"/>',
        label(left + 18, 17, "ordinary step", "start"),
        f'<rect x="{left + 150}" y="6" width="12" height="12" fill="{update}"/>',
        label(left + 168, 17, "mask update", "start"),
    ]
    for i, (name, *ratios) in enumerate(rows):
        y = top + 34 * i
        content.append(label(left - 8, y + 17, name, "end"))
        for j, (ratio, color) in enumerate(
            zip(map(float, ratios), (ordinary, update), strict=True)
        ):
            width = min(ratio, 3) * unit
            content.append(
                f'<rect x="{left}" y="{y + 12 * j}" width="{width:.1f}" height="11" '
                f'fill="{color}"/>'
            )
            place = left + width + 5, y + 12 * j + 10
            content.append(label(*place, f"{ratio:.2f}", "start", 'font-size="11"'))
    x = left + unit
    content.append(
        f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{height}" stroke="{lines}" '
        'stroke-dasharray="3 3"/>'
    )
    return svg(WIDTH, height, theme, content)


if __name__ == "__main__":
    for theme in THEMES:
        for draw in (choosing, benchmarks):
            (FOLDER / f"{draw.__name__}_{theme}.svg").write_text(draw(theme), encoding="utf-8")
