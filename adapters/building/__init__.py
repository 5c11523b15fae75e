"""Hook points that belong to no block: embeddings, final norms, heads, the unembedding."""
