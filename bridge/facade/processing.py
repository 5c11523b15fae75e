"""HookedTransformer's weight processing, on the Hugging Face model's own parameters."""

from __future__ import annotations

from typing import Literal

from bridge.facade.weights import WeightMethods
from bridge.hooks.context import without_hooks
from weight_processing.process import OFF, ON, Choice, process, restore


class ProcessingMethods(WeightMethods):
    """The methods of a bridge that process weights."""

    def process_weights(
        self,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        check: bool | Literal["each"] = True,
        verbose: bool = False,
    ) -> None:
        """Makes the weights easier to read, without changing log probabilities. The model's parameters are written to.

        What a model forbids is left out when it is asked for by default, and is an error when it is asked for by name;
        nothing is written before that is known. ``cfg.processed`` says for each transform that it is done, or why not.
        What is done already is not done again.

        Args:
            fold_ln: fold the norms' weights and biases into what reads them.
            center_writing_weights: take the mean out of all that is written to the residual stream.
            center_unembed: take the mean over the vocabulary out of the unembedding.
            fold_value_biases: fold the values' biases into the attention's output bias.
            refactor_factored_attn_matrices: give the matrices of each head orthogonal columns.
            check: compare the log probabilities of random tokens before and after; ``"each"``: after each transform.
            verbose: print what was done, and what was left out and why.

        Raises:
            ProcessingError: a transform asked for by name is not for this model; or the log probabilities differ.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.process_weights()
            >>> bool(bridge.W_U.mean(-1).abs().max() < 1e-5), bridge.cfg.normalization_type
            (True, 'RMSPre')
        """
        given: dict[str, Choice] = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        process(self, given, check, without_hooks)
        if verbose:
            print("\n".join(f"{name}: {state}" for name, state in self.cfg.processed.items()))

    def enable_compatibility_mode(
        self,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        no_processing: bool = False,
        check: bool | Literal["each"] = True,
        disable_warnings: bool = False,
    ) -> None:
        """Makes weights and activations those of ``HookedTransformer.from_pretrained``, with its defaults.

        Args:
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices, check:
                as for `process_weights`.
            no_processing: leave the weights as they are (``HookedTransformer.from_pretrained_no_processing``).
            disable_warnings: is accepted; there are none.

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
                fold_ln,
                center_writing_weights,
                center_unembed,
                fold_value_biases,
                refactor_factored_attn_matrices,
                check,
            )

    def restore_processing(self) -> None:
        """Does again what was done to the weights before the model was saved, as its configuration says.

        `boot_transformers` calls it. A saved model has the function of the processed one, but biases for which its
        class has no place are written as biases of norms; this puts them back.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.restore_processing()  # nothing was done to this one
        """
        restore(self, without_hooks)
