"""What the weights say about heads and logits."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from bridge.analysis import weight_analysis
from bridge.analysis.attribution import Tokens, directions_of
from bridge.analysis.composition import all_scores
from bridge.analysis.layer_outputs import neuron_labels
from bridge.analysis.requirements import Index, layer_of
from bridge.analysis.weight_analysis import Labels
from bridge.facade.tokens import TokenMethods
from bridge.facade.weights import WeightMethods
from bridge.hooks.arguments import refuse_wrong_types
from bridge.weights.component_tree import Component
from bridge.weights.factored_matrix import FactoredMatrix
from bridge.weights.layer_kinds import layers_with, parts_of_layers


class AnalysisMethods(WeightMethods, TokenMethods):
    """The methods of a bridge that study its weights; names and shapes are HookedTransformer's."""

    @property
    def layer_types(self) -> Labels:
        """What each layer is made of, in the order of the computation: ``attn+mlp``, ``mixer+mlp``, ``mixer``, ...

        A state space, a linear attention or a convolution is a mixer. Of an encoder-decoder these are the layers of the
        encoder, and then those of the decoder. ``unknown``: of an inferred model, where nothing was found out.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().layer_types
            ['attn+mlp', 'attn+mlp', 'attn+mlp', 'attn+mlp']
        """
        layers = parts_of_layers(self._tree, self.architecture, self.cfg)
        return Labels("+".join(names) or "unknown" for names in layers.values())

    @refuse_wrong_types
    def blocks_with(self, part: str) -> list[tuple[int, Component]]:
        """The layers that have a part, with their indices: what hybrids are gone through by.

        Args:
            part: ``attn``, ``mixer``, ``mlp`` or ``cross_attn``, or another of those in `layer_types`.

        Returns:
            ``[(index, block), ...]``; of an encoder-decoder the encoder's, then the decoder's, each with its own index.

        Raises:
            ValueError: no part is called so.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> [(index, block.attn.hook_z.name) for index, block in bridge.blocks_with("attn")][1]
            (1, 'blocks.1.attn.hook_z')
            >>> bridge.blocks_with("mixer")
            []
        """
        return layers_with(part, parts_of_layers(self._tree, self.architecture, self.cfg), self._tree)

    @property
    def OV(self) -> FactoredMatrix:
        """Each head's ``W_V @ W_O``, ``[n_layers, n_heads, d_model, d_model]``.

        What a head copies from where it attends. Norms are not in it, but for what `process_weights` folds.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().OV.shape
            torch.Size([4, 4, 128, 128])
        """
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """Each head's ``W_Q @ W_K.T``, ``[n_layers, n_heads, d_model, d_model]``.

        The scores before the scale, but for biases, rotation and norms of queries and keys.

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
        """How much each head reads through its queries, keys or values of what each earlier head writes.

        The norm of the product of both matrices, over the product of their norms (Elhage et al. 2021, "A Mathematical
        Framework for Transformer Circuits").

        Args:
            mode: ``Q``, ``K`` or ``V``.

        Returns:
            ``[writing layer, head, reading layer, head]``; zero unless the reader is in a later layer.

        Raises:
            ValueError: another mode.

        Example:
            >>> from bridge import TransformerBridge
            >>> scores = TransformerBridge.boot_embedded().all_composition_scores("V")
            >>> bool((scores[0, :, 1] > 0).all()), bool((scores[1, :, 1] == 0).all())
            (True, True)
        """
        return all_scores(self, mode)

    @refuse_wrong_types
    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of the output biases of all layers before one.

        What they add to the residual stream, but where a norm follows attention or MLP (Gemma 2) or stands on the
        stream (BERT); a mixture of experts adds none.

        Args:
            layer: from 0 to ``n_layers``; -1: ``n_layers``.
            mlp_input: include the layer's own attention.
            include_mlp_biases: False: of attention only.

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
        """The columns of the unembedding that belong to tokens.

        The logit of a token is the product of its direction with the final norm's output, plus its bias. A norm's
        weight that is not folded (`process_weights`) is not in it.

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
        """The names of all heads: ``L0H0``, ``L0H1``, ...; an encoder-decoder's are ``EL0H0``, ..., ``DL0H0``, ...

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().all_head_labels()[3:6]
            ['L0H3', 'L1H0', 'L1H1']
        """
        return weight_analysis.head_labels(self)

    @property
    def attn_head_labels(self) -> Labels:
        """The names of the heads in the order of `all_composition_scores`: every layer has attention here.

        Example:
            >>> from bridge import TransformerBridge
            >>> len(TransformerBridge.boot_embedded().attn_head_labels)
            16
        """
        return self.all_head_labels

    @refuse_wrong_types
    def get_neuron_labels(self, layer: int | None = None, neuron_slice: Index = None) -> list[str]:
        """The names of the neurons of all layers before one, in the order of `stack_neuron_results`.

        Args:
            layer: neurons before this layer; None or -1: all.
            neuron_slice: which neurons of each layer.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().get_neuron_labels(2, (0, 2))
            ['L0N0', 'L0N1', 'L1N0', 'L1N1']
        """
        return [name for i in range(layer_of(self, layer)) for name in neuron_labels(self, i, neuron_slice)]
