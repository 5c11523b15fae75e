"""The weights, as HookedTransformer shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.facade.base import WrappedModel
from bridge.weights.accessors import first_weight, stacked_weight, stacked_where


class WeightMethods(WrappedModel):
    """The weights of a bridge. Those of one block are attributes of it: ``bridge.blocks[3].attn.W_Q``.

    A block's weights, and the embeddings, are views of the model's own parameters. The stacks over all layers are new
    tensors, since the layers do not lie side by side in memory; gradients reach the parameters through both.
    """

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The names and tensors of HookedTransformer's state dict.

        Example:
            >>> from bridge import TransformerBridge
            >>> dict(TransformerBridge.boot_embedded().tl_named_parameters())["blocks.0.attn.W_Q"].shape
            torch.Size([4, 128, 32])
        """
        return ((name, get()) for name, get in self.weights.getters.items())

    def tl_parameters(self) -> dict[str, Tensor]:
        """HookedTransformer's state dict, as a dictionary."""
        return dict(self.tl_named_parameters())

    @property
    def n_params_total(self) -> int:
        """The number of parameters, embeddings included, shared ones once."""
        return self.cfg.n_params

    def stack_params_for(
        self, submodule: str, attr_path: str, reshape_fn: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[list[int], Float[Tensor, "layer ..."]]:
        """One weight of those blocks that have a part, and which blocks they are.

        Args:
            submodule: the part, such as ``mlp``.
            attr_path: the weight, such as ``mlp.W_in``.
            reshape_fn: is done to each weight.

        Raises:
            ValueError: no block has it.

        Example:
            >>> from bridge import TransformerBridge
            >>> layers, weights = TransformerBridge.boot_embedded().stack_params_for("attn", "attn.W_O")
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
        """The position embedding, where it is learned."""
        return self._weight("pos_embed.W_pos", "embed.pos_embed.W_pos")

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """Token and position embeddings, one under the other."""
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
        """The MLPs' input weights (of gated ones, parallel to the gate)."""
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
        """Gated MLPs' gate biases, where their gates have some."""
        return self._stack("mlp", "b_gate")

    @property
    def b_out(self) -> Float[Tensor, "n_layers d_model"]:
        """The MLPs' output biases."""
        return self._stack("mlp", "b_out")
