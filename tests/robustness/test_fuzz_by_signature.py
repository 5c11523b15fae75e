"""Wrong types and shapes for every parameter of what stands on runs: analysis, patching, lenses, circuits, traces, ...

The parameters are those of the signatures; a right call is written down for each function. Every wrong value gives a
result, or an error of ours.
"""

from __future__ import annotations
