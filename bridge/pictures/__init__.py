"""Pictures of analysis results: one call each.

Pictures are drawn with Altair (Vega-Lite). A notebook shows them directly. They can be saved as a
single HTML file, SVG or PNG, without a network or a browser. They need the extra: ``pip install
'transformer-bridge[pictures]'``.
"""

import importlib.util

_missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f"bridge.pictures needs {' and '.join(_missing)}, which this Python does not have: "
        "pip install 'transformer-bridge[pictures]'"
    )

from bridge.pictures.attention_grids import attention, routing
from bridge.pictures.curves import faithfulness, residual_norms
from bridge.pictures.graphs import CircuitNode, circuit
from bridge.pictures.heat_maps import attribution, composition, heads, heat_map, patching
from bridge.pictures.pictures import Picture, page, together
from bridge.pictures.token_lines import attention_text, chosen_lens, logit_lens, tokens

__all__ = [
    "CircuitNode",
    "Picture",
    "attention",
    "attention_text",
    "attribution",
    "chosen_lens",
    "circuit",
    "composition",
    "faithfulness",
    "heads",
    "heat_map",
    "logit_lens",
    "page",
    "patching",
    "residual_norms",
    "routing",
    "together",
    "tokens",
]
