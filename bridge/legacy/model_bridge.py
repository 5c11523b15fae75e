"""``transformer_lens.model_bridge``: the `TransformerBridge` of TransformerLens 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from adapters.views import Kwargs
from bridge.facade.facade import WrappedModel
from bridge.hooks.hooks import Handle
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.hooks.names import NamesFilter
from bridge.legacy.hook_points import Device, HookFunction
from bridge.legacy.HookedTransformer import HookedTransformer
from bridge.legacy.loading_from_pretrained import copied_tokenizer
from bridge.legacy.module_tree import ModuleTree
from bridge.legacy.running import Side
from bridge.legacy.table import named
from bridge.run.inputs import HookSpec, Input
from bridge.run.recorder import PosSlice
from bridge.run.tokenization import as_tokens, texts_in
from bridge.weights import FactoredMatrix


class TransformerBridge(ModuleTree):
    """`bridge.TransformerBridge` with the additional API of TransformerLens 3 and 4: parts are
    modules that can be called and replaced, hook points are modules, and `hook_dict` contains the
    aliases.

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
        if tokenizer is not None:
            tokenizer = copied_tokenizer(tokenizer)
        super().__init__(hf_model, tokenizer, **arguments)

    @property
    def hook_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return all hook points by name; an alias also returns its hook point."""
        return self._hook_registry

    def hook_points(self) -> list[AnyHookPoint]:
        """Return all hook points in forward order."""
        return [*self.wiring.points.values()]

    @property
    def hook_aliases(self) -> dict[str, str]:
        """Return each alias with the name that it stands for."""
        return dict(self.names.aliases)

    # SAELens' SAETransformerBridge needs these two.

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
        """Add a hook that `reset_hooks` keeps by default."""
        return self.add_hook(name, hook, dir, is_permanent=True, hook_fn=hook_fn)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> Any:
        """Return caching hooks, as `bridge.TransformerBridge.get_caching_hooks`; a new dictionary
        also accepts aliases.
        """
        if cache is None:
            cache = _ByAnyName({}, self.names.aliases)
        return super().get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice
        )

    def run_with_hooks(  # type: ignore[override]
        self,
        input: Input | None = None,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        *,
        remove_batch_dim: bool = False,
        **arguments: Any,
    ) -> Any:
        """Run the model with hooks, as `bridge.TransformerBridge.run_with_hooks`.

        Args:
            input, fwd_hooks, bwd_hooks, arguments: as for
                `bridge.TransformerBridge.run_with_hooks`.
            remove_batch_dim: pass activations of a single prompt to the functions without the batch
                axis.
        """
        if remove_batch_dim:
            fwd_hooks = [(names, _without_batch(fn)) for names, fn in fwd_hooks]
            bwd_hooks = [(names, _without_batch(fn)) for names, fn in bwd_hooks]
        return super().run_with_hooks(input, fwd_hooks=fwd_hooks, bwd_hooks=bwd_hooks, **arguments)

    def generate(self, input: Input = "", max_new_tokens: int = 10, **arguments: Any) -> Any:  # type: ignore[override]
        """Continue a prompt, as `bridge.TransformerBridge.generate`. A temperature of 0 takes the
        most likely token.
        """
        return super().generate(input, max_new_tokens, **self._as_before(arguments))

    def generate_stream(self, input: Input = "", max_new_tokens: int = 10, **arguments: Any) -> Any:  # type: ignore[override]
        """Yield a continuation, as `bridge.TransformerBridge.generate_stream`."""
        arguments = self._as_before(arguments)
        return super().generate_stream(input, max_new_tokens=max_new_tokens, **arguments)

    def hf_generate(  # type: ignore[override]
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        *,
        return_type: str | None = "input",
        **arguments: Any,
    ) -> Any:
        """Continue a prompt, as `bridge.TransformerBridge.hf_generate`; text input gives text
        output. With ``return_type=None``, or ``return_dict_in_generate=True`` for tokens, return
        the result of the model's own `generate`.
        """
        arguments = self._as_before(arguments)
        if arguments.get("eos_token_id", 0) is None:
            del arguments["eos_token_id"]  # it was not passed: `stop_at_eos=False` disables it
        of_tokens = return_type == "input" and texts_in(input) is None
        if of_tokens and arguments.get("return_dict_in_generate"):
            return_type = None
        return super().hf_generate(
            input, max_new_tokens=max_new_tokens, return_type=return_type, **arguments
        )

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
        padding_side: Side | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """Return the first block's input, for runs with ``start_at_layer=0``: the residual stream,
        the tokens, None (the stream includes the positions), and the attention mask.
        """
        texts = texts_in(input)
        if texts is None:
            tokens = as_tokens(input).to(self.cfg.device)
        else:
            batch = self.batch_of(texts, prepend_bos, padding_side)
            tokens = batch.tokens.to(self.cfg.device)
            if attention_mask is None:
                attention_mask = batch.mask
        residual = self._run(tokens, attention_mask=attention_mask, stop_at_layer=0)
        return residual, tokens, None, attention_mask

    # Parts that hybrid models have in some layers only.

    def composition_layer_indices(self) -> list[int]:
        """Return the layers that have attention."""
        return [index for index, _ in self.blocks_with("attn")]

    def QK_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """Return the layers that have attention, and their `QK`."""
        layers, W_Q = self.stack_params_for("attn", "attn.W_Q")
        _, W_K = self.stack_params_for("attn", "attn.W_K")
        return layers, FactoredMatrix(W_Q, W_K.mT)

    def OV_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """Return the layers that have attention, and their `OV`."""
        layers, W_V = self.stack_params_for("attn", "attn.W_V")
        _, W_O = self.stack_params_for("attn", "attn.W_O")
        return layers, FactoredMatrix(W_V, W_O)

    def block_hooks(self, layer_idx: int) -> list[str]:
        """Return the names of a block's hook points, without the block's own."""
        prefix = f"{self.blocks[layer_idx].name}."
        names = {*self.hook_dict, *self.names.aliases}
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def block_submodules(self, layer_idx: int) -> list[str]:
        """Return the names of a block's parts."""
        modules = self.blocks[layer_idx]._modules
        return [name for name, x in modules.items() if not isinstance(x, AnyHookPoint)]


def build_bridge_from_module(
    model: nn.Module,
    architecture: str = "",
    *,
    tokenizer: Any = None,
    model_name: str | None = None,
    **facts: Any,
) -> TransformerBridge:
    """Return a bridge around an existing model.

    Args:
        model: the model, which is not changed.
        architecture: the name of its class, which is read from the model.
        tokenizer: its tokenizer.
        model_name: the name in `cfg`.
        facts: facts that TransformerLens takes as arguments; they are read from the model here.

    Raises:
        TypeError: a hook of an adapter, or an unknown argument.
    """
    if facts.pop("post_adapter_hook", None) is not None:
        raise TypeError(
            "post_adapter_hook is not taken: adapters are declared (docs/adapters.md), and change"
            " no model"
        )
    for name in facts.keys() - {"hf_config", "tl_config", "device", "dtype"}:
        raise TypeError(f"build_bridge_from_module has no argument {name!r}")
    bridge = TransformerBridge(model, tokenizer)
    if model_name is not None:
        bridge.cfg.model_name = model_name
    return bridge


class _ByAnyName(dict[str, Any]):
    """Hook points or activations by name. It lists names; an alias also returns the entry that it
    stands for.
    """

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
    """Wrap a function as a hook that receives activations of a single prompt without the batch
    axis.
    """

    def call(act: Tensor, hook: AnyHookPoint) -> Tensor | None:
        if act.shape[0] != 1:
            raise ValueError(
                f"remove_batch_dim=True takes one prompt; {hook.name} has {act.shape[0]} rows"
            )
        changed = fn(act[0], hook=hook)
        return None if changed is None else changed.unsqueeze(0)

    return call


__getattr__ = named(__name__)
