"""iit (cybershiptrooper/iit): strict interchange training of a wrapped model, and interchange
interventions.
"""

import importlib.util
import sys

import torch

torch.Any = object  # they write it in an annotation, and torch has it no more
from iit.model_pairs.ll_model import LLModel
from iit.utils import index
from iit.utils.correspondence import Correspondence
from iit.utils.iit_dataset import IITDataset
from iit.utils.nodes import HLNode, LLNode
from transformer_lens import HookedTransformer

_FILE = (  # of their tests: their `tests` is not ours
    f"{sys.path[0]}/tests/test_utils/caching_model_pair.py"
)
_SPEC = importlib.util.spec_from_file_location("caching_model_pair", _FILE)
_PAIR = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PAIR)


def config(seed):
    return {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 6,
        "d_head": 8,
        "act_fn": "gelu",
        "d_vocab": 11,
        "seed": seed,
        "device": "cpu",
    }


def numbers():
    model, other = (
        LLModel(cfg=config(1), detach_while_caching=False),
        HookedTransformer(cfg=config(2)),
    )
    point, first = "blocks.1.attn.hook_z", index.Ix[:, :, 0]
    pairs = Correspondence()
    pairs.update({HLNode(point, -1, index=first): [LLNode(point, index=first)]})
    pair = _PAIR.CachingModelPair(hl_model=other, ll_model=model, corr=pairs)
    tokens = torch.arange(30).reshape(5, 6) % 11
    base, ablation = (tokens, tokens, None), (tokens.flip(0), tokens, None)
    node = pair.sample_hl_name()
    high, low = pair.do_intervention(base, ablation, node)
    loss = pair.loss_fn(low.flatten(0, 1), high.flatten(0, 1).softmax(-1))
    loss.backward()
    gradients = [
        parameter.grad.norm() for parameter in model.parameters()
    ]  # their axes are Hugging Face's here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    return {
        "high": high,
        "low": low,
        "loss": loss,
        "gradients": torch.stack(gradients),
        "trained": model(tokens),
        "data": len(IITDataset(list(tokens), list(tokens))),
    }
