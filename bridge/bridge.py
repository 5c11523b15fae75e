"""`TransformerBridge`: a Hugging Face model, untouched, with hook points."""

from __future__ import annotations

from bridge.facade.generation import GenerationMethods
from bridge.facade.loading import LoadingMethods


class TransformerBridge(GenerationMethods, LoadingMethods):
    """Wraps a Hugging Face model without changing it.

    Its parameters, state dict, mode and device are the model's own. Hook points cost nothing until someone listens.

    Args:
        hf_model: any model of a supported family, or a subclass, or a PEFT model around one; or one of any other.
        tokenizer: its tokenizer; it is never changed. Without one, the bridge takes tokens only.
        automatic: where the model's class has no adapter, infer one from a run on a few tokens, prove it on the model,
            and say so in the log (`bridge`); `offered` says what it has. False: refuse. ``"always"``: infer one where
            the class has an adapter, too.
        inputs: what the model needs for that run besides tokens, images or sound, by the names of its own arguments, as
            its processor returns them. None: made up, of the sizes that its configuration says.
        declaration: in place of all that, what was declared or inferred of such a model before: what `declaration`
            returned, or the file that it was saved in. It is proved on this model, in a few runs.
        cache_declaration: keep what is inferred in a file, and prove that, in a few runs, when such a model is wrapped
            the next time. (Files are in ``~/.cache/transformer-bridge``, or where the environment's
            ``TRANSFORMER_BRIDGE_CACHE`` says; where that is set and empty, nothing is kept.)
        compare_edits: where processes share the model, compare what hooks make of activations and gradients.
        patience: likewise, how many seconds a hook waits for those of the other processes.

    Attributes:
        original_model: the model.
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        tokenizer: the tokenizer.
        cfg: the facts about the model.
        names: hook points by name and alias.

    Raises:
        UnsupportedModelError: there is no adapter for the model's class, and none could be inferred, or was to be.
        DeclarationError: the declaration that was given is damaged, of another model, or does not hold of this one.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10)))
        >>> bridge.blocks[1].attn.hook_z
        HookPoint(blocks.1.attn.hook_z: [batch pos n_heads d_head])
    """
