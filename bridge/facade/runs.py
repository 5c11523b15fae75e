"""Running a model: plainly, with a cache, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from adapters.points import Border, module_at
from adapters.views.basis import Basis, Error, InBasis
from bridge import lens as lenses
from bridge.arguments import check_choice, check_positive
from bridge.bases.bases import BasisRequest, modules_of, one_of, takes_over, written_later
from bridge.bases.components import components_of, layer_of
from bridge.bases.folders import read_folder
from bridge.cache import ActivationCache, cache_of_run
from bridge.facade.hooks import HookMethods
from bridge.hooks.context import Listener, Scope
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, named_one_by_one
from bridge.hooks.parts import KeptHeads, entries_of
from bridge.interventions.operations import Index, axis_of, kept_index
from bridge.interventions.probes import FittedProbe, ProbeReading, probes_at, readings_of
from bridge.run.inputs import HookSpec, Input, Request
from bridge.run.parts import call_part
from bridge.run.recorder import ActivationRecorder, PosSlice, watching
from bridge.run.rules import Rules, declared_rules, ruled
from bridge.run.run import (
    check_specs,
    clear_all_contexts,
    hooked,
    lm_loss,
    points_of_run,
    run_model,
    runs_some_layers,
)
from bridge.run.spans import is_chat
from bridge.run.tokenization import Texts
from bridge.wiring.submodules import check_path, name_at, place_of, recorded


class RunMethods(HookMethods):
    """The methods of a bridge that run its model."""

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """Return the loss of the next-token predictions.

        Args:
            logits: the model's logits.
            tokens: the actual tokens.
            attention_mask: 1 for tokens, 0 for padding, which is excluded from the loss.
            per_token: return ``[batch, pos-1]`` instead of the mean.
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
        """Run the model.

        Args:
            input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos,
                d_model]``. With `start_at_layer`, the residual stream ``[batch, pos, d_model]``
                that enters that layer. A tokenizer's output is accepted too: as one object, or as
                keyword arguments (``bridge(**tokenizer(text, return_tensors="pt"))``).
            return_type: ``"logits"`` ``[batch, pos, d_vocab]``; ``"loss"``, in nats; ``"both"``, a
                pair of them; ``"predictions"``, the most likely next token of each row as text;
                ``"logits_and_cache"``, the logits and the model's cache of keys and values, to pass
                as `past_key_values` in the next call; None, nothing.
            loss_per_token: return the loss as ``[batch, pos-1]`` instead of its mean.
            prepend_bos: start texts with BOS; None: ``cfg.default_prepend_bos``, if the tokenizer
                has a BOS.
            padding_side: the side on which shorter texts are padded; None: the tokenizer's.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; computed for texts.
            start_at_layer: the first block to run (``n_layers``: run only the modules after the
                blocks, as for a logit lens). If the model takes images or sound, or its blocks also
                read tokens, pass the inputs of the stream by name (``input_ids=tokens``,
                ``pixel_values=None`` for text only).
            stop_at_layer: the first block not to run: return the residual stream that would enter
                it (``n_layers``: the stream after the last block).
            model_kwargs: anything else that the Hugging Face model's forward takes.

        Returns:
            The result requested by `return_type` or `stop_at_layer`.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a
                wrong type.
            ValueError: a layer out of range, a prompt that is too long, a loss without tokens.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> prompt = "When Mary and John went to the store, John gave a drink to"
            >>> bridge(prompt, return_type="predictions")
            ' Mary'
        """
        request = Request(
            input,
            prepend_bos,
            padding_side,
            attention_mask,
            start_at_layer,
            stop_at_layer,
            model_kwargs,
        )
        return run_model(self, request, return_type, loss_per_token)

    def call_part(self, name: str, input: Any, **kwargs: Any) -> Tensor:
        """Call a part of the model by itself, with the hooks inside it: what
        ``bridge.blocks[0](residual)`` and ``bridge.ln_final(residual)`` do.

        Args:
            name: ``embed``, a block such as ``blocks.0``, its norms and MLP, ``ln_final`` or
                ``unembed``.
            input: what it reads: tokens or text for ``embed``, the residual stream ``[batch, pos,
                d_model]`` for a block, and its own input for any other part.
            kwargs: for a block and ``embed``: arguments of `forward`, such as `attention_mask`; for
                a norm and an MLP, those of the model's module.

        Returns:
            The embedding at ``hook_embed``, a block's residual stream after it, the logits before a
            soft cap, or the output of the module.

        Raises:
            TypeError: a part that needs more than one input, such as attention; the message says
                what to call. Or an input of a wrong type.
            ValueError: vectors of a wrong width; a model without runs of single layers.
            AttributeError: no part is called so.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> tokens = bridge.to_tokens("Mary and John")
            >>> residual = bridge.embed(tokens)
            >>> for block in bridge.blocks:
            ...     residual = block(residual)
            >>> torch.equal(bridge.unembed(bridge.ln_final(residual)), bridge(tokens))
            True
        """
        return call_part(self, name, input, **kwargs)

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
        """Run the model and keep activations.

        Args:
            input: as for `forward`.
            return_cache_object: return an `ActivationCache`; False: a plain dictionary.
            remove_batch_dim: remove the batch axis of a single prompt.
            names_filter: the hook points: a name or alias, a list of them, or a function of the
                name; None: all except heavy points that the ``set_use_*`` methods have not enabled.
                A mapping from names to heads (``{"blocks.5.attn.hook_pattern": [1, 6]}``; None: all
                heads) keeps only these heads; read them with `ActivationCache.part`. Scores and
                patterns of other heads are not computed.
            incl_bwd: also run the backward pass of the loss (``return_type="loss"``) and keep
                gradients, under the name plus ``_grad``. No parameter's ``.grad`` is changed.
            pos_slice: the positions to keep (query positions for scores and patterns): an index, a
                slice, a tuple ``(start, stop)``, which means the same as the slice, or a list of
                indices. If the model's kernel does not compute scores and patterns, only those of
                the kept queries are computed; they differ by rounding from the same queries of the
                full tensor.
            device: the device on which to keep activations; None: their own. The model does not
                wait for the copies.
            reset_hooks_end: False keeps the caching hooks, so that later runs fill the same cache,
                until `reset_hooks`.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            The result of `forward`, and the detached activations.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run;
                gradients of something that is not a single number; heads of an activation that has
                none; heads together with `incl_bwd` or ``reset_hooks_end=False``.
            IndexError: there are no such heads.
            RuntimeError: a named hook point did not run; or a cached tensor was changed in place
                afterwards.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = "blocks.0.hook_resid_pre"
            >>> logits, cache = bridge.run_with_cache("Mary and John", names_filter=point)
            >>> cache["resid_pre", 0].shape[-1] == bridge.cfg.d_model
            True
        """
        heads: dict[HookPoint, KeptHeads] = {}
        if isinstance(names_filter, Mapping):
            heads = self._kept_heads(names_filter, plain=reset_hooks_end and not incl_bwd)
            names_filter = list(names_filter)
        points = self.points_of_run(names_filter, forward_kwargs)
        recorder = ActivationRecorder(
            points,
            pos_slice,
            device,
            incl_bwd,
            check=not runs_some_layers(forward_kwargs),
            everything=names_filter is None,
            heads=heads,
        )
        with recorder.attached(self.wiring) as scope:
            output = self.forward(input, **forward_kwargs)
            if incl_bwd:
                recorder.backward(output)
        cache = cache_of_run(recorder.finish(named_one_by_one(names_filter)), self)
        if scope.rows is not None:
            cache.masks = {axis: mask.clone() for axis, mask in scope.rows.masks.items()}
        cache.mixes_adapters = forward_kwargs.get("adapter_names") is not None
        cache.kept_heads = {hook.name: kept for hook, kept in heads.items()}
        if remove_batch_dim:
            cache.remove_batch_dim()
        if not reset_hooks_end:
            names, values = [hook.name for hook in points], cache.cache_dict
            self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, values, pos_slice)
        if clear_contexts:
            clear_all_contexts(self)
        return output, cache if return_cache_object else cache.cache_dict

    def _heads_at(self, hook: HookPoint, index: Index) -> tuple[int, int, tuple[int, ...]]:
        """Return the axis of heads at a hook point, their number, and the chosen heads."""
        axis = axis_of("heads", hook)
        size = hook.point.axes.split()[axis]
        if size.isdigit():
            n = int(size)
        else:
            n = self.cfg.n_heads if size == "n_heads" else self.cfg.n_kv_heads
        heads = entries_of("heads", kept_index("heads", index), n, hook.name)
        return axis, n, tuple(sorted(set(heads)))

    def check_heads(self, hook: HookPoint, heads: Index) -> None:
        self._heads_at(hook, heads)

    def _kept_heads(
        self, heads_by_name: Mapping[str, Index], plain: bool
    ) -> dict[HookPoint, KeptHeads]:
        """Return the selected heads of hook points of which not all heads are kept.

        Args:
            heads_by_name: the heads; None: all.
            plain: whether the cache has no gradients and its hooks are removed afterwards.
        """
        if not plain:
            raise ValueError(
                "of some heads, a cache has no gradients, and no hooks that stay: give names"
                " alone, or add a hook with heads="
            )
        kept: dict[HookPoint, KeptHeads] = {}
        points = {name: self.names.find(name) for name in heads_by_name}
        hooks = list(points.values())
        repeated = [name for name, hook in points.items() if hooks.count(hook) > 1]
        if repeated:
            raise ValueError(
                f"{' and '.join(repeated)} are one hook point: name it once, with all heads"
            )
        for name, hook in points.items():
            if heads_by_name[name] is not None:
                axis, n, heads = self._heads_at(hook, heads_by_name[name])
                kept[hook] = KeptHeads(axis, heads, n, f"{hook.name}{list(heads)}")
        return kept

    def run_with_callback(
        self,
        input: Input,
        callback: Callable[[Tensor, HookPoint], None],
        names_filter: NamesFilter | HookPoint = None,
        *,
        max_bytes: int | None = None,
        **forward_kwargs: Any,
    ) -> Any:
        """Run the model and pass each activation to a function as it is computed, instead of
        filling a cache. Nothing is kept or copied: the function has to copy the parts of a tensor
        that it keeps.

        Args:
            input: as for `forward`.
            callback: called as ``callback(activation, point)``, in the order of the computation. It
                must not change the activation; use `run_with_hooks` for that.
            names_filter: the hook points, as for `run_with_cache`.
            max_bytes: roughly how much memory scores and patterns may take: each is then passed in
                chunks of queries, ``[batch, head, some queries, key]``, with one chunk in memory at
                a time (`bridge.analysis.patterns` computes statistics from such chunks). None: each
                is passed whole.
            forward_kwargs: as for `forward`.

        Returns:
            The result of `forward`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> norms = {}
            >>> def measure(activation, point):
            ...     norms[point.name] = activation.norm(dim=-1).mean().item()
            >>> chosen = lambda name: name.endswith("hook_resid_post")
            >>> _ = bridge.run_with_callback("Mary and John", measure, chosen)
            >>> len(norms) == bridge.cfg.n_layers
            True
        """
        points = self.points_of_run(names_filter, forward_kwargs)
        with watching(self.wiring, points, callback, max_bytes):
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
        """Run the model with functions that read, and may change, its activations.

        Args:
            input: as for `forward`.
            fwd_hooks: pairs of a hook point (name, alias, or function of the name) and a function
                called as ``fn(activation, hook=point)``, which may return a new activation.
            bwd_hooks: the same for gradients. You may call ``backward`` later: the gradients of
                this run still reach these functions.
            reset_hooks_end: remove these hooks afterwards. Earlier hooks stay.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            The result of `forward`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point outside of the layers that
                run; a function that returned a wrong shape.
            RuntimeError: a named hook point did not run, as in a layer that the model skipped.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> zero = lambda x, hook: x * 0
            >>> off = bridge.run_with_hooks("Mary", fwd_hooks=[("blocks.0.hook_mlp_out", zero)])
        """
        check_specs("fwd_hooks", fwd_hooks)
        check_specs("bwd_hooks", bwd_hooks)
        for names, _ in (*fwd_hooks, *bwd_hooks):
            self.points_of_run(names, forward_kwargs)
        with hooked(self, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts, must_run=True):
            return self.forward(input, **forward_kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """Add hooks to all runs that start inside a ``with`` statement. Runs of other threads and
        asyncio tasks are not affected. A worker thread sees the hooks if it runs in a copy of this
        context: ``contextvars.copy_context().run(...)`` or `asyncio.to_thread`.

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

    def points_of_run(
        self, names: NamesFilter | HookPoint, forward_kwargs: dict[str, Any]
    ) -> list[HookPoint]:
        """Return the hook points that a run with these arguments shows.

        Args:
            names: as `names_filter` of `run_with_cache`.
            forward_kwargs: the arguments of `forward`, of which only the layers at which it starts
                and stops matter.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.
        """
        return points_of_run(self, names, forward_kwargs)

    # Reading the residual stream as next tokens.

    def lens(
        self,
        input: Input,
        kind: str | lenses.Lens = "normed",
        pos_slice: PosSlice = None,
        layers: Sequence[int] | None = None,
        prepend_bos: bool | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        max_bytes: int | None = None,
        **model_kwargs: Any,
    ) -> lenses.Reading:
        """Return each layer's next-token prediction: the residual stream before each layer, and at
        the end, decoded to logits. Logits are computed on request, one layer at a time.

        Args:
            input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``.
            kind: ``"normed"``, through the final norm and the unembedding; ``"raw"``, through the
                unembedding only; or a `bridge.lens.Lens`, such as `fit_lens` returns.
            pos_slice, layers, prepend_bos, attention_mask, max_bytes, model_kwargs: as for
            `bridge.lens`.

        Raises:
            ValueError: an unknown kind or layer; a lens for another model.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> # tokens: [layer, batch, pos, k]
            >>> top = bridge.lens("The capital of France is", pos_slice=-1).top(5)
            >>> [bridge.to_single_str_token(int(token)) for token in top.tokens[-1, 0, 0, :1]]
            [' Paris']
        """
        return lenses.lens(
            self,
            input,
            kind,
            pos_slice,
            layers,
            prepend_bos,
            attention_mask,
            max_bytes,
            **model_kwargs,
        )

    def readings(
        self,
        texts: Texts | Sequence[Sequence[int]] | Sequence[Tensor],
        probes: Sequence[FittedProbe],
        *,
        prepend_bos: bool | None = None,
        batch_size: int = 32,
    ) -> list[dict[str, ProbeReading]]:
        """Return the readings of probes for each text.

        Args:
            texts: a text or a chat, several, or the tokens of several, each without padding.
            probes: what `Probe.fit` returns.
            prepend_bos: start texts with BOS; None: the model's default.
            batch_size: the number of texts in a run. Tokens are run one text at a time.

        Returns:
            For each text, the `ProbeReading` of each probe by its name.

        Raises:
            ValueError: no probes, two with the same name, or one that does not fit its hook point.
            UnknownHookError: a probe of a point that the model does not have.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import FittedProbe
            >>> bridge = TransformerBridge.boot_embedded()
            >>> probe = FittedProbe(
            ...     point="blocks.1.hook_resid_post", values=torch.ones(1, 128), over="mean"
            ... )
            >>> reading = bridge.readings(["Mary and John"], [probe])[0]["probe"]
            >>> abs(reading.value - reading.tokens.mean().item()) < 1e-5
            True
        """
        by_point = probes_at(probes, self)
        if isinstance(texts, Tensor):
            raise TypeError("texts is a tensor; it must be texts, or a list of tokens for each")
        readings: list[dict[str, ProbeReading]] = []
        for tokens, mask in self._batches(texts, prepend_bos, batch_size):
            _, cache = self.run_with_cache(
                tokens, names_filter=list(by_point), attention_mask=mask, return_type=None
            )
            real = torch.ones_like(tokens) if mask is None else mask
            for row, own in enumerate(real.bool()):
                acts = {point: cache[point][row, own.to(cache[point].device)] for point in by_point}
                readings.append(readings_of(by_point, acts))
        return readings

    def _batches(
        self, texts: Any, prepend_bos: bool | None, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the tokens and masks of texts; of the tokens of each text, one row at a time."""
        check_positive("batch_size", batch_size)
        rows: Sequence[Any] = [texts] if isinstance(texts, str) or is_chat(texts) else texts
        are_texts = [isinstance(row, str) or is_chat(row) for row in rows]
        size = batch_size if all(are_texts) else 1
        for begin in range(0, len(rows), size):
            if are_texts[begin]:
                batch = self.batch_of(rows[begin : begin + size], prepend_bos)
                yield batch.tokens, batch.mask
                continue
            tokens = torch.atleast_2d(torch.as_tensor(rows[begin]))
            if len(tokens) > 1:
                raise ValueError(
                    f"texts[{begin}] is of {len(tokens)} texts: give the tokens of each, [pos]"
                )
            yield tokens, None

    def fit_lens(self, texts: Sequence[Any], kind: str = "jacobian", **options: Any) -> lenses.Lens:
        """Fit a lens on texts: a linear map per layer from the residual stream there to the last
        one. Pass it to `lens` as `kind`, or use it on vectors: its `decode`, `vectors`,
        `decompose` and `occupancy`.

        Args:
            texts: texts, or tokens; for ``"tuned"`` batches of them.
            kind: ``"jacobian"``, the mean derivative (Gurnee et al. 2026, "Verbalizable
                Representations Form a Global Workspace in Language Models"); or ``"tuned"``, a
                trained affine map (Belrose et al. 2023, "Eliciting Latent Predictions from
                Transformers with the Tuned Lens").
            options: of `bridge.lens.JacobianLens.fit` or `bridge.lens.TunedLens.fit`.

        Raises:
            ValueError: an unknown kind; texts or a model that the lens cannot be fitted on.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.embedded import prompts
            >>> bridge = TransformerBridge.boot_embedded()
            >>> texts = [prompt.text + prompt.answer for prompt in prompts("ioi", 4)]
            >>> lens = bridge.fit_lens(texts, skip_first=4, verbose=False)
            >>> lens.vectors(" Mary", 2).shape
            torch.Size([128])
        """
        kinds: dict[str, Callable[..., lenses.Lens]] = {
            "jacobian": lenses.JacobianLens.fit,
            "tuned": lenses.TunedLens.fit,
        }
        check_choice("kind", kind, kinds)
        return kinds[kind](self, texts, **options)

    # Hook points in a basis of the user's.

    @property
    def bases(self) -> list[HookPoint]:
        """The hook points added by `add_basis`, in the order of the computation.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().bases
            []
        """
        return [hook for hook in self.hook_dict.values() if isinstance(hook.view, InBasis)]

    def __repr__(self) -> str:
        text, bases = super().__repr__(), self.bases
        if bases:
            text += f"\n  bases           {', '.join(hook.name for hook in bases)}"
        return text

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
        """Add a hook point that shows an activation in a basis: an SAE's features, directions, a
        rotation. Its activation is ``encode(a)``. An edit writes back ``a + decode(new) -
        decode(old)``: the part that the basis does not explain stays, and unchanged features leave
        the activation bit-identical. Use the point like any other: in filters, hooks, caches,
        traces, programs, harvests and patching. It costs nothing without listeners. An unfiltered
        cache excludes it. A copy of the bridge does not have it.

        Args:
            point: the hook point whose activation it shows. This may be a hook point in another
                basis.
            name: the last part of its name, after the name of `point` and a dot.
            basis: anything with `encode` and `decode`, such as SAELens' objects. It is moved with
                the bridge (`to`). encode, decode: two functions, instead of `basis`.
            reads: a point whose activation is encoded instead of that of `point` (a transcoder): an
                input or output of a module that runs earlier. Or several points (a crosscoder):
                `encode` gets ``[..., point, d]``.
            skip: a transcoder's skip path, a function of the encoder's input that is added to the
                decoder's output.
            error: the treatment of the part that the basis does not explain. ``"keep"``: it stays.
                ``"drop"``: in every run, ``decode(features)`` replaces the activation. A tensor:
                ``decode(features)`` plus this tensor replaces it (`basis_error` returns the error
                of a run).
            later: further points, in order, to which the features are written (a cross-layer
                transcoder): `basis` is one layer of it, with `decode_later`, such as
                `bridge.bases.CrossLayer`, and `reads` is required. The writes at these points have
                separate hook points, named after `name` and the layer
                (``blocks.3.hook_mlp_out.NAME_of_1``), which are removed with this one.

        Returns:
            The hook point.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the name is taken or not an identifier; the activation has no feature axis;
                the basis's tensors have a different device or dtype; `reads` cannot be read from
                another point, or does not come before it; `later` does not come after it.
            TypeError: neither a basis nor both functions, or a basis and functions; or a method is
                missing.

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
        pair = one_of(basis, encode, decode)
        places = self._places_of(point, reads, later)
        request = BasisRequest(name, pair, *places, skip, error)
        hook = self._new_point(request)
        if not request.keeps:
            self.wiring.add(hook, Listener("fwd", as_they_are, None, permanent=True))
        return hook

    def add_components(
        self,
        weight: str,
        V: Float[Tensor, "d_in _"],
        U: Float[Tensor, "_ d_out"],
        name: str = "components",
        *,
        rest: Literal["keep", "drop"] = "keep",
    ) -> HookPoint:
        """Add a hook point at the rank-one components of a weight: ``weight = V @ U`` plus a rest.
        Its activation, ``x @ V`` of the layer's input, is ``[batch, pos, feature]``, a feature for
        each component; to multiply it is to mask components, in each row its own (Bushnaq et al.
        2025, "Stochastic Parameter Decomposition", https://arxiv.org/abs/2506.20790). It is a
        basis of the layer's output: see `add_basis`.

        Args:
            weight: a weight's name, such as ``"blocks.1.mlp.W_out"``, or the path of a linear
                layer, such as ``"model.layers.1.mlp.down_proj"``.
            V: the directions that the components read.
            U: the directions that they write.
            name: the last part of the hook point's name.
            rest: the part of the weight that no component has. ``"keep"``: it stays. ``"drop"``: in
                every run, the layer adds only the components and its bias.

        Returns:
            The hook point, with the name ``PATH.hook_out.NAME``.

        Raises:
            ValueError: there is no such layer; it is not linear; the weight is a part of a fused
                one; the factors do not fit; the name is taken.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> U, S, Vh = torch.linalg.svd(bridge.W_out[1], full_matrices=False)
            >>> point = bridge.add_components("blocks.1.mlp.W_out", U[:, :8] * S[:8], Vh[:8])
            >>> point
            HookPoint(model.layers.1.mlp.down_proj.hook_out.components: [batch pos feature])
            >>> without_first = [(point, lambda x, hook: x.index_fill(-1, torch.tensor([0]), 0))]
            >>> logits = bridge.run_with_hooks("Mary and John", fwd_hooks=without_first)
        """
        check_choice("rest", rest, ("keep", "drop"))
        path = layer_of(weight, self.hook_dict)
        check_path(path, self.original_model)
        components = components_of(module_at(self.original_model, path), path, V, U, rest)
        read, written = self._at(path, ("input", "output"))
        return self.add_basis(written, name, components, reads=read, error=rest)

    def add_transcoders(
        self,
        folder: str | Path,
        name: str = "transcoder",
        *,
        error: Literal["keep", "drop"] = "keep",
    ) -> list[HookPoint]:
        """Add the transcoders in a folder, one for each layer, or a cross-layer transcoder, as
        bases (see `add_basis`), with the tensors in the model's dtype and on its device. Formats:
        circuit-tracer's (a ``config.yaml``), and Gemma Scope 2's own.

        Args:
            folder: the folder, such as one that ``huggingface_hub.snapshot_download`` returns.
                Files on the hub that its ``config.yaml`` names are downloaded.
            name: the last part of the hook points' names.
            error: as for `add_basis`.

        Returns:
            The hook point of each layer's features, as `attribution_graph` takes their names.

        Raises:
            FileNotFoundError: the folder, or a file that it names, is not there.
            ValueError: a format that is not known; the number of layers, or a size, is not the
                model's; the model lacks a hook point. Nothing is added.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import torch
            >>> from safetensors.torch import save_file
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> folder = Path(tempfile.mkdtemp())
            >>> names = "feature_input_hook: hook_resid_mid\\nfeature_output_hook: hook_mlp_out"
            >>> text = f"model_kind: transcoder_set\\n{names}"
            >>> _ = (folder / "config.yaml").write_text(text)
            >>> for layer in range(4):
            ...     tensors = {"W_enc": torch.randn(9, 128), "b_enc": torch.zeros(9)}
            ...     tensors |= {"W_dec": torch.randn(9, 128), "b_dec": torch.zeros(128)}
            ...     save_file(tensors, folder / f"layer_{layer}.safetensors")
            >>> bridge.add_transcoders(folder)[1]
            HookPoint(blocks.1.hook_mlp_out.transcoder: [batch pos feature])
        """
        check_choice("error", error, ("keep", "drop"))
        source = read_folder(folder)
        source.check(self.cfg)
        n_layers = self.cfg.n_layers
        reads = [self._hook(f"blocks.{i}.{source.reads}") for i in range(n_layers)]
        writes = [self._hook(f"blocks.{i}.{source.writes}") for i in range(n_layers)]
        points: list[HookPoint] = []
        with ExitStack() as undoing:
            for i, layer in enumerate(source.layers):
                layer.basis.to(self.cfg.device, self.cfg.dtype)
                points.append(
                    self.add_basis(
                        writes[i],
                        name,
                        layer.basis,
                        reads=reads[i],
                        skip=layer.skip,
                        error=error,
                        later=writes[i + 1 :] if source.across else (),
                    )
                )
                undoing.callback(self.remove_basis, points[-1])
            undoing.pop_all()
        return points

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
        """Add a basis as `add_basis` does, inside a ``with`` statement; `error` applies only to
        runs inside it.

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
        pair = one_of(basis, encode, decode)
        places = self._places_of(point, reads, later)
        request = BasisRequest(name, pair, *places, skip, error)
        hook = self._new_point(request)
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
        self,
        point: str | HookPoint,
        reads: str | HookPoint | Sequence[str | HookPoint] | None,
        later: Sequence[str | HookPoint],
    ) -> tuple[HookPoint, tuple[HookPoint, ...], tuple[HookPoint, ...]]:
        """Return the hook points of a basis: its own point, those it reads, and the later ones it
        writes to."""
        if reads is None:
            reads = ()
        elif isinstance(reads, str | HookPoint):
            reads = (reads,)
        return self._hook(point), tuple(map(self._hook, reads)), tuple(map(self._hook, later))

    def remove_basis(self, point: str | HookPoint) -> None:
        """Remove a hook point that `add_basis` added, with its hooks and the bases on it.

        Args:
            point: the hook point, or its name.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: it belongs to the model itself, or to another basis point (as a later point
                of a cross-layer transcoder).

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Neurons
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = bridge.add_basis("blocks.0.mlp.hook_post", "some", Neurons(512, [3, 5]))
            >>> bridge.remove_basis(point)
        """
        hook, _ = self._basis_at(point)
        if takes_over(hook):
            raise ValueError(
                f"{hook.name} takes over features of an earlier layer: remove_basis the one of that"
                " layer"
            )
        for follower in hook.point.linked:
            self.wiring.remove_point(self.hook_dict[follower.name])
        for other in self.bases:
            if other is hook or other.name.startswith(f"{hook.name}."):
                self.wiring.remove_point(other)
        self._names_changed()

    def basis_error(self, cache: Any, point: str | HookPoint) -> Tensor:
        """Return the reconstruction error of a basis in a run: the activation minus the decoded
        features (and minus a transcoder's skip path).

        Args:
            cache: the cache of a run. It must contain the basis's own point and the point that it
                is based on; with a skip path, also the point that it reads; and the points at which
                earlier layers of a cross-layer transcoder write here.
            point: the hook point in the basis, or its name.

        Returns:
            ``[batch, pos, d]``.

        Raises:
            KeyError: the cache lacks one of them.
            ValueError: the point is not in a basis, or the basis was changed since the run.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.bases import Rotation
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = bridge.add_basis("blocks.1.hook_mlp_out", "turned", Rotation(128))
            >>> names = ["blocks.1.hook_mlp_out", point.name]
            >>> _, cache = bridge.run_with_cache("Mary and", names_filter=names)
            >>> bool(bridge.basis_error(cache, point).abs().max() < 1e-4)
            True
        """
        hook, view = self._basis_at(point)
        needs_input = view.skip is not None or view.stateful
        read = view.read_in(cache) if view.reads and needs_input else None
        base, _, name = hook.name.rpartition(".")
        rest = view.unexplained(cache[base], cache[hook.name], read)
        layers = [other for other in self.bases if other.name.endswith(f".{name}")]
        writes = written_later(base, layers, self.hook_dict)
        if isinstance(cache, ActivationCache):
            for basis in (hook, *[layer for layer, _ in writes]):
                cache.check_basis(basis.name)
        for layer, later_view in writes:
            rest = later_view.unexplained(rest, cache[layer.name])
        return rest

    @contextmanager
    def rules(self, rules: str | Rules | None = None, **changes: Any) -> Iterator[Self]:
        """Apply gradient rules to all runs that start inside a ``with`` statement. Every value of
        their forward pass is the same, and gradients are those of the rules, also if they are
        taken later. Scope: as for `hooks`.

        Args:
            rules: ``"gim"``, ``"relp"``, ``"attnlrp"`` (see `Rules`), or a `Rules`; None:
                only `changes`.
            changes: fields of `Rules` that differ from it: ``norms="held"``, ``softmax=2.0``.

        Yields:
            The bridge.

        Raises:
            ValueError: the model lacks a hook point that a rule needs, or rules are open already.
            TypeError: an unknown field.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.rules(norms="held", softmax=2.0, q=0.25, k=0.25, v=0.5):
            ...     loss = bridge("Mary and John", return_type="loss")
            >>> torch.equal(loss, bridge("Mary and John", return_type="loss"))
            True
        """
        with ruled(self, replace(declared_rules(rules), **changes)):
            yield self

    @contextmanager
    def linearised(
        self,
        input: Input,
        freeze: Sequence[str] = ("pattern", "ln_scale"),
        **forward_kwargs: Any,
    ) -> Iterator[ActivationCache | dict[str, Tensor]]:
        """Freeze attention patterns and norm factors at their values in one run, for all runs in a
        ``with`` statement.

        Between MLPs, the model is then linear in its residual stream, so that everything after a
        point decomposes exactly into the terms of the stream there. Gradients do not flow through
        the frozen activations: in that run itself, they are those of ``rules(norms="held",
        softmax="held")``, which changes no value.

        Args:
            input: the input of the run whose values are frozen. Other runs must have the same
                number of positions, and the same number of rows unless this run has a single row.
            freeze: the frozen activations: ``"pattern"``, every attention pattern; ``"ln_scale"``,
                every norm's factor; ``"mlp_out"``, the outputs of MLPs; or names of hook points.
            forward_kwargs: as for `forward`.

        Returns:
            The frozen activations, by name.

        Raises:
            UnknownHookError: a name that no hook point has.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> from bridge.interventions import Scale
            >>> tokens = bridge.to_tokens("Mary and John")
            >>> before = bridge(tokens)
            >>> with bridge.linearised(tokens, freeze=("pattern", "ln_scale", "mlp_out")):
            ...     once, twice, thrice = (
            ...         bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", Scale(factor))])
            ...         for factor in (1.0, 2.0, 3.0)
            ...     )
            >>> bool((once - before).abs().max() < 1e-3)
            True
            >>> bool((thrice - 2 * twice + once).abs().max() < 1e-2)
            True
        """
        points: list[HookPoint] = []
        for name in freeze:
            if name in _ENDINGS:
                ending = _ENDINGS[name]
                points += [x for full, x in self.hook_dict.items() if full.endswith(ending)]
            else:
                points += self.select_hooks(name)
        cache: ActivationCache | dict[str, Tensor] = {}
        if points:
            names = [hook.name for hook in points]
            with torch.no_grad():
                _, cache = self.run_with_cache(input, names_filter=names, **forward_kwargs)
        with self.hooks(fwd_hooks=[(hook, _held(cache[hook.name])) for hook in points]):
            yield cache

    def at(
        self,
        path: str,
        border: Border = "output",
        key: int | str | None = None,
        *,
        axes: str | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> HookPoint:
        """Return a hook point at any module of the model, by the module's path.

        It shows the input or output as the module has it, and can be used like any other hook
        point: in filters, hooks, caches, traces, operations, patching and programs. Its meaning is
        not verified, and an unfiltered cache excludes it. It costs nothing without listeners. A
        second call returns the same hook point; a copy of the bridge does not have it. The call
        runs the model once, on three rows of eleven tokens, to find the point's place in the order
        of the computation, and which axes are rows and positions.

        Args:
            path: a path in `original_model.named_modules()`, such as ``model.layers.1.mlp.act_fn``.
                If the module runs several times in a pass, add the number of the call: ``PATH@0``.
            border: ``"output"`` or ``"input"``.
            key: for an input, the name of the argument (None: the first tensor); for an output,
                the index in a tuple (None: the output itself, or the first element).
            axes: the names of the tensor's axes, such as ``"batch pos d"``; operations find rows
                and positions by ``batch`` and ``pos``. None: found by their sizes in that run; rows
                ``(batch pos) d`` are then shown as ``batch pos d``.
            inputs: images or sound for the run, if the model needs some and they cannot be
                generated.

        Returns:
            The hook point, with the name ``PATH.hook_out`` or ``PATH.hook_in``, and the key after
            it.

        Raises:
            ValueError: there is no such module; it does not run, runs several times, or has no such
                tensor; `axes` does not fit its shape; the model is spread over processes.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> point = bridge.at("model.layers.1.mlp.act_fn")
            >>> point
            HookPoint(model.layers.1.mlp.act_fn.hook_out: [batch pos d])
            >>> _, cache = bridge.run_with_cache("Mary and John", names_filter=point)
            >>> cache[point].shape
            torch.Size([1, 4, 344])
        """
        check_choice("border", border, ("output", "input"))
        (hook,) = self._at(path, (border,), key, axes, inputs)
        return hook

    def _at(
        self,
        path: str,
        borders: Sequence[Border],
        key: int | str | None = None,
        axes: str | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> list[HookPoint]:
        """Return the hook points at several borders of a module, from at most one run."""
        names = {name_at(path, border, key): border for border in borders}
        missing = [name for name in names if name not in self.hook_dict]
        if missing:
            recording = recorded(self.wiring, path, inputs)
            for name in missing:
                place = place_of(self.wiring, recording, path, names[name], key, axes)
                hook = self.makes_points(place.point, 0, self.wiring)
                self.wiring.insert(hook, place.behind)
                self._names_changed()
        return [self._hook(name) for name in names]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the model, and the bases added to it.

        Raises:
            ValueError: a basis consists of functions, whose tensors cannot be moved.
        """
        for hook in self.bases:
            assert isinstance(hook.view, InBasis)
            if not modules_of(hook.view.basis):
                raise ValueError(
                    f"{hook.name} is made of functions, whose tensors nobody can move: remove_basis"
                    " it first"
                )
        for hook in self.bases:
            assert isinstance(hook.view, InBasis)
            view = hook.view
            for module in modules_of(view.basis):
                module.to(*args, **kwargs)
            if isinstance(view.error, Tensor):
                view.error = view.error.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def _new_point(self, request: BasisRequest) -> HookPoint:
        declared = request.points(self.cfg, self.original_model)
        for point in declared:
            if point.name in self.hook_dict:
                raise ValueError(
                    f"{point.name} is there already: give the basis another name, or"
                    " remove_basis it"
                )
        hooks = []
        for base, point in zip((request.point, *request.later), declared, strict=True):
            hooks.append(self.makes_points(point, base.order, self.wiring))
            self.wiring.insert(hooks[-1], base)
        self._names_changed()
        return hooks[0]

    def _hook(self, point: str | HookPoint) -> HookPoint:
        return self.select_hooks(point)[0]

    def _basis_at(self, point: str | HookPoint) -> tuple[HookPoint, InBasis]:
        hook = self._hook(point)
        if isinstance(hook.view, InBasis):
            return hook, hook.view
        raise ValueError(f"{hook.name} is the model's own hook point, and no basis")

    def _names_changed(self) -> None:
        self.names.refresh()
        self._tree.refresh()
        self.__dict__.pop("_places", None)


def as_they_are(features: Tensor, hook: HookPoint) -> Tensor:
    """Return the features unchanged, so that the run continues with the basis's reconstruction."""
    return features


#: What `linearised` can hold, and how the names of its hook points end.
_ENDINGS = {"pattern": ".hook_pattern", "ln_scale": ".hook_scale", "mlp_out": ".hook_mlp_out"}


def _held(value: Tensor) -> Callable[..., Tensor]:
    """Return a hook function that replaces an activation by a value; a value with one row replaces
    every row.
    """

    def hold(activation: Tensor, hook: HookPoint) -> Tensor:
        single = value.shape[0] == 1 and value.shape[1:] == activation.shape[1:]
        return value.expand_as(activation) if single else value

    return hold
