"""A declared BitNet is proved, and nothing is inferred."""

import transformers

from adapters import verify
from adapters.registry import is_declared
from bridge import TransformerBridge

config = transformers.BitNetConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=61,
    bos_token_id=1,
    eos_token_id=2,
)
model = transformers.BitNetForCausalLM(config).eval()
assert is_declared(type(model))
report = verify(TransformerBridge(model))
assert report.passed, report
