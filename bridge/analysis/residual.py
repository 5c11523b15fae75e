"""The methods of `ActivationCache` that take the residual stream apart."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.attribution import AttributionMethods
from bridge.analysis.decomposition import Group, Term, stacked, stream_at, terms_of
from bridge.analysis.layer_outputs import results_of_heads, results_of_neurons
from bridge.analysis.requirements import Index, layer_of, pick, require
from bridge.hooks.act_names import last_stream
from bridge.hooks.arguments import check_choice, refuse_wrong_types

Stack = Float[Tensor, "component ..."] | tuple[Float[Tensor, "component ..."], list[str]]


class ResidualMethods(AttributionMethods):
    """What a cache says about the residual stream; names, arguments and order as HookedTransformer's.

    In all methods `layer` means what enters that layer; None and -1 mean the end of the stream. `pos_slice` picks
    positions: an index (the axis goes), a tuple ``(start, stop)``, or a list of indices. ``return_labels`` adds a list
    of names of the components. Nothing here runs the model.

    The terms sum to the residual stream, rounding aside, with these limits. In blocks whose attention and MLP read the
    same stream (GPT-NeoX, GPT-J, Phi), ``mlp_input=True`` adds the layer's attention although its MLP does not read it.
    Where norms stand on the stream itself (BERT), a term is what these norms leave of it, their scales held at those of
    the run, and their biases are a term of their own. Heads and neurons before a norm that follows attention or MLP
    (Gemma 2 and 3) sum with ``post_norms=True`` only. What images put into the stream of a text is a term, ``images``.
    """

    @property
    def has_embed(self) -> bool:
        """Whether the token embedding is cached."""
        return "hook_embed" in self

    @property
    def has_pos_embed(self) -> bool:
        """Whether the position embedding is cached."""
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
        """The residual stream that enters a layer, as a stack of the embeddings and all earlier outputs.

        Their sum is `resid_pre` of the layer; with `mlp_input` its `resid_mid`; at the end the last `resid_post`
        (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end.
            mlp_input: include the layer's own attention: what its MLP reads.
            mode: ``attn``, ``mlp`` or, of hybrids, ``mixer`` for these outputs only.
            apply_ln: as the layer reads them, see `apply_ln_to_stack`.
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
        terms = terms_of(self, layer, mlp_input, groups=groups, pos_slice=pos_slice)
        return self._finished(terms, layer, mlp_input, apply_ln, pos_slice, return_labels)

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
        """The residual stream before each layer up to one, for a logit lens.

        With ``apply_ln=True`` at the end of the stream each goes through the final norm, which takes its scale from it;
        times ``W_U``, plus ``b_U``, these are the logits of the logit lens (nostalgebraist 2020). Where another layer
        reads it before the unembedding (BERT), it is what that layer reads: `TransformerBridge.lens` goes through both.

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end, which is included.
            incl_mid: include the stream between attention and MLP of the layers before.
            apply_ln: through the norm before this layer; see above, and `apply_ln_to_stack` for an inner layer.
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
                f"attention and MLP of {self.model.cfg.model_name} read the same residual stream: there is none "
                "between them for incl_mid or mlp_input"
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
            stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice, recompute_ln=last == n)
        return (stack, list(names)) if return_labels else stack

    def compute_head_results(self) -> None:
        """Puts each head's `hook_result` into the cache, from its `hook_z` and the output projection.

        Raises:
            MissingActivationsError: a layer has neither in the cache.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.compute_head_results()
            >>> cache["result", 0].shape
            torch.Size([1, 3, 4, 128])
        """
        layers = [i for i in range(layer_of(self.model, None)) if f"blocks.{i}.attn.hook_z" in self.model.hook_dict]
        results = {f"blocks.{layer}.attn.hook_result": results_of_heads(self, layer) for layer in layers}
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
        """What each head of the layers before `layer` writes, without the output biases.

        A layer's heads and its ``b_O`` sum to its `attn.hook_out`, which is what is added to the residual stream, but
        where a norm follows attention. (In BERT they are what the stream's own norms leave of that at `layer`.)

        Args:
            layer: heads before this layer; None or -1: all.
            return_labels: also return names such as ``L0H3``.
            incl_remainder: one more component: the stream that enters the layer, less all of these.
            pos_slice: which positions.
            apply_ln: as the layer reads them, see `apply_ln_to_stack`.
            post_norms: where a norm follows attention (Gemma 2 and 3): True: what the norm makes of each head, its
                scale held at that of the run, which is what reaches the stream; False: what comes before it, as in
                HookedTransformer.

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
        terms = terms_of(self, layer, groups=["attn"], heads=True, post_norms=post_norms, pos_slice=pos_slice)
        return self._finished(terms, layer, False, apply_ln, pos_slice, return_labels, incl_remainder)

    @refuse_wrong_types
    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Index = None,
        pos_slice: Index = None,
        project_output_onto: Float[Tensor, "d_model *direction"] | None = None,
    ) -> Float[Tensor, "..."]:
        """What each neuron of a layer writes: its activation times its row of ``W_out``.

        A layer's neurons and its ``b_out`` sum to its `mlp.hook_out`.

        Args:
            layer: the block.
            neuron_slice: which neurons; an int takes the axis away.
            pos_slice: which positions.
            project_output_onto: a direction, or several: their dot products with what is written, in its place.

        Returns:
            ``[batch, pos, neuron, d_model]``; of a direction ``[batch, pos, neuron]``.

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
        """What each neuron of the layers before `layer` writes, without the output biases. This is large.

        Args:
            layer: neurons before this layer; None or -1: all.
            pos_slice: which positions.
            neuron_slice: which neurons of each layer.
            return_labels: also return names such as ``L0N17``.
            incl_remainder: one more component: the stream that enters the layer, less all of these.
            apply_ln: as the layer reads them, see `apply_ln_to_stack`.
            project_output_onto: as for `get_neuron_results`.
            mlp_input: with `incl_remainder` or `apply_ln`: what the layer's MLP reads, not its attention.
            post_norms: as for `stack_head_results`, for a norm that follows the MLP.

        Returns:
            ``[layer * neuron, batch, pos, d_model]``.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: the MLPs are mixtures of experts, or there are none.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.stack_neuron_results(2, pos_slice=-1, neuron_slice=(0, 2), return_labels=True)[1]
            ['L0N0', 'L0N1', 'L1N0', 'L1N1']
        """
        terms = terms_of(
            self,
            layer,
            groups=["mlp"],
            neurons=True,
            post_norms=post_norms,
            pos_slice=pos_slice,
            neuron_slice=neuron_slice,
        )
        return self._finished(
            terms, layer, mlp_input, apply_ln, pos_slice, return_labels, incl_remainder, project_output_onto
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
        """The residual stream that enters a layer, as a stack of heads, neurons (or MLPs), embeddings and biases.

        Args:
            layer: from 0 to ``n_layers``; None or -1: the end.
            mlp_input: include the layer's own attention: what its MLP reads.
            expand_neurons: take MLPs apart into neurons.
            apply_ln: as the layer reads them, see `apply_ln_to_stack`.
            pos_slice: which positions.
            return_labels: also return the names.
            project_output_onto: as for `get_neuron_results`.
            post_norms: as for `stack_head_results`. Without it, where a norm follows attention or MLP, the heads and
                neurons are HookedTransformer's and do not sum to the stream.

        Returns:
            ``[component, batch, pos, d_model]``: all heads, all mixers' outputs, all neurons (or MLP outputs), the
            embeddings, and last the output biases of what was taken apart, summed.

        Raises:
            MissingActivationsError: the cache does not hold what this needs.
            ValueError: there is no such layer; or no neurons to expand.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> stack, labels = cache.get_full_resid_decomposition(1, expand_neurons=False, return_labels=True)
            >>> labels
            ['L0H0', 'L0H1', 'L0H2', 'L0H3', '0_mlp_out', 'embed', 'bias']
        """
        terms = terms_of(
            self,
            layer,
            mlp_input,
            heads=True,
            neurons=expand_neurons,
            biases=True,
            post_norms=post_norms,
            pos_slice=pos_slice,
        )
        terms.sort(key=lambda term: ("attn", "mixer", "mlp", "embed", "bias").index(term.group))
        return self._finished(
            terms, layer, mlp_input, apply_ln, pos_slice, return_labels, directions=project_output_onto
        )

    def _finished(
        self,
        terms: list[Term],
        layer: int | None,
        mlp_input: bool,
        apply_ln: bool,
        pos_slice: Index,
        return_labels: bool,
        incl_remainder: bool = False,
        directions: Tensor | None = None,
    ) -> Stack:
        layer = layer_of(self.model, layer, mlp_input)
        stack, labels = stacked(self, terms, layer, pos_slice)
        if incl_remainder:
            reads = require(self, [f"blocks.{layer}.hook_resid_mid"])[0] if mlp_input else stream_at(self, layer)
            rest = pick(reads, pos_slice, -2) - stack.sum(0)
            stack, labels = torch.cat([stack, rest[None]]), [*labels, "remainder"]
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        stack = _along(stack, directions)
        return (stack, labels) if return_labels else stack


def _along(written: Tensor, directions: Tensor | None) -> Tensor:
    """What is written, or its dot products with directions."""
    return written if directions is None else written @ directions.to(written)
