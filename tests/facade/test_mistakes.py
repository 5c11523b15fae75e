"""Mistakes of a first hour, and what is said of each."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.hooks.names import UnknownHookError
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


def change(act, hook):
    return act


TOKENS = torch.tensor([[5, 6, 7]])
PLACE = "blocks.0.hook_mlp_out"
MISTAKES = {
    "an argument of another call": (
        lambda b: b(TOKENS, names_filter=PLACE),
        r"^'names_filter' is not an argument of this call: run_with_cache takes it$",
    ),
    "a batch axis taken off a hook": (
        lambda b: b.run_with_hooks(TOKENS, fwd_hooks=[(PLACE, change)], remove_batch_dim=True),
        (
            r"^'remove_batch_dim' is not an argument of this call: run_with_cache takes it; .*"
            r" write `x\[0\]` in the function$"
        ),
    ),
    "a part named twice": (
        lambda b: b.blocks_with("attn", submodule="attn"),
        r"^blocks_with takes one part: as `part`, or as `submodule`$",
    ),
    "a permanent hook without a function": (
        lambda b: b.add_perma_hook(PLACE),
        r"^add_hook takes one function: as `hook`, or as `hook_fn`$",
    ),
    "hooks of a plain run": (
        lambda b: b.run_with_cache(TOKENS, fwd_hooks=[]),
        (
            r"^'fwd_hooks' is not an argument of this call: run_with_hooks takes it, and so does"
            r" `with bridge.hooks"
        ),
    ),
    "hooks of a generation": (
        lambda b: b.generate(TOKENS, fwd_hooks=[]),
        (
            r"^'fwd_hooks' is not an argument of generate: run_with_hooks takes it, and so does"
            r" `with bridge.hooks"
        ),
    ),
    "a slip of the pen": (
        lambda b: b(TOKENS, attention_maskk=None),
        r"Did you mean attention_mask or output_attentions\?$",
    ),
    "a slip of the pen in a generation": (
        lambda b: b.generate(TOKENS, max_new_token=1),
        r"Did you mean max_new_tokens or min_new_tokens or max_cache_len\?$",
    ),
    "a layer that is not there": (
        lambda b: b.run_with_cache(TOKENS, names_filter="blocks.12.hook_resid_pre"),
        (
            r"^there is no hook point 'blocks.12.hook_resid_pre'. This model has 4 layers: blocks.0"
            r" to blocks.3.$"
        ),
    ),
    "an alias in a layer that is not there": (
        lambda b: b.add_hook("blocks.4.hook_in", change),
        r"This model has 4 layers: blocks.0 to blocks.3.$",
    ),
    "the path of a module": (
        lambda b: b.add_hook("model.layers.0.mlp.down_proj", change),
        r"It is the path of a module; the hook points there are blocks.0.mlp.hook_post.$",
    ),
    "the path of a module around others": (
        lambda b: b.add_hook("model.layers.0.mlp", change),
        r"the hook points there are .*blocks.0.hook_mlp_out",
    ),
    "a function and a name": (
        lambda b: b.run_with_hooks(TOKENS, fwd_hooks=[(change, PLACE)]),
        r"^fwd_hooks\[0\] is \(<function change .*: the hook point comes first, then the function$",
    ),
    "a function and a name in a with statement": (
        lambda b: b.hooks(bwd_hooks=[(change, PLACE)]).__enter__(),
        r"^bwd_hooks\[0\] is .*: the hook point comes first, then the function$",
    ),
    "a function and a name, added": (
        lambda b: b.add_hook(change, PLACE),
        (
            r"^add_hook takes the hook point first, then the function:"
            r" add_hook\('blocks.0.hook_mlp_out', function\)$"
        ),
    ),
    "an option that no exporter has": (
        lambda b: b.export(TOKENS, opset=20),
        r"^format='dynamo' has no option 'opset'; it takes export_format, dynamic, ",
    ),
    "text for a program": (
        lambda b: b.program([PLACE]).export_for_generation("Mary and"),
        r"the example is str; .* bridge.to_tokens\(text\) makes tokens of text$",
    ),
    "a bad regular expression": (
        lambda b: b.boot_transformers(str(MODEL_DIR), patches={"Llama(": torch.nn.Linear}),
        (
            r"^patches\['Llama\('\] is neither the name of a class nor a regular expression:"
            r" missing \)"
        ),
    ),
    "the model by another name": (
        lambda b: b.model,
        r"^the bridge has no 'model'\. Use bridge\.original_model, or bridge\.core",
    ),
    "the constructor's name of the model": (lambda b: b.hf_model, r"Use bridge\.original_model"),
    "a fact of the model": (lambda b: b.n_layers, r"no 'n_layers'\. Use bridge\.cfg\.n_layers$"),
    "a fact of the model, misspelt": (
        lambda b: b.n_layer,
        r"no 'n_layer'\. Did you mean bridge\.cfg\.n_layers\?$",
    ),
    "a fact that is read from the model": (lambda b: b.device, r"Use bridge\.cfg\.device$"),
    "the tokenizer, spelt the British way": (
        lambda b: b.tokeniser,
        r"Did you mean tokenizer or ",
    ),
    "Hugging Face's configuration": (lambda b: b.config, r"Use bridge\.core\.config"),
    "a fact in cfg, misspelt": (
        lambda b: b.cfg.n_layer,
        r"^a ModelConfig has no 'n_layer'\. Did you mean n_layers ",
    ),
    "Hugging Face's name of a fact": (
        lambda b: b.cfg.num_hidden_layers,
        r"^a ModelConfig has no 'num_hidden_layers'\. .* bridge\.core\.config\.num_hidden_layers$",
    ),
    "a hook point, misspelt": (lambda b: b.hook_embeded, r"Did you mean hook_embed or "),
    "a filter, misspelt": (
        lambda b: b.run_with_cache(TOKENS, names_filter="hook_embeded"),
        r"Did you mean hook_embed or ",
    ),
    "an activation as an attribute": (
        lambda b: b.run_with_cache(TOKENS)[1].resid_post,
        (
            r"^an ActivationCache has no 'resid_post'\. Use cache\[\"resid_post\", layer\], from"
            r" layer 0 on$"
        ),
    ),
    "an activation without a layer as an attribute": (
        lambda b: b.run_with_cache(TOKENS)[1].hook_embed,
        r"Use cache\['hook_embed'\]$",
    ),
    "a method of a cache, misspelt": (
        lambda b: b.run_with_cache(TOKENS)[1].accumulated_residual,
        r"Did you mean accumulated_resid or ",
    ),
    "a folder that is not there": (
        lambda b: b.boot_transformers("./no/where"),
        r"^./no/where: there is no such folder$",
    ),
}


@pytest.mark.unchecked  # arguments of wrong types are the mistakes here
@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers': its exporters are experimental
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said(bridge, mistake):
    call, message = MISTAKES[mistake]
    kinds = (TypeError, ValueError, UnknownHookError, FileNotFoundError, AttributeError)
    with pytest.raises(kinds, match=message):
        call(bridge)
    assert not any(hook.listeners for hook in bridge.hook_dict.values())


def test_what_is_missing_is_still_missing_for_programs_that_ask(bridge):
    """A program may test for an attribute, and copies and pickles do."""
    assert not hasattr(bridge, "model") and not hasattr(bridge, "device")
    assert not hasattr(bridge.cfg, "n_layer") and getattr(bridge.cfg, "vocab_size", 5) == 5
    again = pickle.loads(pickle.dumps(copy.deepcopy(bridge.cfg)))
    assert again.n_layers == bridge.cfg.n_layers
    with pytest.raises(AttributeError, match="this configuration belongs to no model"):
        _ = replace(again, _model=None).device


def test_a_part_that_some_layers_have():
    bridge = TransformerBridge(tiny_model("jamba"))
    with pytest.raises(UnknownHookError, match=r"The layers that have it are 1\.$"):
        bridge.names.find("blocks.0.attn.hook_z")


def test_the_shipped_model_takes_a_type_and_a_device():
    assert (
        TransformerBridge.boot_embedded(device="cpu", dtype=torch.bfloat16).cfg.dtype
        == torch.bfloat16
    )
