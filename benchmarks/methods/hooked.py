"""The other side of the comparisons: the shipped model as transformers loads it, in float64, with
torch hooks. Nothing here imports the library's computations.

Places are module names in Hugging Face's Llama, ``layers.2.mlp``; with ``>`` in front, a module's
input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.tasks import embedded_pairs
from bridge.tasks.tasks import Pairs

Edit = Callable[[Tensor], Tensor]
LAYERS, HEADS, WIDTH = 4, 4, 32


@functools.cache
def hf() -> Any:
    """Return the model, with attention whose weights are computed."""
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, **options).eval().requires_grad_(False)


@functools.cache
def ours() -> TransformerBridge:
    """Return a bridge of the same model, in float64."""
    return TransformerBridge.boot_embedded().to(torch.float64)


@functools.cache
def pairs() -> Pairs:
    """Return eight pairs of clean and corrupted prompts."""
    return embedded_pairs(ours(), "ioi", 8)


def difference(logits: Tensor) -> Tensor:
    """Return the mean of the right name's logit less the other's."""
    rows = torch.arange(len(logits))
    last = logits[:, -1]
    return (last[rows, pairs().answers] - last[rows, pairs().wrong]).mean()


def module(place: str) -> nn.Module:
    """Return the module of a place."""
    name = place.removeprefix(">")
    return hf().get_submodule(name if name == "lm_head" else f"model.{name}")


def run(
    tokens: Tensor, edits: Mapping[str, Edit] | None = None, keep: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the kept inputs and outputs of modules, after the edits."""
    edits, kept, handles = edits or {}, {}, []

    def take(place: str, x: Tensor) -> Tensor:
        kept[place] = edits[place](x) if place in edits else x
        return kept[place]

    def before(place: str) -> Any:
        return lambda module, args: (take(place, args[0]), *args[1:])

    def after(place: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (take(place, output[0]), *output[1:])
            return take(place, output)

        return hook

    for place in dict.fromkeys([*edits, *keep]):
        if place.startswith(">"):
            handles.append(module(place).register_forward_pre_hook(before(place)))
        else:
            handles.append(module(place).register_forward_hook(after(place)))
    try:
        return hf()(tokens).logits, kept
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------------------------
# The graph of heads and MLPs.
# --------------------------------------------------------------------------------------------------


def of_head(head: int) -> slice:
    """Return the columns of a head."""
    return slice(head * WIDTH, (head + 1) * WIDTH)


def head_output(z: Tensor, layer: int, head: int) -> Tensor:
    """Return what a head adds to the stream, from the input of its layer's output matrix."""
    weight = module(f"layers.{layer}.self_attn.o_proj").weight
    return z[..., of_head(head)] @ weight[:, of_head(head)].T


def outputs(tokens: Tensor, edits: Mapping[str, Edit] | None = None) -> dict[str, Tensor]:
    """Return what the embedding, each head and each MLP adds to the stream."""
    keep = ["embed_tokens"]
    for layer in range(LAYERS):
        keep += [f">layers.{layer}.self_attn.o_proj", f"layers.{layer}.mlp"]
    _, kept = run(tokens, edits, keep)
    senders = {"embed": kept["embed_tokens"]}
    for layer in range(LAYERS):
        for head in range(HEADS):
            z = kept[f">layers.{layer}.self_attn.o_proj"]
            senders[f"L{layer}H{head}"] = head_output(z, layer, head)
        senders[f"L{layer}MLP"] = kept[f"layers.{layer}.mlp"]
    return senders


def norm_of(receiver: str) -> str:
    """Return the norm in front of a receiver."""
    if receiver == "logits":
        return "norm"
    part = "post_attention_layernorm" if receiver.endswith("MLP") else "input_layernorm"
    return f"layers.{receiver[1]}.{part}"


def projection_of(receiver: str) -> tuple[str, slice]:
    """Return the projection of ``L2H1.q``, and its columns."""
    head, side = receiver.split(".")
    return f"layers.{head[1]}.self_attn.{side}_proj", of_head(int(head[3]))


def gradients(
    tokens: Tensor, receivers: Sequence[str], edits: Mapping[str, Edit] | None = None
) -> dict[str, Tensor]:
    """Return the metric's gradient at each receiver's own input, before its norm."""
    places = []
    for receiver in receivers:
        norm = norm_of(receiver)
        places += [f">{norm}", norm]
        if "." in receiver:
            places.append(projection_of(receiver)[0])
    start = {"embed_tokens": lambda x: x.clone().requires_grad_()}
    if edits and "embed_tokens" in edits:
        start = {"embed_tokens": lambda x: edits["embed_tokens"](x).clone().requires_grad_()}
    logits, kept = run(tokens, {**(edits or {}), **start}, places)
    leaves = list(dict.fromkeys(place for place in places if not place.startswith(">")))
    tensors = [kept[place] for place in leaves]
    # A module whose outputs are all replaced behind it has no gradient.
    parts = torch.autograd.grad(
        difference(logits), tensors, allow_unused=True, materialize_grads=True
    )
    at = dict(zip(leaves, parts, strict=True))
    result = {}
    for receiver in receivers:
        norm = norm_of(receiver)
        gradient = at[norm]
        if "." in receiver:
            projection, columns = projection_of(receiver)
            gradient = at[projection][..., columns] @ module(projection).weight[columns]
        x = kept[f">{norm}"].detach().requires_grad_()
        (result[receiver],) = torch.autograd.grad(module(norm)(x), x, gradient)
    return result


def edge_scores(change: Mapping[str, Tensor], at: Mapping[str, Tensor], graph: Any) -> Tensor:
    """Return ``sum(change of the sender * gradient at the receiver)`` of each edge."""
    values = torch.zeros(graph.exists.shape, dtype=torch.float64)
    for receiver, sender in graph.exists.nonzero().tolist():
        term = change[graph.senders[sender]] * at[list(graph.receivers)[receiver]]
        values[receiver, sender] = term.sum()
    return values


def changes() -> dict[str, Tensor]:
    """Return what each sender's output changes by, from the clean to the corrupted prompts."""
    clean, corrupted = outputs(pairs().clean), outputs(pairs().corrupted)
    return {name: corrupted[name] - clean[name] for name in clean}


def with_input_moved(receiver: str, delta: Tensor) -> dict[str, Edit]:
    """Return the edits with which a receiver alone reads the stream plus a tensor."""
    stream: dict[str, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        stream["x"] = x
        return x

    norm = norm_of(receiver)
    moved = lambda: module(norm).forward(stream["x"] + delta)  # without its hooks
    edits: dict[str, Edit] = {f">{norm}": keep}
    if receiver == "logits":
        return {**edits, "norm": lambda x: moved()}
    if receiver.endswith("MLP"):
        return {**edits, norm: lambda x: moved()}
    projection, columns = projection_of(receiver)

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., columns] = moved() @ module(projection).weight[columns].T
        return x

    return {**edits, projection: put}
