"""The parts of a model called by themselves, and modules of users where the model calls its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adapters.inputs import PAST, text_alone
from adapters.points import base_path, core_path, join
from adapters.views import Call, View
from bridge.bridge import TransformerBridge
from bridge.hooks.context import CURRENT, Listener, Scope, forward_pass, without_hooks
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import InForwardsPlace, first_parameter
from bridge.hooks.names import suggestion
from bridge.legacy.hook_points import CALLS
from bridge.legacy.utilities import position_embeddings
from bridge.run.layer_range import StopRun
from bridge.taps.taps import Tap

#: What a call must not do twice: add keys and values to a cache.
_CACHES = (*PAST, "past_key_value", "layer_past")


class ReplacedForward(InForwardsPlace):
    """The forward of a Hugging Face module in whose place another module is called.

    The Hugging Face module stays where it is, with its torch hooks, weights and path. Torch calls nothing in place of a
    forward (a hook that comes before it can change what it reads alone), so this is done as taps do it.

    Args:
        module: the Hugging Face module.
        part: the part that it plays.
        replacement: what is called: the part itself, or a module of the user's, which may call the part.
        view: how what the module returns is seen as what the part makes.
        of_attention: it is called with what queries, keys and values read.
    """

    def __init__(
        self, module: nn.Module, part: nn.Module, replacement: Callable[[], nn.Module], view: View, of_attention: bool
    ) -> None:
        self.module = module
        self.part, self.replacement, self.view, self.of_attention = part, replacement, view, of_attention
        own = self.module.__dict__.get("forward")
        if isinstance(own, Tap):  # which still wraps it
            self.inner: Callable[..., Any] = own.original
            own.original = own.own = self
        else:
            self.inner = self.module.forward
            self.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = CALLS.get()
        if self.part in calls and calls[self.part] is None:  # the part is being called by itself
            return self.inner(*args, **kwargs)
        name = "" if args else first_parameter(type(self.module).forward)
        x, call, made = args[0] if args else kwargs[name], Call(self.module, args, kwargs), []

        def inner(given: Tensor) -> Tensor:
            made.append(self.inner(given, *args[1:], **kwargs) if args else self.inner(**{**kwargs, name: given}))
            return self.view.get(_first(made[-1]), call)

        token = CALLS.set({**calls, self.part: inner})
        try:
            if self.of_attention:
                out = self.replacement()(
                    query_input=x, key_input=x, value_input=x, past_kv_cache_entry=None, attention_mask=None
                )
            else:
                out = self.replacement()(x)
        finally:
            CALLS.reset(token)
        if not made:
            made.append(self._without(args, kwargs))
        out = self.view.put(_first(made[-1]), out, call)
        return out if isinstance(made[-1], Tensor) else type(made[-1])((out, *made[-1][1:]))

    @torch.no_grad()
    def _without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, where the user's module does not call it and knows nothing of what follows the
        first tensor."""
        return self.inner(*args, **{key: value for key, value in kwargs.items() if key not in _CACHES})


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made[0]  # type: ignore[no-any-return]


class CallableParts(TransformerBridge):
    """A bridge whose parts can be called by themselves."""

    #: What stands in the forward of Hugging Face modules, by part.
    calls: dict[str, ReplacedForward]
    #: The parts by name.
    parts: dict[str, Any]

    def _paths(self) -> Iterator[tuple[str, str]]:
        """The names of parts, and the paths of the modules that play them."""
        declared, base = self.architecture, base_path(self.original_model)
        for stack in declared.stacks:
            for i in range(len(stack.modules(self.original_model.get_submodule(base)))):
                path = join(base, stack.place_of(i))
                yield f"{stack.name}.{i}", path
                for part, at in stack.block_at(i).module_paths.items():
                    yield f"{stack.name}.{i}.{part}", join(path, at)
            if stack.final_norm:
                name = "ln_final" if stack.name == "blocks" else f"{stack.name}_final_ln"
                yield name, join(base, stack.final_norm.path)
        for name, below in (("embed", declared.embedding.tokens), ("pos_embed", declared.embedding.positions)):
            if below:
                yield name, join(base, below)
        if declared.readout.path:
            yield "unembed", join(core_path(self.original_model), declared.readout.path)

    def find_module(self, name: str) -> nn.Module | None:
        """The Hugging Face module that plays a part; None where no module plays it alone."""
        path = dict(self._paths()).get(name)
        return None if path is None else self.original_model.get_submodule(path)

    def module_of(self, name: str) -> nn.Module:
        """The Hugging Face module that plays a part."""
        found = self.find_module(name)
        if found is None:
            raise AttributeError(f"{name} is not one module of the model.{suggestion(name, dict(self._paths()))}")
        return found

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """What a part of the model makes of tensors: ``embed`` and ``pos_embed`` of tokens, a block of a residual
        stream, norms, attention, MLP and ``unembed`` of what they read. Hooks inside of it act. Attention is run within
        its block, where hook points that come before it see zeros.

        Raises:
            TypeError: the part cannot be called by itself, or not with these.
        """
        above, _, last = name.rpartition(".")
        if above == "blocks":
            given = text_alone(self.core) | kwargs
            return self(*inputs, start_at_layer=int(last), stop_at_layer=int(last) + 1, **given)  # type: ignore[no-any-return]
        if name == "pos_embed":
            return position_embeddings(self.weights["pos_embed.W_pos"], *inputs, **kwargs)
        if last == "attn":
            return self._attend(name, *inputs, **kwargs)
        if last not in ("embed", "mlp", "unembed") and not last.startswith("ln"):
            raise TypeError(f"{name} cannot be called by itself: run the model, with start_at_layer and stop_at_layer")
        if last == "unembed":
            return self._unembed(*inputs, **kwargs)
        if last == "mlp" and not self._takes_one_tensor(name):
            return self._run_in_block(name, *inputs, **kwargs)
        return self._called(self.module_of(name), *inputs, **kwargs)

    def _unembed(self, x: Tensor) -> Tensor:
        """The logits before a soft cap, as ``x @ W_U + b_U``."""
        readout = replace(self.architecture.readout, soft_cap=None)
        # HookedEncoderDecoder has the factor of T5 in what its unembedding reads.
        x = x if len(self.architecture.stacks) > 1 else x * readout.factor_in
        return readout.logits(self._called(self.module_of("unembed"), x), self.core)

    def _called(self, module: nn.Module, *inputs: Any, **kwargs: Any) -> Tensor:
        with forward_pass():
            made = module(*inputs, **kwargs)
        return made if isinstance(made, Tensor) else made[0]  # type: ignore[no-any-return]

    def _takes_one_tensor(self, name: str) -> bool:
        module = self.find_module(name)
        if module is None:
            return False
        given = list(inspect.signature(type(module).forward).parameters.values())[2:]
        return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given)

    def _attend(
        self,
        name: str,
        query_input: Tensor,
        key_input: Tensor | None = None,
        value_input: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """What attention makes of what queries, keys and values read; others than the values' are projected in runs of
        their own."""
        if past_kv_cache_entry is not None or additive_attention_mask is not None:
            raise TypeError(f"{name} by itself takes no cache and no additive mask: run the model with past_kv_cache")
        for given in (query_input, key_input, value_input):
            if given is not None and given.ndim != 3:
                raise TypeError(
                    f"{name} by itself reads [batch, pos, d_model], not {list(given.shape)}: in the model, hooks on "
                    "hook_q_input, hook_k_input and hook_v_input change what each head reads"
                )
        value = query_input if value_input is None else value_input
        edits: list[tuple[HookPoint, Any]] = []
        for letter, given in (("q", query_input), ("k", query_input if key_input is None else key_input)):
            if given is not value and not torch.equal(given, value):
                point, kept = self.names.find(f"{name}.hook_{letter}"), list[Tensor]()
                keep = [(point, lambda x, hook, kept=kept: kept.append(x))]
                with without_hooks():
                    self._run_in_block(name, given, keep, attention_mask)
                edits.append((point, lambda x, hook, kept=kept: kept[0]))
        return self._run_in_block(name, value, edits, attention_mask)

    def _run_in_block(
        self,
        name: str,
        x: Tensor,
        edits: Sequence[tuple[HookPoint, Any]] = (),
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The model runs the block, where attention or MLP is given the tensor, and is left after that."""
        layer, scope, module = int(name.split(".")[1]), Scope(), self.find_module(name)
        if module is None:  # where it begins
            module = self.original_model.get_submodule(self.names.find(f"{name}.hook_pre").point.site.path)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if scope not in CURRENT.get().visible:
                return None
            if args:
                return (x, *args[1:]), kwargs
            return args, kwargs | {first_parameter(type(module).forward): x}

        def leave(out: Tensor, hook: HookPoint) -> None:
            raise StopRun(out)

        members = [(point, Listener("fwd", edit, scope)) for point, edit in edits]
        members.append((self.names.find(f"{name}.hook_out"), Listener("fwd", leave, scope)))
        masked = text_alone(self.core) | ({} if attention_mask is None else {"attention_mask": attention_mask})
        handle = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        try:
            for point, listener in members[:-1]:  # before the user's own, which see what was projected
                self.wiring.add(point, listener, prepend=True)
            with self.wiring.scoped(members, scope):
                made: Tensor = self(torch.zeros_like(x), start_at_layer=layer, stop_at_layer=layer + 1, **masked)
        finally:
            handle.remove()
        return made

    def buffer_of(self, name: str, buffer: str) -> Tensor:
        """What HookedTransformer's attention keeps besides its parameters: ``mask`` (what positions see, ``[n_ctx,
        n_ctx]``), ``IGNORE``, ``rotary_sin`` and ``rotary_cos`` (the model's own, ``[n_ctx, rotary_dim]``)."""
        n, device = self.cfg.n_ctx or 0, self.cfg.device
        if buffer == "IGNORE":
            return torch.tensor(-torch.inf, device=device)
        if buffer == "mask":
            seen, window = torch.ones(n, n, dtype=torch.bool, device=device), self.cfg.window_size
            seen = seen.tril() if self.cfg.attention_dir == "causal" else seen
            return seen.triu(1 - window) if window and self.parts[name].attn_type == "local" else seen
        rotary = getattr(self.original_model.get_submodule(base_path(self.original_model)), "rotary_emb", None)
        if rotary is None:
            raise AttributeError(f"{self.cfg.model_name} has no table of rotations: {name} has no {buffer}")
        cos, sin = rotary(torch.zeros(1, device=device, dtype=self.cfg.dtype), torch.arange(n, device=device)[None])
        return cos[0] if buffer == "rotary_cos" else sin[0]  # type: ignore[no-any-return]
