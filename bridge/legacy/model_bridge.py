"""``transformer_lens.model_bridge``'s names: the `TransformerBridge` of TransformerLens 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapters.views import Kwargs
from bridge.facade.facade import WrappedModel
from bridge.hooks.hooks import Handle
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.hooks.names import NamesFilter
from bridge.legacy.hook_points import HookFunction
from bridge.legacy.HookedTransformer import HookedTransformer
from bridge.legacy.loading_from_pretrained import copied_tokenizer
from bridge.legacy.module_tree import ModuleTree
from bridge.legacy.table import named
from bridge.run.inputs import HookSpec, Input
from bridge.run.recorder import PosSlice
from bridge.run.tokenization import as_tokens, texts_in
from bridge.weights import FactoredMatrix


class TransformerBridge(ModuleTree):
    """`bridge.TransformerBridge` with what programs for TransformerLens 3 and 4 ask of one, besides: parts are modules
    that can be called and replaced, hook points are modules, and `hook_dict` has the aliases.

    Its state dict and parameters have the Hugging Face model's own names.

    Example:
        >>> from bridge.embedded import MODEL_DIR
        >>> from bridge.legacy import TransformerBridge
        >>> bridge = TransformerBridge.boot_transformers(str(MODEL_DIR))
        >>> bridge.hook_dict["blocks.0.hook_out"] is bridge.blocks[0].hook_resid_post
        True
    """

    name_before = "TransformerBridge"
    state_dict = WrappedModel.state_dict
    load_state_dict = WrappedModel.load_state_dict
    named_parameters = WrappedModel.named_parameters
    init_weights = HookedTransformer.init_weights

    def __init__(self, hf_model: nn.Module, tokenizer: Any = None, **arguments: Any) -> None:
        super().__init__(hf_model, None if tokenizer is None else copied_tokenizer(tokenizer), **arguments)

    @property
    def hook_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """All hook points by name; an alias finds its hook point, too."""
        return self._hook_registry

    def hook_points(self) -> list[AnyHookPoint]:
        """All hook points, in the order of the computation."""
        return [*self.wiring.points.values()]

    @property
    def hook_aliases(self) -> dict[str, str]:
        """Each alias, and the name it stands for."""
        return dict(self.names.aliases)

    # SAELens' SAETransformerBridge asks for these two.

    @property
    def _hook_registry(self) -> dict[str, Any]:
        return _ByAnyName(self.wiring.points, self.names.aliases)

    def _collect_hook_aliases_from_registry(self) -> dict[str, str]:
        return self.hook_aliases

    def add_perma_hook(  # type: ignore[override]
        self,
        name: NamesFilter | AnyHookPoint,
        hook_fn: HookFunction | None = None,
        dir: str = "fwd",
        *,
        hook: HookFunction | None = None,
    ) -> list[Handle]:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise."""
        return self.add_hook(name, hook, dir, is_permanent=True, hook_fn=hook_fn)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> Any:
        """As for `bridge.TransformerBridge.get_caching_hooks`; a new dictionary takes aliases, too."""
        cache = _ByAnyName({}, self.names.aliases) if cache is None else cache
        return super().get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice)

    def run_with_hooks(  # type: ignore[override]
        self,
        input: Input | None = None,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        *,
        remove_batch_dim: bool = False,
        **arguments: Any,
    ) -> Any:
        """As for `bridge.TransformerBridge.run_with_hooks`.

        Args:
            input, fwd_hooks, bwd_hooks, arguments: as there.
            remove_batch_dim: show the functions activations without the batch axis, of a single prompt.
        """
        if remove_batch_dim:
            fwd_hooks, bwd_hooks = ([(names, _without_batch(fn)) for names, fn in h] for h in (fwd_hooks, bwd_hooks))
        return super().run_with_hooks(input, fwd_hooks=fwd_hooks, bwd_hooks=bwd_hooks, **arguments)

    def generate(self, input: Input = "", max_new_tokens: int = 10, **arguments: Any) -> Any:  # type: ignore[override]
        """As for `bridge.TransformerBridge.generate`. A temperature of 0 takes the likeliest token."""
        return super().generate(input, max_new_tokens, **self._as_before(arguments))

    def generate_stream(self, input: Input = "", max_new_tokens: int = 10, **arguments: Any) -> Any:  # type: ignore[override]
        """As for `bridge.TransformerBridge.generate_stream`."""
        return super().generate_stream(input, max_new_tokens=max_new_tokens, **self._as_before(arguments))

    def hf_generate(  # type: ignore[override]
        self, input: Input = "", max_new_tokens: int = 10, *, return_type: str | None = "input", **arguments: Any
    ) -> Any:
        """As for `bridge.TransformerBridge.hf_generate`; text is made of text. With ``return_type=None``, or
        ``return_dict_in_generate=True`` for tokens, it is what the model's own `generate` returns."""
        arguments = self._as_before(arguments)
        if arguments.get("eos_token_id", 0) is None:
            del arguments["eos_token_id"]  # it was not given: `stop_at_eos=False` is how to go on
        if arguments.get("return_dict_in_generate") and return_type == "input" and texts_in(input) is None:
            return_type = None
        return super().hf_generate(input, max_new_tokens=max_new_tokens, return_type=return_type, **arguments)

    def _as_before(self, arguments: Kwargs) -> Kwargs:
        if arguments.get("temperature") == 0:
            arguments |= {"temperature": None, "do_sample": False}
        own = getattr(self.cfg, "eos_token_id", None)
        if own is not None and self.tokenizer is None and arguments.get("stop_at_eos", True):
            arguments.setdefault("eos_token_id", own)
        return arguments

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """What enters the first block, for runs with ``start_at_layer=0``: the residual stream, the tokens, None (the
        stream holds the positions), and the mask."""
        texts = texts_in(input)
        if texts is None:
            tokens = as_tokens(input).to(self.cfg.device)
        else:
            batch = self.batch_of(texts, prepend_bos, padding_side)
            tokens = batch.tokens.to(self.cfg.device)
            attention_mask = batch.mask if attention_mask is None else attention_mask
        return self(tokens, attention_mask=attention_mask, stop_at_layer=0), tokens, None, attention_mask

    # What hybrids have in some layers.

    def composition_layer_indices(self) -> list[int]:
        """The layers that have attention."""
        return [index for index, _ in self.blocks_with("attn")]

    def QK_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers that have attention, and `QK` of these."""
        (layers, W_Q), (_, W_K) = (self.stack_params_for("attn", f"attn.W_{letter}") for letter in "QK")
        return layers, FactoredMatrix(W_Q, W_K.mT)

    def OV_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers that have attention, and `OV` of these."""
        (layers, W_V), (_, W_O) = (self.stack_params_for("attn", f"attn.W_{letter}") for letter in "VO")
        return layers, FactoredMatrix(W_V, W_O)

    def block_hooks(self, layer_idx: int) -> list[str]:
        """The names of a block's hook points, without the block's own."""
        prefix = f"{self.blocks[layer_idx].name}."
        names = {*self.hook_dict, *self.names.aliases}
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def block_submodules(self, layer_idx: int) -> list[str]:
        """The names of a block's parts."""
        return [name for name, part in self.blocks[layer_idx]._modules.items() if not isinstance(part, AnyHookPoint)]


def build_bridge_from_module(
    model: nn.Module, architecture: str = "", *, tokenizer: Any = None, model_name: str | None = None, **facts: Any
) -> TransformerBridge:
    """A bridge around a model that is there.

    Args:
        model: the model, which stays as it is.
        architecture: the name of its class, which is read from the model.
        tokenizer: its tokenizer.
        model_name: for `cfg`.
        facts: what TransformerLens has to be told of the model, and what is read from it here.

    Raises:
        TypeError: a hook of an adapter, or an argument that nobody knows.
    """
    if facts.pop("post_adapter_hook", None) is not None:
        raise TypeError("post_adapter_hook is not taken: adapters are declared (docs/adapters.md), and change no model")
    for name in facts.keys() - {"hf_config", "tl_config", "device", "dtype"}:
        raise TypeError(f"{name!r} is no argument of build_bridge_from_module")
    made = TransformerBridge(model, tokenizer)
    if model_name is not None:
        made.cfg.model_name = model_name
    return made


class _ByAnyName(dict[str, Any]):
    """Hook points or activations by name, which is what it lists; an alias finds what it stands for, too."""

    def __init__(self, named: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        super().__init__(named)
        self._aliases = aliases

    def _canonical(self, name: str) -> str:
        alias = name.removesuffix("_grad")
        return self._aliases.get(alias, alias) + name[len(alias) :]

    def __missing__(self, name: str) -> Any:
        if self._canonical(name) == name:
            raise KeyError(name)
        return self[self._canonical(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(self._canonical(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._canonical(name), default)


def _without_batch(fn: HookFunction) -> HookFunction:
    """A function as a hook that is shown activations of a single prompt, without their first axis."""

    def called(act: Tensor, hook: AnyHookPoint) -> Tensor | None:
        if act.shape[0] != 1:
            raise ValueError(f"remove_batch_dim=True takes one prompt; {hook.name} has {act.shape[0]} rows")
        made = fn(act[0], hook=hook)
        return None if made is None else made.unsqueeze(0)

    return called


__getattr__ = named(__name__)
