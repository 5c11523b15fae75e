"""What the MLP reads is the stream behind its norm, in families of two shapes."""

import torch
import transformers

from bridge import TransformerBridge

sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}
for cls, config in (
    (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)),
    (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**sizes)),
):
    bridge = TransformerBridge(cls(config).eval())
    names = ["blocks.1.mlp.hook_in", "blocks.1.ln2.hook_out"]
    _, cache = bridge.run_with_cache(torch.tensor([[1, 5, 7, 9]]), names_filter=names)
    assert torch.equal(*(cache[name] for name in names))
