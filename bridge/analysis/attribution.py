"""What a layer, or a logit, gets from each term of the residual stream."""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.requirements import (
    AnalysedModel,
    AnalysedRun,
    Index,
    layer_of,
    pick,
    refuse_no_logit_sum,
    require,
)
from bridge.analysis.residual_norms import gradients_of, norm_before, norm_of
from bridge.hooks.act_names import act_name
from bridge.hooks.arguments import refuse_wrong_types

#: A token: its text, its id, or ids in a tensor.
Tokens = str | int | Tensor
_LEFT_OUT = (
    "logit_attrs leaves out the final norm's weight, as HookedTransformer does, and this model's is not folded: the "
    "parts do not sum to the logits. process_weights() folds it, norm_weights=True counts it, and norm_weights=False "
    "says that it is to be left out."
)


class AttributionMethods(AnalysedRun):
    """The methods of `ActivationCache` that look at the residual stream through the norm that reads it."""

    @refuse_wrong_types
    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layer ..."]:
        """One activation of all layers before `layer`.

        Args:
            activation_name: its short name, such as ``q`` or ``resid_pre``.
            layer: layers before this one; None or -1: all.
            sublayer_type: the part of the block, where the name does not say it, such as ``ln1``.

        Raises:
            MissingActivationsError: the cache does not hold one of them.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.stack_activation("scale", sublayer_type="ln1").shape
            torch.Size([4, 1, 3, 1])
        """
        layers = range(layer_of(self.model, layer))
        return torch.stack(require(self, [act_name(activation_name, index, sublayer_type) for index in layers]))

    @refuse_wrong_types
    def apply_ln_to_stack(
        self,
        residual_stack: Float[Tensor, "component *batch_pos d_model"],
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Index = None,
        batch_slice: Index = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "component *batch_pos_out d_model"]:
        """Terms of the residual stream as a layer reads them: centred (by a layer norm), divided by the cached scale.

        The scale is that of the whole stream, so the results sum to the normalised stream. The norm's weight and bias
        are left out, as in HookedTransformer: `process_weights` folds them into what reads the norm.

        Args:
            residual_stack: ``[component, batch, pos, d_model]``, at the positions of `pos_slice` already.
            layer: what enters this layer; None or -1: the unembedding.
            mlp_input: its MLP, not its attention.
            pos_slice: which positions the stack is of.
            batch_slice: which rows of the batch to take.
            has_batch_dim: whether the stack has a batch axis.
            recompute_ln: at the end of the stream, take each component for a whole stream: the final norm, weight and
                bias included, with the component's own scale.

        Returns:
            The stack; unchanged where the layer reads the stream without a norm.

        Raises:
            MissingActivationsError: the norm's `hook_scale` is not cached.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> terms = cache.apply_ln_to_stack(cache.decompose_resid(layer=2), layer=2)
            >>> bool((terms.sum(0) - cache["normalized", 2, "ln1"]).abs().max() < 1e-4)
            True
        """
        return through_norm(self, residual_stack, layer, mlp_input, pos_slice, batch_slice, has_batch_dim, recompute_ln)

    @refuse_wrong_types
    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "component *batch_pos d_model"],
        tokens: Tokens,
        incorrect_tokens: Tokens | None = None,
        pos_slice: Index = None,
        batch_slice: Index = None,
        has_batch_dim: bool = True,
        *,
        norm_weights: bool | None = None,
    ) -> Float[Tensor, " component *batch_pos_out"]:
        """What each term of the residual stream adds directly to the logit of a token (direct logit attribution).

        Over all terms they sum to the logit (before a soft cap), less ``b_U`` and what the final norm's bias adds.

        Args:
            residual_stack: ``[component, batch, pos, d_model]``, at the positions of `pos_slice` already.
            tokens: one token, as text or id; ids ``[batch]``, one for each row; or ``[batch, pos]``.
            incorrect_tokens: tokens whose logits are subtracted, of the same shape.
            pos_slice: which positions the stack is of.
            batch_slice: which rows of the batch to take; tokens are for these.
            has_batch_dim: whether the stack has a batch axis.
            norm_weights: count the final norm's weight. None: yes; `bridge.legacy` leaves it out, as HookedTransformer
                does, and warns where that changes the numbers.

        Returns:
            ``[component, batch, pos]``.

        Raises:
            MissingActivationsError: the final norm's `hook_scale` is not cached.
            ValueError: shapes that do not fit; or logits that are no sum over terms (BERT's head), or of which it is
                not known how they are made; or the weights that make them were changed since the run.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> logits, cache = bridge.run_with_cache("Mary and")
            >>> parts = cache.logit_attrs(cache.decompose_resid(), " John", " Mary")
            >>> right = logits[..., bridge.to_single_token(" John")] - logits[..., bridge.to_single_token(" Mary")]
            >>> bool((parts.sum(0) - right).abs().max() < 1e-3)
            True
        """
        return logit_attributions(
            self, residual_stack, tokens, incorrect_tokens, pos_slice, batch_slice, has_batch_dim, norm_weights
        )


def through_norm(
    cache: AnalysedRun,
    residual_stack: Float[Tensor, "component *batch_pos d_model"],
    layer: int | None = None,
    mlp_input: bool = False,
    pos_slice: Index = None,
    batch_slice: Index = None,
    has_batch_dim: bool = True,
    recompute_ln: bool = False,
) -> Float[Tensor, "component *batch_pos_out d_model"]:
    """Terms of the residual stream as a layer reads them; see `AttributionMethods.apply_ln_to_stack`.

    Args:
        cache: an `ActivationCache`.
        residual_stack, layer, mlp_input, pos_slice, batch_slice, has_batch_dim, recompute_ln: as there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.attribution import through_norm
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> through_norm(cache, cache["embed"][None], layer=2).shape
        torch.Size([1, 1, 3, 128])
    """
    layer = layer_of(cache.model, layer, mlp_input)
    if has_batch_dim:
        residual_stack = pick(residual_stack, batch_slice, 1)
    norm = norm_before(cache.model, layer, mlp_input)
    if norm is None:
        return residual_stack
    with gradients_of(residual_stack):
        if recompute_ln and layer == cache.model.cfg.n_layers:
            cache.module_of_the_run(norm.scale_name)
            return norm.recomputed(residual_stack)
        everywhere = require(cache, [norm.scale_name])[0]
        scale = pick(everywhere, pos_slice, -2)
        if cache.has_batch_dim:
            everywhere, scale = pick(everywhere, batch_slice, 0), pick(scale, batch_slice, 0)
        _check_fits(residual_stack, scale, everywhere, has_batch_dim)
        return norm.scaled(residual_stack, scale.to(residual_stack.device))


def _check_fits(
    stack: Float[Tensor, "..."], scale: Float[Tensor, "..."], everywhere: Float[Tensor, "..."], has_batch_dim: bool
) -> None:
    """Refuses a stack of other rows or positions than the scale: broadcasting could take one for the other.

    Raises:
        ValueError: it is one.
    """
    wanted = list(scale.shape[:-1])
    if not has_batch_dim and wanted[:1] == [1] and len(wanted) == stack.ndim - 1:
        wanted = wanted[1:]
    # Whatever comes before the rows counts components: nothing (one stream), one axis, or several (layers and heads).
    fits = wanted == list(stack.shape[max(0, stack.ndim - 1 - len(wanted)) : -1])
    # Components of all positions are not layers and heads, though there be as many rows as positions.
    of_all = scale.shape != everywhere.shape and stack.shape[1:-1] == everywhere.shape[:-1]
    if not fits or of_all:
        raise ValueError(
            f"residual_stack has shape {list(stack.shape)}; with this pos_slice and batch_slice the cache has scales "
            f"for {wanted}: the stack must be [component, {', '.join(map(str, [*wanted, 'd_model']))}], of the same "
            "positions (give pos_slice to what made it, too)"
        )


def logit_attributions(
    cache: AnalysedRun,
    residual_stack: Float[Tensor, "component *batch_pos d_model"],
    tokens: Tokens,
    incorrect_tokens: Tokens | None = None,
    pos_slice: Index = None,
    batch_slice: Index = None,
    has_batch_dim: bool = True,
    norm_weights: bool | None = None,
) -> Float[Tensor, " component *batch_pos_out"]:
    """What each term adds to the logit of a token; see `AttributionMethods.logit_attrs`.

    Args:
        cache: an `ActivationCache`.
        residual_stack, tokens, incorrect_tokens, pos_slice, batch_slice, has_batch_dim, norm_weights: as there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.attribution import logit_attributions
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> logit_attributions(cache, cache.decompose_resid(), " John", " Mary").shape
        torch.Size([9, 1, 3])
    """
    model = cache.model
    refuse_no_logit_sum(model)
    if "unembed.hook_in" in model.hook_dict:
        cache.module_of_the_run("unembed.hook_in")
    norm = norm_of(model, "ln_final")
    if norm is not None:
        cache.module_of_the_run(norm.scale_name)
        norm.refuse_gate()
    with gradients_of(residual_stack):
        directions = directions_of(model, tokens)
        if incorrect_tokens is not None:
            others = directions_of(model, incorrect_tokens)
            if others.shape != directions.shape:
                raise ValueError(
                    f"tokens and incorrect_tokens have different shapes: {list(directions.shape[:-1])} and "
                    f"{list(others.shape[:-1])}"
                )
            directions = directions - others
        weight = None if norm is None else norm.weight
        if norm_weights is None:
            norm_weights = model.counts_norm_weights
            if not norm_weights and weight is not None and bool((weight != 1).any()):
                warnings.warn(_LEFT_OUT, stacklevel=3)
        if norm_weights and weight is not None:
            directions = directions * weight.to(directions.device)
        terms = through_norm(cache, residual_stack, None, False, pos_slice, batch_slice, has_batch_dim)
        directions = _broadcastable(directions.to(terms.device), terms, has_batch_dim)
        if directions.ndim == 1 and directions.dtype == terms.dtype:
            return terms @ directions
        return (terms * directions).sum(-1)


def _broadcastable(directions: Tensor, terms: Tensor, has_batch_dim: bool) -> Tensor:
    """The directions with the axes of one term: one for each row of the batch holds for all of its positions."""
    axes = terms.shape[1:-1]
    given = directions.shape[:-1]
    if len(given) == 1 and len(axes) == 2 and has_batch_dim and given[0] == axes[0]:
        return directions.unsqueeze(1)
    if given and given != axes[len(axes) - len(given) :]:
        raise ValueError(
            f"tokens of shape {list(given)} do not fit terms of shape {list(axes)} (batch and positions, after "
            "slicing): give one token, or one for each row, or one for each position"
        )
    return directions


def directions_of(model: AnalysedModel, tokens: Tokens) -> Float[Tensor, "*tokens d_model"]:
    """The columns of the unembedding that belong to tokens; see `TransformerBridge.tokens_to_residual_directions`.

    Args:
        model: the bridge.
        tokens: as there.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.attribution import directions_of
        >>> directions_of(TransformerBridge.boot_embedded(), torch.tensor([[5, 7]])).shape
        torch.Size([1, 2, 128])
    """
    if isinstance(tokens, str):
        tokens = model.to_single_token(tokens)
    if "unembed.W_U" not in model.weights.getters:
        raise ValueError(f"{model.cfg.model_name} has no unembedding: nothing is attributed to logits")
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"tokens are {ids.dtype}; they must be whole numbers, or the text of one token")
    if ids.numel() == 1:
        ids = ids.reshape(())
    n = model.cfg.d_vocab_out
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise ValueError(f"tokens go from {int(ids.min())} to {int(ids.max())}; the model has logits for 0 to {n - 1}")
    return model.weights.unembedding_of(ids)
