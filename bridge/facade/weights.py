"""The weights, as HookedTransformer shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis import svd as weight_analysis
from bridge.analysis.analysis import Index, layer_of
from bridge.analysis.layer_outputs import neuron_labels
from bridge.analysis.residual import Tokens, directions_of
from bridge.analysis.svd import Labels, all_scores
from bridge.arguments import refuse_wrong_types
from bridge.facade.hooks import HookMethods
from bridge.hooks.context import without_hooks
from bridge.weights import (
    Component,
    FactoredMatrix,
    first_weight,
    layers_with,
    parts_of_layers,
    stacked_weight,
    stacked_where,
)
from weight_processing.process import OFF, ON, Choice, process, restore


class WeightMethods(HookMethods):
    """The weights of a bridge. The weights of one block are its attributes:
    ``bridge.blocks[3].attn.W_Q``.

    A block's weights, and the embeddings, are views of the model's own parameters. Stacks over all
    layers are new tensors, because the layers' weights are not contiguous in memory. Gradients
    reach the parameters through both.
    """

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the names and tensors of HookedTransformer's state dict.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> dict(bridge.tl_named_parameters())["blocks.0.attn.W_Q"].shape
            torch.Size([4, 128, 32])
        """
        return ((name, get()) for name, get in self.weights.getters.items())

    def tl_parameters(self) -> dict[str, Tensor]:
        """Return HookedTransformer's state dict, as a dictionary."""
        return dict(self.tl_named_parameters())

    @property
    def n_params_total(self) -> int:
        """The number of parameters, with embeddings; shared parameters count once."""
        return self.cfg.n_params

    def stack_params_for(
        self, submodule: str, attr_path: str, reshape_fn: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[list[int], Float[Tensor, "layer ..."]]:
        """Return one weight of all blocks that have a part, stacked, and the indices of these
        blocks.

        Args:
            submodule: the part, such as ``mlp``.
            attr_path: the weight, such as ``mlp.W_in``.
            reshape_fn: a function applied to each weight.

        Raises:
            ValueError: no block has it.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> layers, weights = bridge.stack_params_for("attn", "attn.W_O")
            >>> layers, weights.shape[0]
            ([0, 1, 2, 3], 4)
        """
        return stacked_where(self._tree, self.cfg, submodule, attr_path, reshape_fn)

    def _stack(self, part: str, name: str) -> Tensor:
        return stacked_weight(self._tree, self.cfg, part, name)

    def _weight(self, *names: str) -> Tensor:
        return first_weight(self.weights, *names)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The token embedding."""
        return self._weight("embed.W_E", "embed.embed.W_E")

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The position embedding, if it is learned."""
        return self._weight("pos_embed.W_pos", "embed.pos_embed.W_pos")

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """Token and position embeddings, concatenated along the rows."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        """The unembedding."""
        return self._weight("unembed.W_U")

    @property
    def b_U(self) -> Float[Tensor, " d_vocab_out"]:
        """The unembedding's bias."""
        return self._weight("unembed.b_U")

    @property
    def W_Q(self) -> Float[Tensor, "n_layers n_heads d_model d_head"]:
        """Query weights of all layers."""
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "n_layers n_heads d_model d_head"]:
        """Key weights of all layers; grouped ones repeated for each query head."""
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "n_layers n_heads d_model d_head"]:
        """Value weights of all layers; grouped ones repeated for each query head."""
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "n_layers n_heads d_head d_model"]:
        """Output weights of all layers."""
        return self._stack("attn", "W_O")

    @property
    def W_in(self) -> Float[Tensor, "n_layers d_model d_mlp"]:
        """The MLPs' input weights (in gated MLPs, the projection parallel to the gate)."""
        return self._stack("mlp", "W_in")

    @property
    def W_gate(self) -> Float[Tensor, "n_layers d_model d_mlp"]:
        """Gated MLPs' gate weights."""
        return self._stack("mlp", "W_gate")

    @property
    def W_out(self) -> Float[Tensor, "n_layers d_mlp d_model"]:
        """The MLPs' output weights."""
        return self._stack("mlp", "W_out")

    @property
    def b_Q(self) -> Float[Tensor, "n_layers n_heads d_head"]:
        """Query biases of all layers."""
        return self._stack("attn", "b_Q")

    @property
    def b_K(self) -> Float[Tensor, "n_layers n_heads d_head"]:
        """Key biases of all layers; grouped ones repeated for each query head."""
        return self._stack("attn", "b_K")

    @property
    def b_V(self) -> Float[Tensor, "n_layers n_heads d_head"]:
        """Value biases of all layers; grouped ones repeated for each query head."""
        return self._stack("attn", "b_V")

    @property
    def b_O(self) -> Float[Tensor, "n_layers d_model"]:
        """Output biases of all layers."""
        return self._stack("attn", "b_O")

    @property
    def b_in(self) -> Float[Tensor, "n_layers d_mlp"]:
        """The MLPs' input biases."""
        return self._stack("mlp", "b_in")

    @property
    def b_gate(self) -> Float[Tensor, "n_layers d_mlp"]:
        """The gate biases of gated MLPs, if their gates have biases."""
        return self._stack("mlp", "b_gate")

    @property
    def b_out(self) -> Float[Tensor, "n_layers d_model"]:
        """The MLPs' output biases."""
        return self._stack("mlp", "b_out")

    # HookedTransformer's weight processing, on the Hugging Face model's own parameters.

    def process_weights(
        self,
        *,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        check: bool | Literal["each"] = True,
        verbose: bool = False,
    ) -> None:
        """Make the weights easier to interpret, without changing log probabilities. The model's
        parameters are modified. A transform that is not possible for a model is skipped if it is
        only a default, and raises an error if you request it explicitly; nothing is modified before
        this is decided. ``cfg.processed`` says for each transform that it is done, or why not.
        Finished transforms are not repeated.

        Args:
            fold_ln: fold the norms' weights and biases into the matrices that read them.
            center_writing_weights: subtract the mean from everything written to the residual
                stream.
            center_unembed: subtract the mean over the vocabulary from the unembedding.
            fold_value_biases: fold the values' biases into the attention's output bias.
            refactor_factored_attn_matrices: make the columns of each head's matrices orthogonal.
            check: compare the log probabilities of random tokens before and after; ``"each"``:
                after each transform.
            verbose: print the transforms that were done, and the skipped ones, with the reasons.

        Raises:
            ProcessingError: an explicitly requested transform is not possible for this model; or
                the log probabilities differ.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.process_weights()
            >>> bool(bridge.W_U.mean(-1).abs().max() < 1e-5), bridge.cfg.normalization_type
            (True, 'RMSPre')
        """
        choices: dict[str, Choice] = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        process(self, choices, check, without_hooks)
        if verbose:
            print("\n".join(f"{name}: {state}" for name, state in self.cfg.processed.items()))

    def enable_compatibility_mode(
        self,
        *,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        no_processing: bool = False,
        check: bool | Literal["each"] = True,
        disable_warnings: bool = False,
    ) -> None:
        """Make weights and activations the same as those of ``HookedTransformer.from_pretrained``
        with its defaults.

        Args:
            fold_ln, center_writing_weights, center_unembed, fold_value_biases,
            refactor_factored_attn_matrices, check:
                as for `process_weights`.
            no_processing: do not change the weights
                (``HookedTransformer.from_pretrained_no_processing``).
            disable_warnings: accepted for compatibility; there are no warnings.

        Raises:
            ProcessingError: as for `process_weights`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.enable_compatibility_mode()
            >>> bridge.cfg.processed["center_unembed"]
            'done'
        """
        if not no_processing:
            self.process_weights(
                fold_ln=fold_ln,
                center_writing_weights=center_writing_weights,
                center_unembed=center_unembed,
                fold_value_biases=fold_value_biases,
                refactor_factored_attn_matrices=refactor_factored_attn_matrices,
                check=check,
            )

    def restore_processing(self) -> None:
        """Repeat the weight processing that was done before the model was saved, as its
        configuration says. `boot_transformers` calls this. A saved model computes the same
        function, but biases for which its class has no parameter are saved as biases of norms; this
        moves them back.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.restore_processing()  # nothing was done to this one
        """
        restore(self, without_hooks)

    # What the weights say about heads and logits.

    @property
    def layer_types(self) -> Labels:
        """The parts of each layer, in forward order: ``attn+mlp``, ``mixer+mlp``, ``mixer``, ...

        A state space, a linear attention or a convolution is a mixer. In an encoder-decoder, the
        encoder's layers come first, then the decoder's. ``unknown``: a layer of an inferred model
        about which nothing could be inferred.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().layer_types
            ['attn+mlp', 'attn+mlp', 'attn+mlp', 'attn+mlp']
        """
        layers = parts_of_layers(self._tree, self.architecture, self.cfg)
        return Labels("+".join(names) or "unknown" for names in layers.values())

    @refuse_wrong_types
    def blocks_with(
        self, part: str | None = None, *, submodule: str | None = None
    ) -> list[tuple[int, Component]]:
        """Return the layers that have a part, with their indices, to iterate over the layers of a
        hybrid.

        Args:
            part: ``attn``, ``mixer``, ``mlp``, ``cross_attn``, or another part in `layer_types`.
            submodule: another name for `part`.

        Returns:
            ``[(index, block), ...]``; in an encoder-decoder the encoder's layers, then the
            decoder's, each counted from 0.

        Raises:
            ValueError: no part has this name.
            TypeError: no part, or two.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> [(index, block.attn.hook_z.name) for index, block in bridge.blocks_with("attn")][1]
            (1, 'blocks.1.attn.hook_z')
            >>> bridge.blocks_with("mixer")
            []
        """
        if (part is None) == (submodule is None):
            raise TypeError("blocks_with takes one part: as `part`, or as `submodule`")
        return layers_with(
            part or submodule or "",
            parts_of_layers(self._tree, self.architecture, self.cfg),
            self._tree,
            self.call_part,
        )

    @property
    def OV(self) -> FactoredMatrix:
        """Each head's ``W_V @ W_O``, ``[n_layers, n_heads, d_model, d_model]``.

        The map from the residual stream at the attended position to the head's output. Norms are
        excluded, except weights that `process_weights` has folded in.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().OV.shape
            torch.Size([4, 4, 128, 128])
        """
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """Each head's ``W_Q @ W_K.T``, ``[n_layers, n_heads, d_model, d_model]``.

        The bilinear form of the attention scores, without the scale, biases, rotation, and norms of
        queries and keys.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().QK[1, 2].shape
            torch.Size([128, 128])
        """
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @refuse_wrong_types
    def all_composition_scores(
        self, mode: Literal["Q", "K", "V"]
    ) -> Float[Tensor, "n_layers n_heads n_layers n_heads"]:
        """Return how much each head reads, through its queries, keys or values, from the output of
        each earlier head. A score is the norm of the product of both matrices, divided by the
        product of their norms (Elhage et al. 2021, "A Mathematical Framework for Transformer
        Circuits").

        Args:
            mode: ``Q``, ``K`` or ``V``.

        Returns:
            ``[writing layer, head, reading layer, head]``; zero unless the reader is in a later
            layer.

        Raises:
            ValueError: another mode.

        Example:
            >>> from bridge import TransformerBridge
            >>> scores = TransformerBridge.boot_embedded().all_composition_scores("V")
            >>> bool((scores[0, :, 1] > 0).all()), bool((scores[1, :, 1] == 0).all())
            (True, True)
        """
        return all_scores(self.OV, self.QK, mode)

    @refuse_wrong_types
    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Return the sum of the output biases of all layers before one.

        It is their contribution to the residual stream, unless a norm follows attention or MLP
        (Gemma 2) or is applied to the stream (BERT). A mixture of experts contributes no bias.

        Args:
            layer: from 0 to ``n_layers``; -1: ``n_layers``.
            mlp_input: include the layer's own attention.
            include_mlp_biases: False: only attention biases.

        Raises:
            ValueError: there is no such layer.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().accumulated_bias(2, mlp_input=True).shape
            torch.Size([128])
        """
        return weight_analysis.accumulated_bias(self, layer, mlp_input, include_mlp_biases)

    @refuse_wrong_types
    def tokens_to_residual_directions(self, tokens: Tokens) -> Float[Tensor, "*tokens d_model"]:
        """Return the columns of the unembedding that belong to tokens.

        The logit of a token is the dot product of its direction and the final norm's output, plus
        its bias. The weight of the final norm is included only if `process_weights` has folded it
        in.

        Args:
            tokens: one token, as text or id, or ids of any shape.

        Returns:
            ``[d_model]`` for one token, or ``[*tokens, d_model]``.

        Raises:
            ValueError: a text that is not one token; an id that has no logit.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().tokens_to_residual_directions(" Mary").shape
            torch.Size([128])
        """
        return directions_of(self, tokens)

    @property
    def all_head_labels(self) -> Labels:
        """The names of all heads: ``L0H0``, ``L0H1``, ...; an encoder-decoder's are ``EL0H0``, ...,
        ``DL0H0``, ...

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().all_head_labels()[3:6]
            ['L0H3', 'L1H0', 'L1H1']
        """
        return weight_analysis.head_labels(self)

    @property
    def attn_head_labels(self) -> Labels:
        """The names of the heads in the order of `all_composition_scores`: every layer has
        attention here.

        Example:
            >>> from bridge import TransformerBridge
            >>> len(TransformerBridge.boot_embedded().attn_head_labels)
            16
        """
        return self.all_head_labels

    @refuse_wrong_types
    def get_neuron_labels(self, layer: int | None = None, neuron_slice: Index = None) -> list[str]:
        """Return the names of the neurons of all layers before one, in the order of
        `stack_neuron_results`.

        Args:
            layer: include neurons before this layer; None or -1: all neurons.
            neuron_slice: which neurons of each layer.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().get_neuron_labels(2, (0, 2))
            ['L0N0', 'L0N1', 'L1N0', 'L1N1']
        """
        return [
            name
            for i in range(layer_of(self, layer))
            for name in neuron_labels(self, i, neuron_slice)
        ]
