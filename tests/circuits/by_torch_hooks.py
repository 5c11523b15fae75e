"""One edge replaced in a Hugging Face model with plain torch hooks, for other kinds of blocks than
GPT-2's.
"""

from contextlib import contextmanager


class ByTorchHooks:
    """Senders and edges of a Llama-like model or of GPT-NeoX.

    Args:
        model: the Hugging Face model.
        post_norms: norms follow attention and MLP (Gemma 2).
    """

    def __init__(self, model, post_norms=False):
        self.model, self.post_norms = model, post_norms
        self.neox = hasattr(model, "gpt_neox")
        base = model.gpt_neox if self.neox else model.model
        self.layers = list(base.layers)
        self.final_norm = base.final_layer_norm if self.neox else base.norm
        self.n_heads = model.config.num_attention_heads
        self.n_key_heads = getattr(model.config, "num_key_value_heads", None) or self.n_heads

    def output_projection(self, layer):
        return layer.attention.dense if self.neox else layer.self_attn.o_proj

    def mlp(self, layer):
        return layer.post_feedforward_layernorm if self.post_norms else layer.mlp

    def mlp_norm(self, layer):
        return (
            layer.pre_feedforward_layernorm if self.post_norms else layer.post_attention_layernorm
        )

    @contextmanager
    def hooks(self, *some):
        """Torch hooks: (module, function of (inputs, output) or of inputs alone, whether it is the
        latter).
        """
        handles = [
            (
                module.register_forward_pre_hook(lambda m, args, f=f: f(args[0]))
                if before
                else module.register_forward_hook(lambda m, args, out, f=f: f(args[0], out))
            )
            for module, f, before in some
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def senders(self, tokens):
        """What each sender writes, by name, and the logits."""
        found, some = {}, []

        def keep(name):
            return lambda x, out: found.update({name: out})

        def heads(index, layer):
            def split(z, whole):
                width = z.shape[-1] // self.n_heads
                for head in range(self.n_heads):
                    at = slice(head * width, (head + 1) * width)
                    share = z[..., at] @ self.output_projection(layer).weight[:, at].T
                    if self.post_norms:
                        norm, bias = (
                            layer.post_attention_layernorm,
                            self.output_projection(layer).bias,
                        )
                        if bias is not None:
                            share = (
                                share + bias / self.n_heads
                            )  # what the norm makes of it differs from run to run
                        share = (
                            share
                            * (whole.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
                            * (1 + norm.weight)
                        )
                    found[f"L{index}H{head}"] = share

            return split

        some.append((self.layers[0], lambda x: found.update(embed=x), True))
        for index, layer in enumerate(self.layers):
            some.append((self.output_projection(layer), heads(index, layer), False))
            some.append((self.mlp(layer), keep(f"L{index}MLP"), False))
        with self.hooks(*some):
            logits = self.model(tokens).logits
        return found, logits

    def with_edge(self, tokens, receiver, change):
        """The logits where one receiver reads `change` more."""
        if receiver == "logits":
            some = [(self.final_norm, lambda x: (x + change,), True)]
        elif receiver.endswith("MLP"):
            layer = self.layers[int(receiver[1:-3])]
            some = [(self.mlp_norm(layer), lambda x: (x + change,), True)]
        else:
            index, rest = receiver[1:].replace("G", "H").split("H")
            head, letter = rest.split(".")
            some = self.into_head(self.layers[int(index)], int(head), letter, change)
        with self.hooks(*some):
            return self.model(tokens).logits

    def into_head(self, layer, head, letter, change):
        """What replaces the columns of one head in the output of a projection."""
        norm = layer.input_layernorm
        module = (
            layer.attention.query_key_value
            if self.neox
            else getattr(layer.self_attn, f"{letter}_proj")
        )
        n = self.n_heads if letter == "q" or self.neox else self.n_key_heads
        width = module.weight.shape[0] // (3 * n if self.neox else n)
        first = (3 * head + "qkv".index(letter)) * width if self.neox else head * width
        read = {}

        def project(x, out):
            out = out.clone()
            out[..., first : first + width] = module.forward(read["y"])[..., first : first + width]
            return out

        return [
            (norm, lambda x, out: read.update(y=norm.forward(x + change)), False),
            (module, project, False),
        ]
