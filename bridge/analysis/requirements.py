"""`AnalysedRun` and `require`, where the documentation has shown them."""

from bridge.analysis.analysis import AnalysedRun as AnalysedRun
from bridge.analysis.analysis import require as require
