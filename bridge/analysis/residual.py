"""The methods of `ActivationCache` that decompose the residual stream."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.analysis import (
    AnalysedRun,
    Index,
    layer_of,
    pick,
    refuse_no_logit_sum,
    require,
)
from bridge.analysis.decomposition import (
    Group,
    StreamTerms,
    stream_at,
    stream_names,
    tolerance_of_sum,
)
from bridge.analysis.layer_outputs import (
    gradients_of,
    norm_before,
    norm_of,
    post_norm,
    results_of_heads,
    results_of_neurons,
)
from bridge.arguments import check_choice, refuse_wrong_types
from bridge.hooks.names import act_name, last_stream
from bridge.hooks.studied_bridge import StudiedBridge

#: A token: its text, its id, or ids in a tensor.
Tokens = str | int | Tensor
_LEFT_OUT = (
    "logit_attrs leaves out the final norm's weight, as HookedTransformer does, and this model's is"
    " not folded: the parts do not sum to the logits. process_weights() folds it, norm_weights=True"
    " counts it, and norm_weights=False says that it is to be left out."
)
#: The most numbers of terms after the final norm that are in memory at once, for per-position
#: results.
_AT_ONCE = 2**24

#: The number of positions at which terms are compared with the stream.
_COMPARED = 16


class IncompleteSumWarning(UserWarning):
    """The terms of a residual stream do not sum to the stream of the run."""


Stack = Float[Tensor, "component ..."] | tuple[Float[Tensor, "component ..."], list[str]]


class ResidualMethods(AnalysedRun):
    """Methods of a cache about the residual stream; names and arguments as HookedTransformer's.

    In all methods `layer` means the input of that layer; None and -1 mean the end of the stream.
    `pos_slice` selects positions: an index (which removes the axis), a tuple ``(start, stop)``, or
    a list of indices. ``return_labels`` adds a list of component names. No method runs the model.

    The terms sum to the residual stream, up to rounding, with these limits. In blocks whose
    attention and MLP read the same stream (GPT-NeoX, GPT-J, Phi), ``mlp_input=True`` adds the
    layer's attention although its MLP does not read it. If norms are applied to the stream itself
    (BERT), each term is passed through these norms, with the scales of the run, and their biases
    form a separate term. Heads and neurons before a norm that follows attention or MLP (Gemma 2 and
    3) sum to the stream only with ``post_norms=True``. The contribution of images to the stream of
    a text is a term, ``images``.
    """

    @refuse_wrong_types
    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layer ..."]:
        """Stack one activation of all layers before `layer`.

        Args:
            activation_name: its short name, such as ``q`` or ``resid_pre``.
            layer: layers before this one; None or -1: all.
            sublayer_type: the part of the block, such as ``ln1``, if the name does not include it.

        Raises:
            MissingActivationsError: the cache does not hold one of them.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.stack_activation("scale", sublayer_type="ln1").shape
            torch.Size([4, 1, 3, 1])
        """
        layers = range(layer_of(self.model, layer))
        names = [act_name(activation_name, index, sublayer_type) for index in layers]
        return torch.stack(require(self, names))

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
        """Apply the cached norm of a layer to terms of the residual stream: centre, and divide by
        the scale.

        The scale is computed from the whole stream, so the results sum to the normalised stream.
        The norm's weight and bias are ignored, as in HookedTransformer: `process_weights` folds
        them into the next linear layer.

        Args:
            residual_stack: ``[component, batch, pos, d_model]``, already restricted to `pos_slice`.
            layer: the norm before this layer; None or -1: before the unembedding.
            mlp_input: the norm before its MLP, not its attention.
            pos_slice: the positions of the stack.
            batch_slice: which rows of the batch to take.
            has_batch_dim: whether the stack has a batch axis.
            recompute_ln: at the end of the stream, treat each component as a whole stream: apply
                the final norm, with weight and bias, with the component's own scale.

        Returns:
            The stack; unchanged if the layer reads the stream without a norm.

        Raises:
            MissingActivationsError: the norm's `hook_scale` is not cached.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> terms = cache.apply_ln_to_stack(cache.decompose_resid(layer=2), layer=2)
            >>> bool((terms.sum(0) - cache["normalized", 2, "ln1"]).abs().max() < 1e-4)
            True
        """
        layer = layer_of(self.model, layer, mlp_input)
        if has_batch_dim:
            residual_stack = pick(residual_stack, batch_slice, 1)
        norm = norm_before(self.model, layer, mlp_input)
        if norm is None:
            return residual_stack
        with gradients_of(residual_stack):
            if recompute_ln and layer == self.model.cfg.n_layers:
                self.module_of_the_run(norm.scale_name)
                return norm.recomputed(residual_stack)
            everywhere = require(self, [norm.scale_name])[0]
            scale = pick(everywhere, pos_slice, -2)
            if self.has_batch_dim:
                everywhere = pick(everywhere, batch_slice, 0)
                scale = pick(scale, batch_slice, 0)
            _check_fits(residual_stack, scale, everywhere, has_batch_dim)
            return norm.scaled(residual_stack, scale.to(residual_stack.device))

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
        """Compute each term's direct contribution to the logit of a token (direct logit
        attribution).

        The sum over all terms is the logit (before a soft cap), without ``b_U`` and the
        contribution of the final norm's bias.

        Args:
            residual_stack: ``[component, batch, pos, d_model]``, already restricted to `pos_slice`.
            tokens: one token, as text or id; ids ``[batch]``, one for each row; or ``[batch,
                pos]``.
            incorrect_tokens: tokens whose logits are subtracted, of the same shape.
            pos_slice: the positions of the stack.
            batch_slice: which rows of the batch to take; `tokens` belong to these rows.
            has_batch_dim: whether the stack has a batch axis.
            norm_weights: include the final norm's weight. None: include it, except in
                `bridge.legacy`, which omits it, as HookedTransformer does, and warns if that
                changes the numbers.

        Returns:
            ``[component, batch, pos]``.

        Raises:
            MissingActivationsError: the final norm's `hook_scale` is not cached.
            ValueError: shapes that do not fit; logits that are not a sum over terms (BERT's head),
                or whose computation is unknown; or weights that were changed since the run.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> logits, cache = bridge.run_with_cache("Mary and")
            >>> parts = cache.logit_attrs(cache.decompose_resid(), " John", " Mary")
            >>> right = (
            ...     logits[..., bridge.to_single_token(" John")]
            ...     - logits[..., bridge.to_single_token(" Mary")]
            ... )
            >>> bool((parts.sum(0) - right).abs().max() < 1e-3)
            True
        """
        model = self.model
        refuse_no_logit_sum(model)
        if "unembed.hook_in" in model.hook_dict:
            self.module_of_the_run("unembed.hook_in")
        norm = norm_of(model, "ln_final")
        if norm is not None:
            self.module_of_the_run(norm.scale_name)
            norm.refuse_gate()
        with gradients_of(residual_stack):
            directions = _directions_between(model, tokens, incorrect_tokens)
            weight = None if norm is None else norm.weight
            if weight is not None and _counts(weight, norm_weights, model):
                directions = directions * weight.to(directions.device)
            # Process the terms in chunks: the normed terms are as large as the stack.
            chunks: Sequence[Tensor] = (residual_stack,)
            if residual_stack.ndim == 4:
                at_once = len(residual_stack) * _AT_ONCE // max(1, residual_stack.numel())
                chunks = residual_stack.split(max(1, at_once))
            products = []
            for chunk in chunks:
                terms = self.apply_ln_to_stack(
                    chunk, None, False, pos_slice, batch_slice, has_batch_dim
                )
                along = _broadcastable(directions.to(terms.device), terms, has_batch_dim)
                plain = along.ndim == 1 and along.dtype == terms.dtype
                products.append(terms @ along if plain else (terms * along).sum(-1))
            return products[0] if len(products) == 1 else torch.cat(products)

    @property
    def has_embed(self) -> bool:
        """Tell whether the token embedding is cached."""
        return "hook_embed" in self

    @property
    def has_pos_embed(self) -> bool:
        """Tell whether the position embedding is cached."""
        return "hook_pos_embed" in self

    @refuse_wrong_types
    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn", "mixer"] = "all",
        apply_ln: bool = False,
        pos_slice: Index = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Stack:
        """Return the residual stream before a layer as a stack of embeddings and earlier outputs.

        The terms sum to the layer's `resid_pre`; with `mlp_input` to its `resid_mid`; at the end to
        the last `resid_post` (Elhage et al. 2021, "A Mathematical Framework for Transformer
        Circuits").

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end.
            mlp_input: decompose the input of the layer's MLP, which includes its own attention.
            mode: ``attn``, ``mlp`` or, in hybrids, ``mixer``: only these outputs.
            apply_ln: apply the layer's norm to the terms, see `apply_ln_to_stack`.
            pos_slice: which positions.
            incl_embeds: include the embeddings (and, in BERT, the norms' biases).
            return_labels: also return names such as ``embed``, ``0_attn_out``.

        Returns:
            ``[component, batch, pos, d_model]``.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: there is no such layer or mode.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> stack, labels = cache.decompose_resid(layer=1, return_labels=True)
            >>> labels, bool((stack.sum(0) - cache["resid_pre", 1]).abs().max() < 1e-4)
            (['embed', '0_attn_out', '0_mlp_out'], True)
        """
        check_choice("mode", mode, ("all", "mlp", "attn", "mixer"))
        groups: list[Group] = ["embed", "bias"] if incl_embeds else []
        groups += ["attn", "mixer", "mlp"] if mode == "all" else [mode]
        terms = StreamTerms(self, layer, mlp_input, groups=groups, pos_slice=pos_slice)
        return self._finished(
            terms, mlp_input, apply_ln, return_labels, complete=mode == "all" and incl_embeds
        )

    @refuse_wrong_types
    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Index = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack:
        """Return the residual stream before each layer up to one, for a logit lens.

        With ``apply_ln=True`` at the end of the stream, the final norm is applied to each, with
        that stream's own scale; times ``W_U``, plus ``b_U``, the results are the logits of the
        logit lens (nostalgebraist 2020). If another layer comes before the unembedding (BERT), they
        are that layer's inputs; `TransformerBridge.lens` applies both.

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end, which is included.
            incl_mid: also include the stream between attention and MLP of earlier layers.
            apply_ln: apply the norm before this layer; see above, and `apply_ln_to_stack` for an
                inner layer.
            pos_slice: which positions.
            mlp_input: include the layer's own `resid_mid`.
            return_labels: also return names such as ``0_pre``, ``0_mid``, ``final_post``.

        Returns:
            ``[component, batch, pos, d_model]``.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: there is no such layer; or no stream between attention and MLP.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> logits, cache = bridge.run_with_cache("Mary and")
            >>> lens = cache.accumulated_resid(apply_ln=True) @ bridge.W_U + bridge.b_U
            >>> lens.shape[:3], bool((lens[-1] - logits).abs().max() < 1e-3)
            (torch.Size([5, 1, 3]), True)
        """
        last = layer_of(self.model, layer, mlp_input)
        n = self.model.cfg.n_layers
        if (incl_mid or mlp_input) and self.model.cfg.parallel_attn_mlp:
            raise ValueError(
                f"attention and MLP of {self.model.cfg.model_name} read the same residual stream:"
                " there is none between them for incl_mid or mlp_input"
            )
        names: dict[str, str] = {}
        for index in range(last + 1):
            if index == n:
                names["final_post"] = last_stream(self.model.hook_dict, n)
                break
            names[f"{index}_pre"] = f"blocks.{index}.hook_resid_pre"
            if mlp_input if index == last else incl_mid:
                names[f"{index}_mid"] = f"blocks.{index}.hook_resid_mid"
        stack = torch.stack([pick(value, pos_slice, -2) for value in require(self, names.values())])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack, last, mlp_input, pos_slice, recompute_ln=last == n
            )
        return (stack, list(names)) if return_labels else stack

    def compute_head_results(self) -> None:
        """Add each head's `hook_result` to the cache, from its `hook_z` and the output projection.

        Raises:
            MissingActivationsError: a layer has neither in the cache.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.compute_head_results()
            >>> cache["result", 0].shape
            torch.Size([1, 3, 4, 128])
        """
        results = {
            f"blocks.{layer}.attn.hook_result": results_of_heads(self, layer)
            for layer in range(layer_of(self.model, None))
            if f"blocks.{layer}.attn.hook_z" in self.model.hook_dict
        }
        self.cache_dict.update(results)

    @refuse_wrong_types
    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Index = None,
        apply_ln: bool = False,
        *,
        post_norms: bool = False,
    ) -> Stack:
        """Stack the outputs of all heads before `layer`, without the output biases.

        A layer's heads and its ``b_O`` sum to its `hook_attn_out`, which is added to the residual
        stream. If a norm follows attention, they sum to its `attn.hook_out`. (In BERT, they sum to
        the part of it that remains at `layer` after the norms on the stream.)

        Args:
            layer: include heads before this layer; None or -1: all heads.
            return_labels: also return names such as ``L0H3``.
            incl_remainder: add one more component: the stream that enters the layer, minus all
                others.
            pos_slice: which positions.
            apply_ln: apply the layer's norm to the terms, see `apply_ln_to_stack`.
            post_norms: for a norm that follows attention (Gemma 2 and 3): True: each head's output
                after the norm, with the scale of the run, as it reaches the stream; False: before
                the norm, as in HookedTransformer.

        Returns:
            ``[layer * head, batch, pos, d_model]``.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> stack, labels = cache.stack_head_results(layer=2, return_labels=True, pos_slice=-1)
            >>> stack.shape, labels[:5]
            (torch.Size([8, 1, 128]), ['L0H0', 'L0H1', 'L0H2', 'L0H3', 'L1H0'])
        """
        terms = StreamTerms(
            self, layer, groups=["attn"], heads=True, post_norms=post_norms, pos_slice=pos_slice
        )
        return self._finished(terms, False, apply_ln, return_labels, incl_remainder)

    @refuse_wrong_types
    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Index = None,
        pos_slice: Index = None,
        project_output_onto: Float[Tensor, "d_model *direction"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Return each neuron's output in a layer: its activation times its row of ``W_out``.

        A layer's neurons and its ``b_out`` sum to its `hook_mlp_out`, or to its `mlp.hook_out` if a
        norm follows.

        Args:
            layer: the block.
            neuron_slice: which neurons; an int removes the axis.
            pos_slice: which positions.
            project_output_onto: a direction, or several: return the outputs' dot products with them
                instead.

        Returns:
            ``[batch, pos, neuron, d_model]``; for one direction ``[batch, pos, neuron]``.

        Raises:
            MissingActivationsError: `mlp.hook_post` is not cached.
            ValueError: the layer is a mixture of experts, or has no MLP.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.get_neuron_results(1, neuron_slice=[3, 8]).shape
            torch.Size([1, 3, 2, 128])
        """
        return _along(results_of_neurons(self, layer, neuron_slice, pos_slice), project_output_onto)

    @refuse_wrong_types
    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Index = None,
        neuron_slice: Index = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Float[Tensor, "d_model *direction"] | None = None,
        mlp_input: bool = False,
        *,
        post_norms: bool = False,
    ) -> Stack:
        """Stack the outputs of all neurons before `layer`, without the biases. The result is large.

        Args:
            layer: include neurons before this layer; None or -1: all neurons.
            pos_slice: which positions.
            neuron_slice: which neurons of each layer.
            return_labels: also return names such as ``L0N17``.
            incl_remainder: add one more component: the stream that enters the layer, minus all
                others.
            apply_ln: apply the layer's norm to the terms, see `apply_ln_to_stack`.
            project_output_onto: as for `get_neuron_results`.
            mlp_input: with `incl_remainder` or `apply_ln`: the input of the layer's MLP, not its
                attention.
            post_norms: as for `stack_head_results`, for a norm that follows the MLP.

        Returns:
            ``[layer * neuron, batch, pos, d_model]``.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: the MLPs are mixtures of experts, or there are none.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.stack_neuron_results(
            ...     2, pos_slice=-1, neuron_slice=(0, 2), return_labels=True
            ... )[1]
            ['L0N0', 'L0N1', 'L1N0', 'L1N1']
        """
        terms = StreamTerms(
            self,
            layer,
            groups=["mlp"],
            neurons=True,
            post_norms=post_norms,
            pos_slice=pos_slice,
            neuron_slice=neuron_slice,
        )
        return self._finished(
            terms, mlp_input, apply_ln, return_labels, incl_remainder, project_output_onto
        )

    @refuse_wrong_types
    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Index = None,
        return_labels: bool = False,
        project_output_onto: Float[Tensor, "d_model *direction"] | None = None,
        *,
        post_norms: bool = False,
    ) -> Stack:
        """Return the residual stream before a layer as a stack of heads, neurons (or MLPs) and
        biases.

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end.
            mlp_input: decompose the input of the layer's MLP, which includes its own attention.
            expand_neurons: split MLPs into neurons.
            apply_ln: apply the layer's norm to the terms, see `apply_ln_to_stack`.
            pos_slice: which positions.
            return_labels: also return the names.
            project_output_onto: as for `get_neuron_results`.
            post_norms: as for `stack_head_results`. Without it, if a norm follows attention or MLP,
                heads and neurons are as in HookedTransformer and do not sum to the stream.

        Returns:
            ``[component, batch, pos, d_model]``: all heads, all mixers' outputs, all neurons (or
            MLP outputs), the embeddings, and last the sum of the output biases of the decomposed
            parts.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: there is no such layer; or no neurons to expand.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> stack, labels = cache.get_full_resid_decomposition(
            ...     1, expand_neurons=False, return_labels=True
            ... )
            >>> labels
            ['L0H0', 'L0H1', 'L0H2', 'L0H3', '0_mlp_out', 'embed', 'bias']
        """
        stream = StreamTerms(
            self,
            layer,
            mlp_input,
            heads=True,
            neurons=expand_neurons,
            biases=True,
            post_norms=post_norms,
            pos_slice=pos_slice,
        )
        order = ("attn", "mixer", "mlp", "embed", "bias")
        stream.terms.sort(key=lambda term: order.index(term.group))
        norms = (post_norm(self.model, 0, part) for part in ("attn", "mlp"))
        return self._finished(
            stream,
            mlp_input,
            apply_ln,
            return_labels,
            directions=project_output_onto,
            complete=post_norms or not any(norms),
        )

    def _finished(
        self,
        terms: StreamTerms,
        mlp_input: bool,
        apply_ln: bool,
        return_labels: bool,
        incl_remainder: bool = False,
        directions: Tensor | None = None,
        complete: bool = False,
    ) -> Stack:
        layer, pos_slice = layer_of(self.model, terms.end, mlp_input), terms.pos_slice
        stack, labels = terms.stacked()
        if complete:
            tolerance = max(tolerance_of_sum(term.value.dtype) for term in terms.terms)
            _warn_other_sum(self, stack, tolerance, layer, mlp_input, pos_slice)
        if incl_remainder:
            if mlp_input:
                (stream,) = require(self, [f"blocks.{layer}.hook_resid_mid"])
            else:
                stream = stream_at(self, layer)
            rest = pick(stream, pos_slice, -2) - stack.sum(0)
            stack = torch.cat([stack, rest[None]])
            labels.append("remainder")
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        stack = _along(stack, directions)
        return (stack, labels) if return_labels else stack


def _warn_other_sum(
    cache: AnalysedRun,
    stack: Float[Tensor, "component *batch_pos d_model"],
    tolerance: float,
    layer: int,
    mlp_input: bool,
    pos_slice: Index,
) -> None:
    """Warn if terms do not sum to the stream that the run recorded. The tolerance is that of the
    coarsest of them, relative to the largest number.
    """
    names = [f"blocks.{layer}.hook_resid_mid"] if mlp_input else stream_names(cache.model, layer)
    name = next((name for name in names if name in cache), None)
    if name is None:
        return
    right = pick(cache[name], pos_slice, -2)
    if right.ndim > 1:  # comparing a few positions is enough, and cheap
        step = max(1, right.shape[-2] // _COMPARED)
        stack, right = stack[..., ::step, :], right[..., ::step, :]
    total = stack.sum(0).to(right)
    largest = right.abs().max() if right.numel() else right.new_zeros(())
    difference = (total - right).abs().max() if right.numel() else largest
    if difference > max(tolerance, tolerance_of_sum(right.dtype)) * largest:
        warnings.warn(
            f"the terms do not sum to {name}: they differ by up to {difference:.3g} (its largest"
            f" number is {largest:.3g}). Something else changed the stream in this run: a hook, a"
            " module's hook or forward that was replaced, or a factor changed after wrapping",
            IncompleteSumWarning,
            stacklevel=5,
        )


def _along(written: Tensor, directions: Tensor | None) -> Tensor:
    """Return the terms, or their dot products with directions."""
    return written if directions is None else written @ directions.to(written)


def _check_fits(
    stack: Float[Tensor, "..."],
    scale: Float[Tensor, "..."],
    everywhere: Float[Tensor, "..."],
    has_batch_dim: bool,
) -> None:
    """Reject a stack whose rows or positions differ from the scale's, since it might be broadcast.

    Raises:
        ValueError: it has other rows or positions.
    """
    scaled = list(scale.shape[:-1])
    if not has_batch_dim and scaled[:1] == [1] and len(scaled) == stack.ndim - 1:
        scaled = scaled[1:]
    # All axes before the rows count components: none (one stream), one axis, or several (layers and
    # heads).
    fits = scaled == list(stack.shape[max(0, stack.ndim - 1 - len(scaled)) : -1])
    # Do not take components and positions for layers and heads, even if rows and positions agree in
    # number.
    of_all = scale.shape != everywhere.shape and stack.shape[1:-1] == everywhere.shape[:-1]
    if not fits or of_all:
        raise ValueError(
            f"residual_stack has shape {list(stack.shape)}; with this pos_slice and batch_slice the"
            f" cache has scales for {scaled}: the stack must be [component,"
            f" {', '.join(map(str, [*scaled, 'd_model']))}], of the same positions (give pos_slice"
            " to what made it, too)"
        )


def _broadcastable(directions: Tensor, terms: Tensor, has_batch_dim: bool) -> Tensor:
    """Add the axes of one term to the directions, so that a row's direction covers its
    positions.
    """
    axes = terms.shape[1:-1]
    shape = directions.shape[:-1]
    if len(shape) == 1 and len(axes) == 2 and has_batch_dim and shape[0] == axes[0]:
        return directions.unsqueeze(1)
    if shape and shape != axes[len(axes) - len(shape) :]:
        raise ValueError(
            f"tokens of shape {list(shape)} do not fit terms of shape {list(axes)} (batch and"
            " positions, after slicing): give one token, or one for each row, or one for each"
            " position"
        )
    return directions


def _counts(weight: Tensor, norm_weights: bool | None, model: StudiedBridge) -> bool:
    """Tell whether to count the final norm's weight; warn if it is left out by default."""
    if norm_weights is not None:
        return norm_weights
    if not model.counts_norm_weights and bool((weight != 1).any()):
        warnings.warn(_LEFT_OUT, stacklevel=4)
    return model.counts_norm_weights


def _directions_between(
    model: StudiedBridge, tokens: Tokens, incorrect_tokens: Tokens | None
) -> Tensor:
    """Return the directions of tokens, or their differences from those of incorrect tokens."""
    directions = directions_of(model, tokens)
    if incorrect_tokens is None:
        return directions
    others = directions_of(model, incorrect_tokens)
    if others.shape != directions.shape:
        raise ValueError(
            "tokens and incorrect_tokens have different shapes:"
            f" {list(directions.shape[:-1])} and {list(others.shape[:-1])}"
        )
    return directions - others


def directions_of(model: StudiedBridge, tokens: Tokens) -> Float[Tensor, "*tokens d_model"]:
    """Return the columns of the unembedding that belong to tokens; see
    `TransformerBridge.tokens_to_residual_directions`.

    Args:
        model: the bridge.
        tokens: see there.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual import directions_of
        >>> directions_of(TransformerBridge.boot_embedded(), torch.tensor([[5, 7]])).shape
        torch.Size([1, 2, 128])
    """
    if isinstance(tokens, str):
        tokens = model.to_answer_token(tokens)
    if "unembed.W_U" not in model.weights.getters:
        raise ValueError(
            f"{model.cfg.model_name} has no unembedding, so there are no logits to attribute"
        )
    ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, device="cpu")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"tokens are {ids.dtype}; they must be whole numbers, or the text of one token"
        )
    if ids.numel() == 1:
        ids = ids.reshape(())
    n = model.cfg.d_vocab_out
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise ValueError(
            f"tokens go from {int(ids.min())} to {int(ids.max())}; the model has logits for 0 to"
            f" {n - 1}"
        )
    return model.weights.unembedding_of(ids)
