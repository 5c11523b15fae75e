"""The activation function's result times `up` is `hook_post`, and an edit of it reaches the
logits.
"""

import torch
import transformers

from bridge import TransformerBridge

config = transformers.LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61
)
bridge = TransformerBridge(transformers.LlamaForCausalLM(config).eval())
tokens, at = torch.tensor([[1, 5, 7, 9]]), "blocks.1.mlp.hook_act"
logits, cache = bridge.run_with_cache(
    tokens, names_filter=[at, "blocks.1.mlp.hook_pre_linear", "blocks.1.mlp.hook_post"]
)
assert torch.equal(
    cache[at] * cache["blocks.1.mlp.hook_pre_linear"], cache["blocks.1.mlp.hook_post"]
)
assert not torch.equal(
    bridge.run_with_hooks(tokens, fwd_hooks=[(at, lambda act, hook: act * 0)]), logits
)
assert torch.equal(bridge(tokens), logits)
