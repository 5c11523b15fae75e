"""``transformer_lens.tools``'s names, each of which says which study of the bridge does the same."""

from bridge.legacy.missing import explain_missing_name

__path__: list[str] = []  # the modules of the table are below it
__getattr__ = explain_missing_name(__name__)
