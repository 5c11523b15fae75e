"""Directions: found between two sets of prompts, and removed from the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adapters.architecture import Architecture, Block, Embedding, Stack, Step
from adapters.feed_forward import MoE
from adapters.mixers import Mixer
from adapters.points import join, module_at
from adapters.proofs.evidence import places_of as steps_of
from adapters.views import constant_of
from adapters.weights import Weights
from bridge.arguments import TokenPositions, check_choice, positions_of, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.hooks.context import without_hooks
from bridge.hooks.hooks import HookPoint
from bridge.interventions import ProjectOut
from bridge.rows import mask_of_ends, places_of
from bridge.run.inputs import Prompts, prompts_with
from bridge.run.spans import Spans, is_chat
from bridge.run.tokenization import Text
from weight_processing.parts import ProcessedParts, precise
from weight_processing.saving import untie

How = Literal["mean", "pca", "probe"]
#: Chooses the positions of a chat.
OfSpans = Callable[[Spans], TokenPositions]


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction between two sets of prompts, and how well it separates them.

    Attributes:
        vector: the unit vector from the negatives to the positives, ``[d]``.
        point: the hook point of the direction.
        accuracy: the share of held-out prompts on the correct side of the midpoint between the two
            sets.
        shuffled: the same accuracy with the prompts of both sets mixed before the search: the
            accuracy that the search reaches on noise.
    """

    vector: Float[Tensor, " d"]
    point: str
    accuracy: float
    shuffled: float


@refuse_wrong_types
def direction(
    bridge: TransformerBridge,
    positives: Prompts | Sequence[Text],
    negatives: Prompts | Sequence[Text],
    point: str | HookPoint,
    how: How = "mean",
    *,
    position: int | Sequence[int] | TokenPositions | OfSpans = -1,
    attention_mask: tuple[Int[Tensor, "n pos"] | None, Int[Tensor, "m pos2"] | None] = (None, None),
    held_out: float = 0.25,
    seed: int = 0,
) -> Direction:
    """Return the direction in which two sets of prompts differ.

    Args:
        bridge: the bridge.
        positives, negatives: the prompts, as texts, chats or tokens of any lengths, or a
            processor's output.
        point: the hook point, of ``[batch, pos, d]``.
        how: ``"mean"``, the difference of the means (Marks and Tegmark 2023); ``"pca"``, the first
            principal component of both sets together (Zou et al. 2023); ``"probe"``, the weights of
            a logistic regression (scikit-learn).
        position: the position of the activation among each prompt's own tokens: -1 is the last. Of
            several, such as `Spans`, the mean is taken. For chats it may be a function from the
            `Spans` of each chat to some of them.
        attention_mask: the masks of the positives and of the negatives, if these are tokens: 1 for
            tokens and 0 for padding. None: padding tokens at either end of a row, as `to_tokens`
            adds them, count as padding.
        held_out: the share of each set that is used only for the accuracy.
        seed: the seed of the split and of the control.

    Returns:
        The direction, with its accuracy and that of the control.

    Raises:
        ValueError: an unknown `how`; a set of fewer than four prompts; two sets without a
            difference; a prompt without such a position.
        ImportError: ``"probe"`` is requested and scikit-learn is not installed.

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
        raise ValueError(
            f"{hook.name} has the axes [{hook.point.axes}]; a direction is of [batch, pos, d]"
        )
    sets = zip((positives, negatives), attention_mask, strict=True)
    batches = [_masked_inputs(bridge, prompts, mask) for prompts, mask in sets]
    places = [_positions(bridge, prompts, position) for prompts in (positives, negatives)]
    one, other = (len(batch["input_ids"]) for batch in batches)
    if min(one, other) < 4:
        raise ValueError(f"there are {one} positives and {other} negatives: each set needs four")
    acts = torch.cat(
        [_activations(bridge, batch, hook, of) for batch, of in zip(batches, places, strict=True)]
    )
    labels = torch.arange(one + other, device="cpu") < one
    generator = torch.Generator().manual_seed(seed)
    vector, accuracy = _fit(acts, labels, how, held_out, generator)
    if not bool(vector.any()):
        raise ValueError(
            f"the two sets have the same activations at {hook.name}: there is no direction between"
            " them"
        )
    mixed = labels[torch.randperm(len(labels), generator=generator, device="cpu")]
    _, shuffled = _fit(acts, mixed, how, held_out, generator)
    return Direction(vector.to(acts.dtype), hook.name, accuracy, shuffled)


def _masked_inputs(
    bridge: TransformerBridge, prompts: Prompts | Sequence[Text], mask: Tensor | None
) -> dict[str, Any]:
    """Return prompts as tokens and the other model inputs: the padding mask, unless all positions
    count.
    """
    if not isinstance(prompts, Tensor | Mapping):
        batch = bridge.batch_of(list(prompts))
        prompts, mask = batch.tokens, batch.mask
    elif mask is None and isinstance(prompts, Tensor):
        if bridge.tokenizer is None:
            pad = bridge.core.config.get_text_config().pad_token_id
        else:
            pad = bridge.tokenizer_facts.pad
        mask = mask_of_ends(prompts, pad)
    return prompts_with(bridge, prompts, {"attention_mask": mask})


def _positions(
    bridge: TransformerBridge,
    prompts: Any,
    position: int | Sequence[int] | TokenPositions | OfSpans,
) -> list[list[int]]:
    """Return positions, for all prompts or for each.

    Raises:
        TypeError: a function is for chats.
        ValueError: there is none.
    """
    if callable(position):
        if isinstance(prompts, str) or not is_chat(next(iter(prompts), None)):
            raise TypeError("position is a function, which chooses spans of chats: give chats")
        return [positions_of(position(bridge.spans(chat))) for chat in prompts]
    chosen = positions_of(position)
    chosen = [chosen] if isinstance(chosen, int) else list(chosen)
    if not chosen:
        raise ValueError("position is empty: it must be a position, or several")
    return [chosen]


@torch.no_grad()
def _activations(
    bridge: TransformerBridge, prompts: dict[str, Any], hook: HookPoint, places: list[list[int]]
) -> Tensor:
    """Return the mean activation of each prompt at positions of its own tokens."""
    _, cache = bridge.run_with_cache(prompts, names_filter=hook)
    act, mask = cache[hook.name], prompts.get("attention_mask")
    if len(places) == 1:
        rows = torch.arange(len(act), device="cpu")
        picked = [act[rows, places_of(mask, position, act.shape)] for position in places[0]]
        return picked[0] if len(picked) == 1 else torch.stack(picked).mean(0)
    means = []
    for row, positions in enumerate(places):
        own = act[row] if mask is None else act[row][mask[row].bool().to(act.device)]
        means.append(own[positions].mean(0))
    return torch.stack(means)


def _fit(
    acts: Tensor, labels: Tensor, how: How, held_out: float, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return a direction from some of the rows, and the share of the others that it classifies
    correctly.
    """
    train = torch.zeros(len(acts), dtype=torch.bool, device="cpu")
    for label in (True, False):
        rows = (labels == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator, device="cpu")]
        train[rows[max(1, round(len(rows) * held_out)) :]] = True
    vector = _vector(acts[train.to(acts.device)].double(), labels[train], how)
    vector = vector / vector.norm().clamp(min=1e-30)
    along = acts.double() @ vector
    positive, negative = (
        along[(train & (labels == label)).to(along.device)].mean() for label in (True, False)
    )
    if positive < negative:
        vector, along, positive, negative = -vector, -along, -positive, -negative
    right = (along > (positive + negative) / 2).cpu() == labels
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
    probe = LogisticRegression(max_iter=1000).fit(
        ((x - middle) / width).cpu().numpy(), positive.numpy()
    )
    return torch.from_numpy(probe.coef_[0]).to(x) / width


def written_points(bridge: TransformerBridge) -> list[str]:
    """Return the hook points that add to the residual stream: removing a direction there removes it
    everywhere.

    If a norm or a parameter of the model is applied to the stream itself, its output is one of
    these points.

    Args:
        bridge: the bridge.

    Raises:
        ValueError: an output is added to the stream where there is no hook point.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import written_points
        >>> written_points(TransformerBridge.boot_embedded())[:3]
        ['hook_embed', 'blocks.0.hook_attn_out', 'blocks.0.hook_mlp_out']
    """
    names = [name for stack in bridge.architecture.stacks for name in _beginning(bridge, stack)]
    for place in steps_of(bridge):
        stack, step = place.stack, place.named.step
        if place.layer in stack.block_inputs:
            names.append(f"{place.prefix}hook_resid_pre")
        if stack.block_at(place.layer).norm:
            names.append(f"{place.prefix}ln0.hook_out")
        names.append(place.result)
        if step.mix or any(link.parameters for link in step.residual_transform):
            names.append(place.prefix + place.named.after)
        elif step.stream_norm:
            normed = f"{place.prefix}{place.named.norm}.hook_out"
            names.append(normed if normed in bridge.hook_dict else f"{place.prefix}hook_resid_post")
    known_blocks = {name.rpartition(".")[0] for name in names}
    for name in bridge.hook_dict:  # blocks without known steps
        if name.endswith("hook_resid_post") and name.rpartition(".")[0] not in known_blocks:
            names.append(name)
    for name in names:
        if name not in bridge.names.points and name not in bridge.names.aliases:
            raise ValueError(
                f"what is added to the stream at {name} has no hook point: see bridge.offered()"
            )
    points = {bridge.names.find(name).name for name in names}
    return [name for name in bridge.hook_dict if name in points]


def _beginning(bridge: TransformerBridge, stack: Stack) -> list[str]:
    """Return the start of the stream of a list of blocks: the embeddings if they are summed, else
    the first stream.
    """
    embedding, architecture, config = stack.embedding, bridge.architecture, bridge.core.config
    names = ["hook_embed", "hook_pos_embed"] if embedding.positions else ["hook_embed"]
    # With several configurations, the stream includes images.
    text_alone = len(architecture.stacks) == 1 and config.get_text_config() is config
    more = _after_tables(embedding) or embedding.norm or embedding.module
    unknown = architecture.unknown.get("embedding")
    summed = embedding.tokens and text_alone and not more and not unknown
    if summed and all(name in bridge.hook_dict for name in names):
        return names
    return [f"{stack.name}.0.hook_resid_pre"]


def _after_tables(embedding: Embedding) -> bool:
    """Tell whether more than tokens and positions make up the embeddings, norms aside."""
    parts = (embedding.project, embedding.behind_embed, embedding.types, embedding.more)
    return any(parts)


@torch.no_grad()
def write_into_weights(
    bridge: TransformerBridge, vector: Float[Tensor, " d_model"] | Direction
) -> None:
    """Write the removal of a direction into the weights: nothing writes along it any more (Arditi
    et al. 2024).

    The model is changed in place, and then computes the same as with ``ProjectOut(vector)`` at
    `written_points`. This is checked, and if it does not hold the weights are restored. Tied
    embeddings are untied.

    Args:
        bridge: the bridge.
        vector: the direction, as a tensor or as the result of `direction`.

    Raises:
        ValueError: there is a norm between the weights and the stream (after a component, or on the
            embeddings), or some writers are unknown; or the check finds that the stream still
            contains the direction.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import write_into_weights
        >>> bridge = TransformerBridge.boot_embedded()
        >>> vector = bridge.tokens_to_residual_directions(" Mary").clone()
        >>> write_into_weights(bridge, vector)
        >>> _, cache = bridge.run_with_cache(
        ...     "Mary and John", names_filter="blocks.2.hook_resid_post"
        ... )
        >>> bool((cache["blocks.2.hook_resid_post"] @ vector).abs().max() < 1e-4)
        True
    """
    vector = vector.vector if isinstance(vector, Direction) else vector
    _refuse_more_than_sums(bridge)
    unit = precise(vector / vector.norm())
    tokens = torch.arange(min(8, bridge.cfg.d_vocab), device=bridge.cfg.device)[None]
    removal = ProjectOut(vector)
    hooks = [(name, removal) for name in written_points(bridge)]
    with without_hooks():
        before = bridge(tokens)
    right = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    writers = _writers(bridge)
    untie(bridge.core, bridge.architecture)
    with ExitStack() as restoring:
        for get in writers.values():
            restoring.callback(get().copy_, get().clone())
            matrix = precise(get())
            get().copy_(matrix - (matrix @ unit.to(matrix)).unsqueeze(-1) * unit.to(matrix))
        _check_removed(bridge, tokens, unit, right, float(before.abs().max()))
        restoring.pop_all()


def _check_removed(
    bridge: TransformerBridge, tokens: Tensor, unit: Tensor, right: Tensor, largest: float
) -> None:
    """Raise an error if a model still writes along a direction.

    Args:
        bridge: the bridge, without the direction in its weights.
        tokens: a prompt.
        unit: the direction.
        right: the prompt's logits with the direction removed by hooks.
        largest: the largest logit, which the tolerance is relative to.

    Raises:
        ValueError: the logits differ, or a stream contains the direction.
    """
    streams = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    logits, cache = bridge.run_with_cache(tokens, names_filter=streams)
    eps = torch.finfo(right.dtype).eps
    small = (1e3 if eps < 1e-5 else 16) * eps
    shares = {}
    for name in streams:
        along = (cache[name].double() @ unit.double()).abs().max()
        shares[name] = float(along / cache[name].abs().max())
    worst = max(shares, key=lambda name: shares[name])
    same = torch.allclose(logits, right, rtol=0, atol=small * largest)
    if not same or shares[worst] > small:
        far = float((logits - right).abs().max())
        raise ValueError(
            f"with the direction out of the weights of {bridge.cfg.model_name} its logits are"
            f" {far:.3g} from those with the hook, and {shares[worst]:.3g} of {worst} is left along"
            " it: something else writes to its stream. The weights are as they were"
        )


def _refuse_more_than_sums(bridge: TransformerBridge) -> None:
    """Raise an error if weights do not write directly to the stream.

    Raises:
        ValueError: there is a norm between them, or more than a sum of embeddings.
    """
    parts = ProcessedParts(bridge.weights)
    places = [f"{block}.{named.name}" for block, _, named in parts.steps if named.step.post]
    embedding = bridge.architecture.embedding
    unknown = bridge.architecture.unknown.get("embedding")
    positions = embedding.positions
    computed = positions and not hasattr(bridge.weights.module(positions), "weight")
    if embedding.norm or _after_tables(embedding) or unknown or computed:
        places.append("the embeddings")
    if places:
        raise ValueError(
            f"between the weights of {places[0]} and the residual stream stands more than a sum: a"
            " direction cannot be taken out of the weights there. Use"
            " bridge.interventions.ProjectOut as a hook"
        )


def _writers(bridge: TransformerBridge) -> dict[str, Callable[[], Tensor]]:
    """Return the tensors that write to the stream, as stored: constant factors after them do not
    turn a direction.
    """
    stored = Weights(_without_factors(bridge.architecture), bridge.original_model, bridge.cfg)
    writers = dict(ProcessedParts(stored).writers)
    tables = {
        "embed.W_E": bridge.architecture.embedding.tokens,
        "pos_embed.W_pos": bridge.architecture.embedding.positions,
    }
    for name, path in tables.items():
        if name in writers and path:
            writers[name] = partial(_parameter, bridge.weights.module(path), "weight")
    for place in steps_of(bridge):
        part = place.named.step.part
        if isinstance(part, Mixer) and part.layers:
            last = module_at(bridge.original_model, join(place.path, part.path, part.layers[-1][0]))
            if isinstance(last, nn.Linear):
                writers[f"{place.part}W"] = partial(_transposed_weight, last)
                if last.bias is not None:
                    writers[f"{place.part}b"] = partial(_parameter, last, "bias")
    return writers


def _transposed_weight(linear: nn.Linear) -> Tensor:
    return linear.weight.T


def _without_factors(architecture: Architecture) -> Architecture:
    """Return the architecture without constant factors between the matrices and the stream."""

    def plain_step(step: Step) -> Step:
        part = step.part
        if isinstance(part, MoE):
            part = replace(part, factor=1.0, shared_transform=())
        constant = step.behind_last and constant_of(step.behind_last) is not None
        return replace(step, part=part, result_chain=() if constant else step.result_chain)

    def plain_block(block: Block) -> Block:
        return replace(block, steps=tuple(map(plain_step, block.steps)))

    def plain_stack(stack: Stack) -> Stack:
        layers = {index: plain_block(block) for index, block in stack.layers.items()}
        return replace(stack, block=plain_block(stack.block), layers=layers)

    return replace(architecture, stacks=tuple(map(plain_stack, architecture.stacks)))


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    return parameter
