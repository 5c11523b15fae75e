"""`AnalysedRun` and `require`, which are in `analysis.py`, under the path that older programs import."""

from bridge.analysis.analysis import AnalysedRun as AnalysedRun
from bridge.analysis.analysis import require as require
