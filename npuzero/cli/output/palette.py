"""One palette and one style for all pictures of the project: ``npuzero plan --plot``, benchmarks, examples.

A subject has the same colour everywhere: parameters are dark blue in memory, and so is the all-gather that carries
them. The hues are Okabe and Ito's (distinguishable for colour-blind readers), darkened or lightened so that adjacent
colours also differ in lightness and can be distinguished in grey print; a test checks both. Pictures are opaque and
light, so that they look the same on light and dark pages. This module does not need matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

#: The parts of a rank's memory, in stacking order.
PARTS = {
    "parameters": "#0B3C6F",
    "gradients": "#C1480B",
    "states": "#56A9DC",
    "buffers": "#BEC3C9",
    "activations": "#F3E27A",
}
#: Legend names that differ from the keys in reports.
NAMES = {"states": "optimizer states"}
#: Memories other than the device, in stacking order.
FARTHER = {"host": "#1D7A5F", "nvme": "#B07CC6"}
#: A rank's use of time.
WORK = {"compute": FARTHER["host"], "communication": FARTHER["nvme"], "waiting": "#F4BFD4"}
#: Bytes sent by collective: gathers carry parameters, reductions gradients.
SENT = {
    "all_gather": PARTS["parameters"],
    "reduce_scatter": PARTS["gradients"],
    "all_reduce": WORK["communication"],
    "all_to_all": PARTS["activations"],
    "control": PARTS["buffers"],
}

TEXT, FAINT, GRID, PAPER, SHADE = "#1F2328", "#59636E", "#DDE1E6", "#FFFFFF", "#F3F4F6"
#: For maps: least to most, and infeasible points.
MAP, MISFIT = ("#E8F1FA", PARTS["states"], PARTS["parameters"]), "#F6E3DC"
#: For comparisons: this project, the competitor, and the goal.
OWN, OTHER, GOAL = PARTS["parameters"], "#9AA1AA", PARTS["gradients"]

#: Colours and dashes of curves without a fixed meaning; in grey, equally light colours differ in their dashes.
CURVES: tuple[tuple[str, Any], ...] = (
    (PARTS["gradients"], "-"),
    (PARTS["states"], "-"),
    (PARTS["parameters"], "-"),
    (WORK["compute"], (0, (6, 1.2))),
    (WORK["communication"], (0, (1.4, 0.9))),
    ("#B59300", (0, (3, 1))),
)

#: matplotlib's settings: ``rc_context(STYLE)``.
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "hatch.linewidth": 0.6,
}


def text_colour(colour: str) -> str:
    """Return a text colour readable on ``colour`` (``"#RRGGBB"``): dark on light colours, else white."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return TEXT if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.22 else PAPER


def add_caption(figure: Figure, finding: str, subject: str, source: str, legend: Sequence[Artist] = ()) -> None:
    """Add the finding, the subject and a legend above ``figure``, and the source below it."""
    rows = "\n" * (2 if legend else 1)  # room for the text between the finding and the axes
    figure.suptitle(finding + rows, fontsize=14, fontweight="bold", x=0.01, ha="left")
    inches = figure.get_figheight()
    figure.text(0.01, 1 - 0.36 / inches, subject, fontsize=10, color=FAINT, va="top")
    figure.supxlabel(source, fontsize=9, color=FAINT, x=0.99, ha="right")
    if legend:
        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.003, 1 - 0.53 / inches)}
        figure.legend(handles=legend, ncols=len(legend), fontsize=10, borderaxespad=0.2, **where)
