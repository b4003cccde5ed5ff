"""The table of statistics that are modules of their own; docs/architecture.md says how to add one."""

from analysis.evaluation.base import Statistic
from analysis.evaluation.bispectrum import Bispectrum
from analysis.evaluation.coverage import Coverage
from analysis.evaluation.phase_diagram import PhaseDiagram

# By the name in evaluation.npz and evaluation.json, and of the picture; in the order of the report.
STATISTICS: dict[str, type[Statistic]] = {
    "phase_diagram": PhaseDiagram,
    "bispectrum": Bispectrum,
    "coverage": Coverage,
}
