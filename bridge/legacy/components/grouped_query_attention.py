"""``transformer_lens.components.grouped_query_attention``."""

from bridge.legacy.components import GroupedQueryAttention as GroupedQueryAttention
