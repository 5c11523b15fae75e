"""Directions: found between two sets of prompts, and their removal written into the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adapters.architecture import Architecture, Block, Stack, Step
from adapters.feed_forward import MoE
from adapters.mixers import Mixer
from adapters.points import join, module_at
from adapters.proofs.evidence import places_of as steps_of
from adapters.views import constant_of
from adapters.weights import Weights
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_choice, refuse_wrong_types
from bridge.hooks.context import without_hooks
from bridge.hooks.hooks import HookPoint
from bridge.hooks.rows import mask_of_ends, places_of
from bridge.interventions import ProjectOut
from bridge.run.inputs import Prompts, prompts_with
from weight_processing.parts import ProcessedParts, precise
from weight_processing.saving import untie

How = Literal["mean", "pca", "probe"]


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction between two sets of prompts, and how well it tells them apart.

    Attributes:
        vector: of length one, from the negatives to the positives, ``[d]``.
        point: where it was found.
        accuracy: on held-out prompts, how many lie on their side of the middle between the two sets.
        shuffled: the same where the two sets' prompts are mixed before: what the search finds in noise.
    """

    vector: Float[Tensor, " d"]
    point: str
    accuracy: float
    shuffled: float


@refuse_wrong_types
def direction(
    bridge: TransformerBridge,
    positives: Prompts | Sequence[str],
    negatives: Prompts | Sequence[str],
    point: str | HookPoint,
    how: How = "mean",
    *,
    position: int = -1,
    attention_mask: tuple[Int[Tensor, "n pos"] | None, Int[Tensor, "m pos2"] | None] = (None, None),
    held_out: float = 0.25,
    seed: int = 0,
) -> Direction:
    """The direction in which two sets of prompts differ.

    Args:
        bridge: the bridge.
        positives, negatives: the prompts, as texts or tokens, of any lengths, or what a processor gives.
        point: the hook point, of ``[batch, pos, d]``.
        how: ``"mean"``, the difference of the means (Marks and Tegmark 2023); ``"pca"``, the first principal component
            of both together (Zou et al. 2023); ``"probe"``, the weights of a logistic regression (scikit-learn's).
        position: where the activation is taken, among the tokens of each prompt: -1 is its last one.
        attention_mask: of the positives and of the negatives, where these are tokens: 1 for tokens and 0 for padding.
            None: padding tokens at an end of a row, as `to_tokens` puts them there, are padding.
        held_out: the share of each set that is not looked at, but for the accuracy.
        seed: of the split, and of the control.

    Returns:
        The direction, with its accuracy and that of the control.

    Raises:
        ValueError: an unknown `how`; a set of fewer than four prompts; two sets without a difference; a prompt that has
            no such position.
        ImportError: a probe is asked for and scikit-learn is not installed.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import direction
        >>> bridge = TransformerBridge.boot_embedded()
        >>> countries = ("France", "Spain", "Italy", "Germany")
        >>> capital = [f"In {country}, the capital is" for country in countries]
        >>> language = [f"The language of {country} is" for country in countries]
        >>> found = direction(bridge, capital, language, "blocks.1.hook_resid_post")
        >>> found.vector.shape, found.accuracy
        (torch.Size([128]), 1.0)
    """
    check_choice("how", how, ("mean", "pca", "probe"))
    (hook,) = bridge.select_hooks(point)
    if len(hook.point.axes.split()) != 3:
        raise ValueError(f"{hook.name} has the axes [{hook.point.axes}]; a direction is of [batch, pos, d]")
    sets = zip((positives, negatives), attention_mask, strict=True)
    told = [_told(bridge, prompts, mask) for prompts, mask in sets]
    one, other = (len(prompts["input_ids"]) for prompts in told)
    if min(one, other) < 4:
        raise ValueError(f"there are {one} positives and {other} negatives: each set needs four")
    both = [_at(bridge, prompts, hook, position) for prompts in told]
    acts, labels = torch.cat(both), torch.cat([torch.ones(len(both[0])), torch.zeros(len(both[1]))]).bool()
    generator = torch.Generator().manual_seed(seed)
    vector, accuracy = _found(acts, labels, how, held_out, generator)
    if not bool(vector.any()):
        raise ValueError(f"the two sets have the same activations at {hook.name}: there is no direction between them")
    _, shuffled = _found(acts, labels[torch.randperm(len(labels), generator=generator)], how, held_out, generator)
    return Direction(vector.to(both[0].dtype), hook.name, accuracy, shuffled)


def _told(bridge: TransformerBridge, prompts: Prompts | Sequence[str], mask: Tensor | None) -> dict[str, Any]:
    """Prompts as tokens, and what else the model takes: which are padding, unless all of them count."""
    if not isinstance(prompts, Tensor | Mapping):
        batch = bridge.batch_of(list(prompts))
        prompts, mask = batch.tokens, batch.mask
    elif mask is None and isinstance(prompts, Tensor):
        tokenizer = bridge.tokenizer
        pad = bridge.core.config.get_text_config().pad_token_id if tokenizer is None else bridge.tokenizer_facts.pad
        mask = mask_of_ends(prompts, pad)
    return prompts_with(bridge, prompts, {"attention_mask": mask})


@torch.no_grad()
def _at(bridge: TransformerBridge, prompts: dict[str, Any], hook: HookPoint, position: int) -> Tensor:
    """The activation of each prompt at a position of its own tokens."""
    _, cache = bridge.run_with_cache(prompts, names_filter=hook)
    act = cache[hook.name]
    return act[torch.arange(len(act)), places_of(prompts.get("attention_mask"), position, act.shape)]


def _found(acts: Tensor, labels: Tensor, how: How, held_out: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """A direction of some of the rows, and the share of the others that lie on their side."""
    train = torch.zeros(len(acts), dtype=torch.bool)
    for label in (True, False):
        rows = (labels == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        train[rows[max(1, round(len(rows) * held_out)) :]] = True
    x, y = acts[train.to(acts.device)].double(), labels[train]
    vector = _vector(x, y, how)
    vector = vector / vector.norm().clamp(min=1e-30)
    along = acts.double() @ vector
    ends = [along[train.to(along.device)][(y == label).to(along.device)].mean() for label in (True, False)]
    if ends[0] < ends[1]:
        vector, along, ends = -vector, -along, [-end for end in ends]
    right = (along > (ends[0] + ends[1]) / 2).cpu() == labels
    return vector, float(right[~train].float().mean())


def _vector(x: Tensor, positive: Tensor, how: How) -> Tensor:
    if how == "pca":
        return torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[0]
    if how == "mean":
        chosen = positive.to(x.device)
        return x[chosen].mean(0) - x[~chosen].mean(0)
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError('how="probe" needs scikit-learn: pip install scikit-learn') from error
    middle, width = x.mean(0), x.std(0).clamp(min=1e-6)
    probe = LogisticRegression(max_iter=1000).fit(((x - middle) / width).cpu().numpy(), positive.numpy())
    return torch.from_numpy(probe.coef_[0]).to(x) / width


def written_points(bridge: TransformerBridge) -> list[str]:
    """The hook points at which something is added to the residual stream: without a direction there, nothing has it.

    Where a norm or a parameter of the model stands on the stream itself, the stream behind it is one of them.

    Args:
        bridge: the bridge.

    Raises:
        ValueError: something is added where there is no hook point.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import written_points
        >>> written_points(TransformerBridge.boot_embedded())[:3]
        ['hook_embed', 'blocks.0.hook_attn_out', 'blocks.0.hook_mlp_out']
    """
    found = [name for stack in bridge.architecture.stacks for name in _beginning(bridge, stack)]
    for place in steps_of(bridge):
        stack, step = place.stack, place.named.step
        if place.layer in stack.block_inputs:
            found.append(f"{place.prefix}hook_resid_pre")
        if stack.block_at(place.layer).norm:
            found.append(f"{place.prefix}ln0.hook_out")
        found.append(place.result)
        if step.mix or any(link.parameters for link in step.residual_transform):
            found.append(place.prefix + place.named.after)
        elif step.stream_norm:
            normed = f"{place.prefix}{place.named.norm}.hook_out"
            found.append(normed if normed in bridge.hook_dict else f"{place.prefix}hook_resid_post")
    unknown = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    known = {name.rpartition(".")[0] for name in found}
    found += [name for name in unknown if name.rpartition(".")[0] not in known]  # blocks of which no step is known
    if missing := [name for name in found if name not in bridge.names.points and name not in bridge.names.aliases]:
        raise ValueError(f"what is added to the stream at {missing[0]} has no hook point: see bridge.offered()")
    wanted = {bridge.names.find(name).name for name in found}
    return [name for name in bridge.hook_dict if name in wanted]


def _beginning(bridge: TransformerBridge, stack: Stack) -> list[str]:
    """Where the stream of a list of blocks begins: the embeddings, where it is a sum of them; else the first stream."""
    made = stack.embedding
    names = ["hook_embed", *(["hook_pos_embed"] if made.positions else [])]
    more = made.norm or made.project or made.behind_embed or made.types or made.more or made.module
    config, unknown = bridge.core.config, bridge.architecture.unknown.get("embedding")
    alone = len(bridge.architecture.stacks) == 1 and config.get_text_config() is config  # else images are in it, too
    if made.tokens and alone and not more and not unknown and all(name in bridge.hook_dict for name in names):
        return names
    return [f"{stack.name}.0.hook_resid_pre"]


@torch.no_grad()
def write_into_weights(bridge: TransformerBridge, vector: Float[Tensor, " d_model"] | Direction) -> None:
    """Makes the removal of a direction part of the weights: nothing writes along it any more (Arditi et al. 2024).

    The model is changed in place, and computes what it did with ``ProjectOut(vector)`` at `written_points`;
    that is tried, and where it is not so the weights stay as they were. Tied embeddings are untied.

    Args:
        bridge: the bridge.
        vector: the direction, as a tensor or as `direction` found it.

    Raises:
        ValueError: something stands between the weights and the stream (a norm behind a part, or of the embeddings),
            or what writes is not all known; or, as the trial shows, something is left along it in the stream.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import write_into_weights
        >>> bridge = TransformerBridge.boot_embedded()
        >>> vector = bridge.tokens_to_residual_directions(" Mary").clone()
        >>> write_into_weights(bridge, vector)
        >>> _, cache = bridge.run_with_cache("Mary and John", names_filter="blocks.2.hook_resid_post")
        >>> bool((cache["blocks.2.hook_resid_post"] @ vector).abs().max() < 1e-4)
        True
    """
    vector = vector.vector if isinstance(vector, Direction) else vector
    parts = ProcessedParts(bridge.weights)
    steps = [f"{block}.{named.name}" for block, _, named in parts.steps if named.step.post]
    begin = bridge.architecture.embedding
    computed = bool(begin.positions) and not hasattr(bridge.weights.module(begin.positions or ""), "weight")
    more = (
        begin.project
        or begin.behind_embed
        or begin.types
        or begin.more
        or bridge.architecture.unknown.get("embedding")
        or computed
    )
    if steps or begin.norm or more:
        what = steps[0] if steps else "the embeddings"
        raise ValueError(
            f"between the weights of {what} and the residual stream stands more than a sum: a direction cannot "
            "be taken out of the weights there. Use bridge.interventions.ProjectOut as a hook"
        )
    unit = precise(vector / vector.norm())
    tokens = torch.arange(min(8, bridge.cfg.d_vocab), device=bridge.cfg.device)[None]
    removal = ProjectOut(vector)
    hooks = [(name, removal) for name in written_points(bridge)]
    with without_hooks():
        before = bridge(tokens)
    wanted = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    writers = _writers(bridge)
    kept = {name: get().clone() for name, get in writers.items()}
    untie(bridge.core, bridge.architecture)
    for get in writers.values():
        matrix = precise(get())
        get().copy_(matrix - (matrix @ unit.to(matrix)).unsqueeze(-1) * unit.to(matrix))
    streams = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    found, cache = bridge.run_with_cache(tokens, names_filter=streams)
    small = 1e3 * torch.finfo(before.dtype).eps
    left = {name: float((precise(cache[name]) @ unit).abs().max() / cache[name].abs().max()) for name in streams}
    worst = max(left, key=lambda name: left[name])
    same = torch.allclose(found, wanted, rtol=0, atol=small * float(before.abs().max()))
    if not same or left[worst] > small:
        for name, get in writers.items():
            get().copy_(kept[name])
        far = float((found - wanted).abs().max())
        raise ValueError(
            f"with the direction out of the weights of {bridge.cfg.model_name} its logits are {far:.3g} from those "
            f"with the hook, and {left[worst]:.3g} of {worst} is left along it: something else writes to its stream. "
            "The weights are as they were"
        )


def _writers(bridge: TransformerBridge) -> dict[str, Callable[[], Tensor]]:
    """What writes to the stream, as it is stored: constants behind it do not turn a direction."""
    stored = Weights(_without_factors(bridge.architecture), bridge.original_model, bridge.cfg)
    writers = dict(ProcessedParts(stored).writers)
    tables = {
        "embed.W_E": bridge.architecture.embedding.tokens,
        "pos_embed.W_pos": bridge.architecture.embedding.positions,
    }
    for name, path in tables.items():
        if name in writers and path:
            writers[name] = partial(_of, bridge.weights.module(path), "weight")
    for place in steps_of(bridge):
        part = place.named.step.part
        if isinstance(part, Mixer) and part.layers:
            last = module_at(bridge.original_model, join(place.path, part.path, part.layers[-1][0]))
            if isinstance(last, nn.Linear):
                writers[f"{place.part}W"] = partial(_transposed_of, last)
                if last.bias is not None:
                    writers[f"{place.part}b"] = partial(_of, last, "bias")
    return writers


def _transposed_of(linear: nn.Linear) -> Tensor:
    return linear.weight.T


def _without_factors(architecture: Architecture) -> Architecture:
    """The same without constants between the matrices and the stream."""

    def step(each: Step) -> Step:
        part = replace(each.part, factor=1.0, shared_transform=()) if isinstance(each.part, MoE) else each.part
        constant = each.behind_last and constant_of(each.behind_last) is not None
        return replace(each, part=part, result_chain=() if constant else each.result_chain)

    def block(each: Block) -> Block:
        return replace(each, steps=tuple(map(step, each.steps)))

    stacks = (
        replace(stack, block=block(stack.block), layers={i: block(each) for i, each in stack.layers.items()})
        for stack in architecture.stacks
    )
    return replace(architecture, stacks=tuple(stacks))


def _of(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found
