"""Running a model: plainly, with a cache, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from adapters.views.basis import Basis, Error, InBasis
from bridge import lens as lenses
from bridge.bases.bases import BasisRequest, modules_of, one_of, takes_over, written_later
from bridge.cache import ActivationCache, cache_of_run
from bridge.facade.hooks import HookMethods
from bridge.hooks.context import Listener, Scope
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, named_one_by_one
from bridge.hooks.parts import KeptHeads, entries_of
from bridge.interventions.operations import Index, axis_of, kept_index
from bridge.run.inputs import HookSpec, Input, Request
from bridge.run.recorder import ActivationRecorder, PosSlice, watching
from bridge.run.run import check_specs, clear_all_contexts, hooked, lm_loss, points_of_run, run_model, runs_some_layers


class RunMethods(HookMethods):
    """The methods of a bridge that run its model."""

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """The loss of predicting each next token.

        Args:
            logits: what the model predicts.
            tokens: what stands there.
            attention_mask: 0 for padding, whose loss does not count.
            per_token: ``[batch, pos-1]`` in place of the mean.
        """
        return lm_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def forward(
        self,
        input: Input | None = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | NDArray[Any] | None = None,
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``. With
                `start_at_layer`, the residual stream ``[batch, pos, d_model]`` that enters that layer. What a tokenizer
                gives is taken, too: as it is, or by names (``bridge(**tokenizer(text, return_tensors="pt"))``).
            return_type: ``"logits"`` ``[batch, pos, d_vocab]``; ``"loss"``, in nats; ``"both"``, a pair of them;
                ``"predictions"``, the most likely next token of each row as text; ``"logits_and_cache"``, the logits
                and the model's cache of keys and values, to be passed as `past_key_values` next time; None, nothing.
            loss_per_token: the loss as ``[batch, pos-1]`` in place of the mean.
            prepend_bos: start texts with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter texts are padded; None: the tokenizer's own side.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; for texts it is worked out.
            start_at_layer: the first block to run (``n_layers``: only what follows the blocks, as a logit lens does).
                Of a model that takes images or sound, or whose blocks read tokens too, what the stream is of is given
                by name (``input_ids=tokens``, ``pixel_values=None`` for text alone).
            stop_at_layer: the first block not to run: returns the residual stream that would enter it
                (``n_layers``: the one after the last block).
            model_kwargs: anything else that the Hugging Face model's forward takes.

        Returns:
            What `return_type` or `stop_at_layer` says.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a wrong type.
            ValueError: a layer out of range, a prompt that is too long, a loss without tokens.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge("When Mary and John went to the store, John gave a drink to", return_type="predictions")
            ' Mary'
        """
        asked = Request(input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs)
        return run_model(self, asked, return_type, loss_per_token)

    def run_with_cache(
        self,
        input: Input | None = None,
        *,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: NamesFilter | HookPoint | Mapping[str, Index] = None,
        incl_bwd: bool = False,
        pos_slice: PosSlice = None,
        device: torch.device | str | None = None,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **forward_kwargs: Any,
    ) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """Runs the model and keeps activations.

        Args:
            input: as for `forward`.
            return_cache_object: an `ActivationCache` rather than a plain dictionary.
            remove_batch_dim: drop the batch axis of a single prompt.
            names_filter: which hook points: a name or alias, a list of them, a function of the name; None: all but the
                heavy ones that are not switched on by the ``set_use_*`` methods. From names to heads
                (``{"blocks.5.attn.hook_pattern": [1, 6]}``; None: all): of these heads alone, which `ActivationCache.
                part` gives; of scores and patterns, no others are made.
            incl_bwd: also run the loss (``return_type="loss"``) backward and keep gradients, under name + ``_grad``.
                No parameter's ``.grad`` is touched.
            pos_slice: which positions to keep (of the queries, for scores and patterns): an index, a slice, a tuple
                ``(start, stop)``, which means the same, or a list of indices. Scores and patterns of other queries are
                not computed where the kernel does not; they differ from a part of the whole by rounding.
            device: where to keep them; None: where they are. The model does not wait for the copies.
            reset_hooks_end: False leaves the caching hooks: later runs fill the same cache, until `reset_hooks`.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns, and the activations, detached.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run; gradients of
                something that is no single number; heads of an activation without any, with `incl_bwd`, or without
                `reset_hooks_end`.
            IndexError: there are no such heads.
            RuntimeError: a named hook point did not run; or a cached tensor was changed in place afterwards.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> logits, cache = bridge.run_with_cache("Mary and John", names_filter="blocks.0.hook_resid_pre")
            >>> cache["resid_pre", 0].shape[-1] == bridge.cfg.d_model
            True
        """
        heads: dict[HookPoint, KeptHeads] = {}
        if isinstance(names_filter, Mapping):
            if incl_bwd or not reset_hooks_end:
                raise ValueError(
                    "of some heads, a cache has no gradients, and no hooks that stay: give names alone, or add a hook "
                    "with heads="
                )
            heads = self._kept_heads(names_filter)
            names_filter = list(names_filter)
        points = self.points_of_run(names_filter, forward_kwargs)
        part = runs_some_layers(forward_kwargs)
        recorder = ActivationRecorder(
            points, pos_slice, device, incl_bwd, check=not part, everything=names_filter is None, heads=heads
        )
        with recorder.attached(self.wiring):
            output = self.forward(input, **forward_kwargs)
            if incl_bwd:
                recorder.backward(output)
        cache = cache_of_run(recorder.finish(named_one_by_one(names_filter)), self)
        cache.mixes_adapters = forward_kwargs.get("adapter_names") is not None
        cache.kept_heads = {hook.name: some for hook, some in heads.items()}
        if remove_batch_dim:
            cache.remove_batch_dim()
        if not reset_hooks_end:
            self.add_caching_hooks(
                [hook.name for hook in points], incl_bwd, device, remove_batch_dim, cache.cache_dict, pos_slice
            )
        if clear_contexts:
            clear_all_contexts(self)
        return output, cache if return_cache_object else cache.cache_dict

    def _heads_at(self, hook: HookPoint, index: Index) -> tuple[int, int, tuple[int, ...]]:
        """The axis of heads at a hook point, how many there are, and which of them are meant."""
        axis = axis_of("heads", hook)
        said = hook.point.axes.split()[axis]
        n = self.cfg.n_heads if said == "n_heads" else self.cfg.n_kv_heads if not said.isdigit() else int(said)
        return axis, n, tuple(sorted(set(entries_of("heads", kept_index("heads", index), n, hook.name))))

    def check_heads(self, hook: HookPoint, heads: Index) -> None:
        self._heads_at(hook, heads)

    def _kept_heads(self, chosen: Mapping[str, Index]) -> dict[HookPoint, KeptHeads]:
        """Which heads of hook points are asked for, where not all are."""
        found: dict[HookPoint, KeptHeads] = {}
        points = [self.names.find(name) for name in chosen]
        if twice := [name for name, hook in zip(chosen, points, strict=True) if points.count(hook) > 1]:
            raise ValueError(f"{' and '.join(twice)} are one hook point: name it once, with all heads")
        for hook, index in zip(points, chosen.values(), strict=True):
            if index is not None:
                axis, n, heads = self._heads_at(hook, index)
                found[hook] = KeptHeads(axis, heads, n, f"{hook.name}{list(heads)}")
        return found

    def run_with_callback(
        self,
        input: Input,
        callback: Callable[[Tensor, HookPoint], None],
        names_filter: NamesFilter | HookPoint = None,
        *,
        max_bytes: int | None = None,
        **forward_kwargs: Any,
    ) -> Any:
        """Runs the model and gives each activation to a function as it comes, in place of a cache.

        Nothing is kept, and nothing is copied: what the function keeps of a tensor, it has to copy.

        Args:
            input: as for `forward`.
            callback: called as ``callback(activation, point)``, in the order of the computation. It must not change
                the activation; `run_with_hooks` is for that.
            names_filter: which hook points, as for `run_with_cache`.
            max_bytes: about how much memory scores and patterns may take at once: each then comes in pieces, some
                queries after the other, ``[batch, head, some queries, key]``, of which no others are in memory
                (`bridge.analysis.patterns` has statistics of such pieces). None: each comes whole.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> norms = {}
            >>> def measure(activation, point):
            ...     norms[point.name] = activation.norm(dim=-1).mean().item()
            >>> _ = bridge.run_with_callback("Mary and John", measure, lambda name: name.endswith("hook_resid_post"))
            >>> len(norms) == bridge.cfg.n_layers
            True
        """
        with watching(self.wiring, self.points_of_run(names_filter, forward_kwargs), callback, max_bytes):
            return self.forward(input, **forward_kwargs)

    def run_with_hooks(
        self,
        input: Input | None = None,
        *,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **forward_kwargs: Any,
    ) -> Any:
        """Runs the model with functions that see, and may change, its activations.

        Args:
            input: as for `forward`.
            fwd_hooks: pairs of a hook point (name, alias, or function of the name) and a function called as
                ``fn(activation, hook=point)``, which may return a new activation.
            bwd_hooks: the same for gradients. A loss may be run backward later: the gradients of this run still reach
                them.
            reset_hooks_end: take these hooks away afterwards. Hooks that were there before stay.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point outside of the layers that run; a function that
                returned a wrong shape.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> off = bridge.run_with_hooks("Mary", fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)])
        """
        check_specs("fwd_hooks", fwd_hooks)
        check_specs("bwd_hooks", bwd_hooks)
        for names, _ in (*fwd_hooks, *bwd_hooks):
            self.points_of_run(names, forward_kwargs)
        with hooked(self, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self.forward(input, **forward_kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """Hooks for all runs that start inside a ``with`` statement.

        Other threads and asyncio tasks do not see them. A worker of yours does when it runs in a copy of this context:
        ``contextvars.copy_context().run(...)`` or `asyncio.to_thread`.

        Args:
            fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: as for `run_with_hooks`.

        Yields:
            The bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        with hooked(self, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            yield self

    def points_of_run(self, names: NamesFilter | HookPoint, forward_kwargs: dict[str, Any]) -> list[HookPoint]:
        """The hook points that a run with these arguments shows.

        Args:
            names: as for `run_with_cache`.
            forward_kwargs: the arguments of `forward`; of them, the layers that it starts and stops at count.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.
        """
        return points_of_run(self, names, forward_kwargs)

    # Reading the residual stream as next tokens.

    def lens(
        self,
        input: Input,
        kind: str | lenses.TunedLens = "normed",
        pos_slice: PosSlice = None,
        layers: Sequence[int] | None = None,
        prepend_bos: bool | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        max_bytes: int | None = None,
        **model_kwargs: Any,
    ) -> lenses.Reading:
        """What each layer would say next: the residual stream before it, and at the end, read as tokens.

        Logits are computed when the reading is asked, a layer at a time.

        Args:
            input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``.
            kind: ``"normed"``, through the final norm and the unembedding; ``"raw"``, through the unembedding alone; or
                a `bridge.lens.TunedLens`.
            pos_slice, layers, prepend_bos, attention_mask, max_bytes, model_kwargs: as for `bridge.lens`.

        Raises:
            ValueError: an unknown kind or layer; a lens for another model.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> top = bridge.lens("The capital of France is", pos_slice=-1).top(5)  # layer batch pos k
            >>> [bridge.to_single_str_token(int(token)) for token in top.tokens[-1, 0, 0, :1]]
            [' Paris']
        """
        return lenses.lens(self, input, kind, pos_slice, layers, prepend_bos, attention_mask, max_bytes, **model_kwargs)

    # Hook points in a basis of the user's.

    @property
    def bases(self) -> list[HookPoint]:
        """The hook points that were placed by `add_basis`, in the order of the computation.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().bases
            []
        """
        return [hook for hook in self.hook_dict.values() if isinstance(hook.view, InBasis)]

    def __repr__(self) -> str:
        placed = ", ".join(hook.name for hook in self.bases)
        return super().__repr__() + (f"\n  bases           {placed}" if placed else "")

    def add_basis(
        self,
        point: str | HookPoint,
        name: str,
        basis: Basis | None = None,
        *,
        encode: Callable[[Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        reads: str | HookPoint | Sequence[str | HookPoint] | None = None,
        skip: Callable[[Tensor], Tensor] | None = None,
        error: Error = "keep",
        later: Sequence[str | HookPoint] = (),
    ) -> HookPoint:
        """Places a hook point that shows an activation in a basis: an SAE's features, directions, a rotation.

        Its activation is ``encode(a)``. What is written back is ``a + decode(new) - decode(old)``, so that what the
        basis does not explain stays, and the same features leave the same bits. The point is one like any other: its
        name is found by filters, hooks, caches, traces, programs, harvests and patching, and it costs nothing until
        someone listens. An unfiltered cache leaves it out. A copy of the bridge has none.

        Args:
            point: the hook point whose activation it shows. A basis's own point may be one.
            name: its name is that of `point`, a dot, and this.
            basis: anything with `encode` and `decode`, such as SAELens' objects. It is moved with the bridge (`to`).
            encode, decode: in place of `basis`, two functions.
            reads: the features are of this point's activation and not of `point`'s (a transcoder): an input or output
                of a module that runs earlier. Or of several (a crosscoder): `encode` gets ``[..., point, d]``.
            skip: what a transcoder adds to what is decoded, as a function of what is read.
            error: what becomes of what the basis does not explain. ``"keep"``: it stays. ``"drop"``: in every run
                ``decode(features)`` goes on in place of the activation. A tensor: that and this (`basis_error` gives
                the error of a run).
            later: further points at which the features are written, in their order (a cross-layer transcoder): `basis`
                is one layer of it, with `decode_later`, such as `bridge.bases.CrossLayer`; `reads` is given. What is
                written there shows as points of its own, named after `name` and the layer (``blocks.3.hook_mlp_out.
                NAME_of_1``), which go with this one.

        Returns:
            The hook point.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the name is taken or is no word; the activation has no axis of features; the basis's tensors are
                on another device, or of another type; `reads` cannot be read from elsewhere, or does not come before;
                `later` does not come behind.
            TypeError: neither a basis nor both functions, or both ways; or a method is missing.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Directions
            >>> bridge = TransformerBridge.boot_embedded()
            >>> mary = bridge.tokens_to_residual_directions(" Mary")
            >>> point = bridge.add_basis("blocks.2.hook_resid_post", "mary", Directions(mary))
            >>> logits, cache = bridge.run_with_cache("Mary and John", names_filter=point)
            >>> cache["blocks.2.hook_resid_post.mary"].shape
            torch.Size([1, 4, 1])
        """
        given = one_of(basis, encode, decode)
        places = self._places_of(point, reads, later)
        hook = self._new_point(request := BasisRequest(name, given, *places, skip, error))
        if not request.keeps:
            self.wiring.add(hook, Listener("fwd", as_they_are, None, permanent=True))
        return hook

    @contextmanager
    def basis(
        self,
        point: str | HookPoint,
        name: str,
        basis: Basis | None = None,
        *,
        encode: Callable[[Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        reads: str | HookPoint | Sequence[str | HookPoint] | None = None,
        skip: Callable[[Tensor], Tensor] | None = None,
        error: Error = "keep",
        later: Sequence[str | HookPoint] = (),
    ) -> Iterator[HookPoint]:
        """As `add_basis`, inside a ``with`` statement; an error that is not kept is so for its runs alone.

        Args:
            point, name, basis, encode, decode, reads, skip, error, later: as for `add_basis`.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Rotation
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.basis("blocks.1.hook_mlp_out", "turned", Rotation(128)) as point:
            ...     point.name in bridge.hook_dict
            True
            >>> bridge.bases
            []
        """
        given = one_of(basis, encode, decode)
        places = self._places_of(point, reads, later)
        hook = self._new_point(request := BasisRequest(name, given, *places, skip, error))
        try:
            if request.keeps:
                yield hook
            else:
                scope = Scope()
                with self.wiring.scoped([(hook, Listener("fwd", as_they_are, scope))], scope):
                    yield hook
        finally:
            if self.hook_dict.get(hook.name) is hook:
                self.remove_basis(hook)

    def _places_of(
        self, point: str | HookPoint, reads: str | HookPoint | Sequence[str | HookPoint] | None,
        later: Sequence[str | HookPoint],
    ) -> tuple[HookPoint, tuple[HookPoint, ...], tuple[HookPoint, ...]]:  # fmt: skip
        """The hook points of a basis: where it stands, which it reads, which it writes to later."""
        read = [] if reads is None else [reads] if isinstance(reads, str | HookPoint) else reads
        return self._hook(point), tuple(map(self._hook, read)), tuple(map(self._hook, later))

    def remove_basis(self, point: str | HookPoint) -> None:
        """Takes a hook point that `add_basis` placed out again, with the hooks on it and the bases on it.

        Args:
            point: the hook point, or its name.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: it is one of the model's own, or goes with another one (a later point of a cross-layer
                transcoder).

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Neurons
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = bridge.add_basis("blocks.0.mlp.hook_post", "some", Neurons(512, [3, 5]))
            >>> bridge.remove_basis(point)
        """
        hook, _ = self._basis_at(point)
        if takes_over(hook):
            raise ValueError(f"{hook.name} takes over features of an earlier layer: remove_basis the one of that layer")
        for follower in hook.point.linked:
            self.wiring.remove_point(self.hook_dict[follower.name])
        for other in self.bases:
            if other is hook or other.name.startswith(f"{hook.name}."):
                self.wiring.remove_point(other)
        self._names_changed()

    def basis_error(self, cache: Any, point: str | HookPoint) -> Tensor:
        """What a basis did not explain in a run: the activation less what is decoded (and less a transcoder's skip).

        Args:
            cache: of a run; it holds the basis's own point, the point that it stands on, for one that reads elsewhere
                with a skip path that point, and where earlier layers of a cross-layer transcoder are written, those.
            point: the hook point in the basis, or its name.

        Returns:
            ``[batch, pos, d]``.

        Raises:
            KeyError: the cache does not hold one of them.
            ValueError: the point is no basis.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Rotation
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = bridge.add_basis("blocks.1.hook_mlp_out", "turned", Rotation(128))
            >>> _, cache = bridge.run_with_cache("Mary and", names_filter=["blocks.1.hook_mlp_out", point.name])
            >>> bool(bridge.basis_error(cache, point).abs().max() < 1e-4)
            True
        """
        hook, view = self._basis_at(point)
        read = None if not view.reads or view.skip is None else view.read_in(cache)
        base, _, name = hook.name.rpartition(".")
        rest = view.unexplained(cache[base], cache[hook.name], read)
        layers = [other for other in self.bases if other.name.endswith(f".{name}")]
        for layer, there in written_later(base, layers, self.hook_dict):
            rest = there.unexplained(rest, cache[layer.name])
        return rest

    @contextmanager
    def linearised(
        self,
        input: Input,
        freeze: Sequence[str] = ("pattern", "ln_scale"),
        **forward_kwargs: Any,
    ) -> Iterator[ActivationCache | dict[str, Tensor]]:
        """Holds attention patterns and norm factors at their values in one run, for all runs in a ``with`` statement.

        Between MLPs the model is then linear in its residual stream: what is added to it has an exact share in all that
        comes behind. Gradients do not flow through what is held.

        Args:
            input: of the run whose values are held. Other runs have as many positions, and as many rows or this one's
                single row.
            freeze: what is held: ``"pattern"``, every attention pattern; ``"ln_scale"``, every norm's factor;
                ``"mlp_out"``, what MLPs add; or names of hook points.
            forward_kwargs: as for `forward`.

        Returns:
            The activations that are held, by name.

        Raises:
            UnknownHookError: a name that no hook point has.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> tokens = bridge.to_tokens("Mary and John")
            >>> before = bridge(tokens)
            >>> with bridge.linearised(tokens, freeze=("pattern", "ln_scale", "mlp_out")):
            ...     again = bridge(tokens)
            ...     twice = bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda act, hook: act * 2)])
            ...     thrice = bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda act, hook: act * 3)])
            >>> bool((again - before).abs().max() < 1e-3), bool((thrice - 2 * twice + again).abs().max() < 1e-2)
            (True, True)
        """
        points: list[HookPoint] = []
        for what in freeze:
            ending = _HELD.get(what)
            named = [hook for name, hook in self.hook_dict.items() if ending and name.endswith(ending)]
            points += named if ending else self.select_hooks(what)
        cache: ActivationCache | dict[str, Tensor] = {}
        if points:
            with torch.no_grad():
                _, cache = self.run_with_cache(input, names_filter=[hook.name for hook in points], **forward_kwargs)
        with self.hooks(fwd_hooks=[(hook, _held(cache[hook.name])) for hook in points]):
            yield cache

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the model, and the bases that were placed on it.

        Raises:
            ValueError: a basis is made of functions, whose tensors nobody can move.
        """
        for hook in self.bases:
            assert isinstance(hook.view, InBasis)
            if not modules_of(hook.view.basis):
                raise ValueError(
                    f"{hook.name} is made of functions, whose tensors nobody can move: remove_basis it first"
                )
        for hook in self.bases:
            assert isinstance(hook.view, InBasis)
            for module in modules_of(hook.view.basis):
                module.to(*args, **kwargs)
            if isinstance(hook.view.error, Tensor):
                hook.view.error = hook.view.error.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def _new_point(self, request: BasisRequest) -> HookPoint:
        declared = request.points(self.cfg, self.original_model)
        for point in declared:
            if point.name in self.hook_dict:
                raise ValueError(f"{point.name} is there already: give the basis another name, or remove_basis it")
        hooks = []
        for base, point in zip((request.point, *request.later), declared, strict=True):
            hooks.append(self.makes_points(point, base.order, self.wiring))
            self.wiring.insert(hooks[-1], base)
        self._names_changed()
        return hooks[0]

    def _hook(self, point: str | HookPoint) -> HookPoint:
        return self.select_hooks(point)[0]

    def _basis_at(self, point: str | HookPoint) -> tuple[HookPoint, InBasis]:
        hook = self.select_hooks(point)[0]
        view = hook.view
        if isinstance(view, InBasis):
            return hook, view
        raise ValueError(f"{hook.name} is the model's own hook point, and no basis")

    def _names_changed(self) -> None:
        self.names.refresh()
        self._tree.refresh()
        self.__dict__.pop("_places", None)


def as_they_are(features: Tensor, hook: HookPoint) -> Tensor:
    """The features, so that what the basis makes of them goes on."""
    return features


#: What `linearised` can hold, and how the names of its hook points end.
_HELD = {"pattern": ".hook_pattern", "ln_scale": ".hook_scale", "mlp_out": ".hook_mlp_out"}


def _held(value: Tensor) -> Callable[..., Tensor]:
    """A hook function that puts a value in an activation's place, in every row where it is of one row."""

    def held(activation: Tensor, hook: HookPoint) -> Tensor:
        one = value.shape[0] == 1 and value.shape[1:] == activation.shape[1:]
        return value.expand_as(activation) if one else value

    return held
