"""A GPT-2 computed head by head, each input a sum of what was written before."""

import torch


class ByHand:
    """The model's forward, receiver by receiver.

    Args:
        model: a GPT-2.
        graph: its graph, for names only.
    """

    def __init__(self, model, graph):
        self.model, self.graph = model, graph
        self.d_head = model.config.n_embd // model.config.n_head

    def __call__(
        self,
        tokens,
        embed=None,
        replaced=None,
        other=None,
        bumps=None,
        outputs=None,
        inputs=None,
        kept=None,
    ):
        """The logits.

        Args:
            tokens: ``[batch, pos]``.
            embed: what enters the first block.
            replaced: pairs (receiver, sender) that carry what stands in `other`, by sender's name.
            bumps: what is added to a receiver's input, by name.
            outputs: what senders write instead, by name.
            inputs: what receivers read instead, by name.
            kept: of pairs, which coordinates stay where a pair carries what stands in `other`.
        """
        transformer = self.model.transformer
        places = torch.arange(tokens.shape[1])
        wrote = {
            "embed": transformer.wte(tokens) + transformer.wpe(places) if embed is None else embed
        }
        biases = 0
        self.read = {}

        def reads(receiver):
            parts = [
                (
                    value
                    if (receiver, sender) not in (replaced or ())
                    else (
                        torch.where(kept[receiver, sender], value, other[sender])
                        if kept
                        else other[sender]
                    )
                )
                for sender, value in wrote.items()
            ]
            x = sum(parts) + biases
            if bumps and receiver in bumps:
                x = x + bumps[receiver]
            if inputs and receiver in inputs:
                x = inputs[receiver]
            self.read[receiver] = x
            return x

        def writes(sender, value):
            wrote[sender] = outputs[sender] if outputs and sender in outputs else value

        for layer, block in enumerate(transformer.h):
            fused, projected = block.attn.c_attn, block.attn.c_proj
            heads = {}
            for head in range(self.model.config.n_head):
                at = slice(head * self.d_head, (head + 1) * self.d_head)
                q, k, v = (
                    block.ln_1(reads(f"L{layer}H{head}.{letter}"))
                    @ fused.weight[:, i * self.model.config.n_embd :][:, at]
                    + fused.bias[i * self.model.config.n_embd :][at]
                    for i, letter in enumerate("qkv")
                )
                scores = q @ k.mT / self.d_head**0.5
                scores = scores.masked_fill(places[None, :] > places[:, None], -torch.inf)
                heads[f"L{layer}H{head}"] = scores.softmax(-1) @ v @ projected.weight[at]
            for name, value in heads.items():
                writes(name, value)
            biases = biases + projected.bias
            writes(f"L{layer}MLP", block.mlp(block.ln_2(reads(f"L{layer}MLP"))))
        self.wrote = wrote
        return self.model.lm_head(transformer.ln_f(reads("logits")))
