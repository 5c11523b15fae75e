"""Processing weights through HookedTransformer's methods, and loading state dicts with its names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from bridge.bridge import TransformerBridge
from bridge.hooks.names import suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from weight_processing.process import OFF, ON
from weight_processing.saving import untie

_LOG = logging.getLogger(__name__)
_TRANSFORMS = (
    "fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices",
)  # fmt: skip
#: What HookedTransformer keeps in its state dict beside parameters.
_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


class WeightsAsBefore(TransformerBridge):
    """Weights through HookedTransformer's methods."""

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Processes the weights in place. What the architecture forbids is left out with a warning in the log.

        Args:
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases: as for
                `TransformerBridge.process_weights`.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained_no_processing(str(MODEL_DIR), device="cpu")
            >>> model.process_weights_()
            >>> model.cfg.normalization_type
            'RMSPre'
        """
        asked = dict(zip(_TRANSFORMS, (
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices,
        ), strict=True))  # fmt: skip
        if fold_ln and self.cfg.num_experts:
            _LOG.warning("fold_ln left out: HookedTransformer does not fold norms that feed a mixture of experts")
            asked["fold_ln"] = False
        if fold_ln and self.cfg.dtype not in (torch.float32, torch.float64):
            _LOG.warning("folding weights of %s rounds them; from_pretrained_no_processing does not", self.cfg.dtype)
        self.process_weights(**{name: ON if wanted else OFF for name, wanted in asked.items()})  # type: ignore[arg-type]
        for name, state in self.cfg.processed.items():
            if asked.get(name) and state != "done":
                _LOG.warning("%s %s", name, state)

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Loads a state dict with HookedTransformer's names, and processes the weights.

        What is missing stays as it is.

        Args:
            state_dict: by HookedTransformer's names, such as ``blocks.0.attn.W_Q``.
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices: as for
                `process_weights_`.

        Raises:
            ValueError: a name or shape that does not fit, or a value for which the model has no place.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "act_fn": "relu"}
            >>> model, other = HookedTransformer(cfg), HookedTransformer(cfg)
            >>> other.load_and_process_state_dict(model.tl_parameters())
            >>> log_probs = [x([[1, 2]]).log_softmax(-1) for x in (model, other)]
            >>> bool((log_probs[0] - log_probs[1]).abs().max() < 1e-5)
            True
        """
        if fold_ln and self._lacks_norms_of(state_dict):
            config = HookedTransformerConfig.of_model(self.cfg)
            config.normalization_type = str(config.normalization_type).removesuffix("Pre")
            made: Any = type(self)  # whose classes are made from a configuration
            other = made(config)  # which has the norms that are to be folded
            other.load_and_process_state_dict(
                state_dict, True, center_writing_weights, center_unembed, fold_value_biases,
                refactor_factored_attn_matrices,
            )  # fmt: skip
            kept = {name: value for name, value in other.tl_parameters().items() if name in self.weights.getters}
            self._load_by_canonical_names(kept)
            self.cfg.processed = other.cfg.processed
            return
        self._load_by_canonical_names(state_dict)
        self.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        """Loads a state dict with the model's own names, or one with HookedTransformer's.

        Args:
            state_dict: what `state_dict` or `tl_parameters` gave, here or in HookedTransformer.
            strict: missing and unknown names are errors.
            kwargs: as for `torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: names are missing or not known.
            ValueError: under HookedTransformer's names, a shape that does not fit, or a value that has no place.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "act_fn": "relu"}
            >>> model = HookedTransformer(cfg)
            >>> model.load_state_dict(HookedTransformer(cfg).tl_parameters())
            <All keys matched successfully>
        """
        known = set(self.weights.getters)
        if not known & set(state_dict):
            return super().load_state_dict(state_dict, strict=strict, **kwargs)
        given = {name for name in state_dict if name.rpartition(".")[2] not in _BUFFERS}
        missing, unknown = sorted(known - given), sorted(given - known)
        if strict and (missing or unknown):
            raise RuntimeError(f"the state dict lacks {missing or 'nothing'}, and has {unknown or 'nothing'} besides")
        self._load_by_canonical_names({name: state_dict[name] for name in given & known})
        return _IncompatibleKeys(missing, unknown)

    def _lacks_norms_of(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Whether the model was made without the norms' weights, which the state dict has (``LNPre``, ``RMSPre``)."""
        lacking = {
            name.rpartition(".")[0].rpartition(".")[2] for name in state_dict if name not in self.weights.getters
        }
        return str(self.cfg.normalization_type).endswith("Pre") and bool(lacking & {"ln1", "ln2", "ln_final"})

    def part_embeddings(self, given: Mapping[str, Tensor]) -> None:
        """Unties embedding and unembedding where these values would make them differ: HookedTransformer's are two.

        Args:
            given: new weights, by HookedTransformer's names.
        """
        ends = ("embed.W_E", "unembed.W_U")
        if not set(ends) & set(given) or not set(ends) <= set(self.weights.getters):
            return
        now = [self.weights[name].detach() for name in ends]
        if now[0].data_ptr() != now[1].data_ptr():
            return
        embed, unembed = (given.get(name, value).to(value) for name, value in zip(ends, now, strict=True))
        if not torch.equal(embed.T, unembed):
            untie(self.core, self.architecture)

    def _load_by_canonical_names(self, state_dict: Mapping[str, Tensor]) -> None:
        getters = self.weights.getters
        stored = {p.untyped_storage().data_ptr() for p in self.original_model.parameters()}
        todo: list[tuple[str, Tensor]] = []
        for name, value in state_dict.items():
            if name.rpartition(".")[2] in _BUFFERS:
                continue
            if name not in getters:
                raise ValueError(f"{name!r} is no weight of this model.{suggestion(name, getters)}")
            here = getters[name]()
            if here.shape != value.shape:
                raise ValueError(f"{name} has shape {list(here.shape)}; the state dict has {list(value.shape)}")
            if here.untyped_storage().data_ptr() in stored:
                todo.append((name, value))
            elif not torch.equal(here.to(value), value):
                raise ValueError(f"{name} is fixed in {type(self.core).__name__}; the state dict has other values")
        self.part_embeddings(state_dict)
        with torch.no_grad():
            for name, value in todo:
                getters[name]().copy_(value)
