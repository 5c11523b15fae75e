"""``transformer_lens.tools``'s names, each of which says which study of the bridge does the same."""

from bridge.legacy.table import named

__path__: list[str] = []  # the modules of the table are below it
__getattr__ = named(__name__)
