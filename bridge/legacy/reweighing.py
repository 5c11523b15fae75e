"""Processing weights through HookedTransformer's methods, and loading state dicts with its names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bridge.hooks.names import suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.module_tree import ENDS, ModuleTree
from bridge.legacy.parts import BUFFERS
from weight_processing.process import OFF, ON

_LOG = logging.getLogger(__name__)
#: The steps of processing.
TRANSFORMS = (
    "fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices",
)  # fmt: skip


class LegacyWeights(ModuleTree):
    """Weights through HookedTransformer's methods."""

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Processes the weights in place. What the architecture forbids is left out with a warning in the log."""
        steps = (fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        asked = dict(zip(TRANSFORMS, steps, strict=True))
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
        """Loads a state dict with HookedTransformer's names, and processes the weights. What is missing stays as it is.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: a shape that does not fit, or a value for which the model has no place.
        """
        steps = (center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        if fold_ln and self._lacks_norms_of(state_dict):
            config = HookedTransformerConfig.of_model(self.cfg)
            config.normalization_type = str(config.normalization_type).removesuffix("Pre")
            made: Any = type(self)  # whose classes are made from a configuration
            other = made(config)  # which has the norms that are to be folded
            other.load_and_process_state_dict(state_dict, True, *steps)
            self.load_state_dict({name: x for name, x in other.state_dict().items() if name in self.weights.getters})
            self.cfg.processed = other.cfg.processed
            return
        unknown = {name for name in state_dict if name.rpartition(".")[2] not in BUFFERS} - set(self.weights.getters)
        for name in sorted(unknown):
            raise ValueError(f"{name!r} is no weight of this model.{suggestion(name, self.weights.getters)}")
        self.load_state_dict(state_dict, strict=False)
        self.process_weights_(fold_ln, *steps[:2], refactor_factored_attn_matrices, fold_value_biases)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Loads a state dict with HookedTransformer's names, or one with the Hugging Face model's own.

        Args:
            state_dict: what `state_dict` gave, here or in HookedTransformer.
            strict: missing and unknown names are errors; otherwise unknown ones are warned of in the log.
            assign: as for `torch.nn.Module.load_state_dict`; for the Hugging Face model's own names only.

        Raises:
            RuntimeError: names are missing or not known, a shape does not fit, or a value has no place.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "act_fn": "relu"}
            >>> HookedTransformer(cfg).load_state_dict(HookedTransformer(cfg).state_dict())
            <All keys matched successfully>
        """
        known = set(self.weights.getters)
        own = set(self.original_model.state_dict()) & set(state_dict)
        if own and not known & set(state_dict):
            found: Any = self.original_model.load_state_dict(state_dict, strict=strict, assign=assign)
        elif assign:
            raise ValueError("assign=True takes the Hugging Face model's own names: HookedTransformer's are views")
        else:
            if state_dict and not known & set(state_dict):
                raise RuntimeError(f"no weight of the model has any of these names, such as {next(iter(state_dict))!r}")
            fitting = {name: state_dict[name] for name in known & set(state_dict)}
            if all(self.fits(name, value) is None for name, value in fitting.items()):
                self.write({name: fitting[name] for name in ENDS if name in fitting})
            found = nn.Module.load_state_dict(self, state_dict, strict=strict)
        if found.unexpected_keys:
            _LOG.warning("names in the state dict that the model does not have: %s", ", ".join(found.unexpected_keys))
        return found

    def _lacks_norms_of(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Whether the model was made without the norms' weights, which the state dict has (``LNPre``, ``RMSPre``)."""
        lacking = {word for name in state_dict.keys() - self.weights.getters.keys() for word in name.split(".")}
        return str(self.cfg.normalization_type).endswith("Pre") and bool(lacking & {"ln1", "ln2", "ln_final"})
