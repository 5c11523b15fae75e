"""The entropy of attention: zero where a token sees itself alone, at most that of an even
pattern.
"""

import torch

from bridge import TransformerBridge
from bridge.analysis.attention_entropy import attention_entropy

bridge = TransformerBridge.boot_embedded()
entropy = attention_entropy(bridge.run_with_cache("Mary and John")[1], 2)
assert torch.equal(entropy[..., 0], torch.zeros(1, 4))
assert (entropy <= torch.arange(1, 5).log() + 1e-5).all()
