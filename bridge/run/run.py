"""The forward pass: from the user's arguments to the call of the Hugging Face model, and back.

Input: a `Request`, with a text, tokens, embeddings or a residual stream, a mask, the layers to run,
and further arguments of the model's own forward. Output: what `return_type` names, which is the
model's own logits, a loss, both, a text, or the residual stream at the layer where the run stops.
The model itself is called as `hf_model(**arguments)`, with its own kernels; nothing here repeats
its computation.

1. *Check.* Invalid requests raise an error before anything runs: unknown arguments, layers out of
   range, a loss without tokens (`run_model`).
2. *Begin the pass* (`PreparedPass.__enter__`): the context in which hooks are called; the skipped
   blocks, and the inserted stream (`bridge.run.layer_range`); tokens and masks as the model's
   arguments (`bridge.run.inputs`).
3. *Call the model* (`PreparedPass.run_model`): unchanged without listeners, otherwise with compiled
   code disabled. A run that stops early does so by an internal exception.
4. *End the pass*, also after an error: it keeps no tensor.
5. *Return the result* (`_result`).

A cache is a listener that was attached before (`bridge.run.recorder`), and so are hooks of a
``with`` statement (`hooked`). Traces and the shapes of activations use `PreparedPass` itself. A
generation is the model's own, with passes of the same kind.

This file does not depend on how hook points are served, on views, or on model families.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adapters.config import config_of
from adapters.imports import is_checkpointed
from adapters.inputs import (
    gives_blocks_tokens,
    gives_cache,
    looks_for_padding,
    may_take,
    past_of,
    takes,
    takes_besides,
)
from adapters.points import learns_prompt, token_embedding
from adapters.spread import refuse_context_parallel
from adapters.tuners import acts_by_tokens, no_hooks_of_rows_left, tells_layers_of_rows
from bridge.hooks.context import (
    CURRENT,
    ForwardPass,
    HookFunction,
    Kind,
    Listener,
    RunContext,
    Scope,
    forward_pass,
)
from bridge.hooks.hooks import HookPoint, checked_function
from bridge.hooks.names import NamesFilter, named_one_by_one
from bridge.hooks.recomputation import recomputation_frame
from bridge.modules import Finder
from bridge.rows import last_tokens
from bridge.run import layer_range
from bridge.run.inputs import (
    HookSpec,
    Input,
    Inputs,
    Request,
    RunnableBridge,
    check_arguments,
    prepare,
)
from bridge.run.rotary import changing_rotaries, own_factors
from bridge.run.tokenization import check_residual, check_whole_logits
from bridge.wiring.compiled import call_eagerly
from bridge.wiring.repeated import entering_run

RETURN_TYPES = ("logits", "loss", "both", "predictions", "logits_and_cache", None)


_OURS = (
    "return_type",
    "loss_per_token",
    "prepend_bos",
    "padding_side",
    "attention_mask",
    "start_at_layer",
    "stop_at_layer",
    "names_filter",
    "incl_bwd",
    "pos_slice",
    "device",
    "remove_batch_dim",
    "return_cache_object",
    "fwd_hooks",
    "bwd_hooks",
    "reset_hooks_end",
    "clear_contexts",
)


#: Arguments that say where images are in a row, or how positions are counted around them.
ALONG_IMAGES = ("token_type_ids", "mm_token_type_ids", "position_ids")


def run_model(
    bridge: RunnableBridge, request: Request, return_type: str | None, loss_per_token: bool
) -> Any:
    """Run one forward pass; see `TransformerBridge.forward`."""
    model_kwargs = request.model_kwargs
    check_arguments(bridge, request, _OURS)
    if return_type not in RETURN_TYPES:
        raise ValueError(
            f"return_type is {return_type!r}; it must be one of"
            f" {', '.join(map(repr, RETURN_TYPES))}"
        )
    if return_type == "logits_and_cache":
        if not gives_cache(bridge.core):
            raise ValueError(
                f"{type(bridge.core).__name__} returns no past_key_values, so there is no"
                " 'logits_and_cache'; return_type='logits' gives its logits"
            )
        model_kwargs.setdefault("use_cache", True)
    start, stop = checked_layers(bridge, request.start_at_layer, request.stop_at_layer)
    if stop is None and return_type in ("loss", "both", "predictions"):
        check_whole_logits(return_type, model_kwargs)
        _check_result(
            bridge, return_type, loss_per_token, start is not None, request.input, model_kwargs
        )
    with PreparedPass(bridge, request, start, stop) as pass_:
        if stop is None and return_type in ("loss", "both") and "labels" not in model_kwargs:
            _check_loss(bridge, pass_.inputs)
        output = pass_.run_model()
    if stop is not None:
        return output
    return _result(bridge, output, pass_.inputs, return_type, loss_per_token)


def checked_layers(
    bridge: RunnableBridge, start_at_layer: int | None, stop_at_layer: int | None
) -> tuple[int | None, int | None]:
    """Return the non-negative indices of the layers at which a run starts and stops.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is out of range, or the model does not support it.
    """
    if start_at_layer is None and stop_at_layer is None:
        return None, None
    start, stop = layer_range.check_layers(start_at_layer, stop_at_layer, bridge.cfg.n_layers)
    # In a module that is all blocks, either all calls can be skipped, or none.
    no_block = (
        start == bridge.cfg.n_layers
        and stop is None
        and any("@" in path for path in bridge.block_paths)
    )
    if bridge.no_layer_runs and not no_block:
        raise ValueError(
            f"{bridge.cfg.model_name} cannot start or stop at a layer: {bridge.no_layer_runs}"
        )
    check_hooks_run(bridge, start, stop)
    return start, stop


class PreparedPass:
    """A context manager for one forward pass, around the call of the model. (A generator would take
    longer.)

    Args:
        bridge, request: as for `run_model`.
        start, stop: the result of `checked_layers`.
        traced: whether listeners may be added while the model runs.
        scope: a scope that only this pass sees.

    Attributes:
        bridge, stop: the arguments.
        run: its memory, once entered.
        inputs: the model's arguments, once entered.
    """

    run: ForwardPass
    inputs: Inputs

    def __init__(
        self,
        bridge: RunnableBridge,
        request: Request,
        start: int | None,
        stop: int | None,
        traced: bool = False,
        scope: Scope | None = None,
    ) -> None:
        self.bridge = bridge
        self.stop = stop
        self._request = request
        self._start = start
        self._traced = traced
        self._scope = scope
        self._around: ExitStack | None = None
        self._pass: forward_pass | None = None

    def __enter__(self) -> PreparedPass:
        self._repeated = entering_run(self.bridge.wiring)
        if self._repeated is not None:
            self._repeated.__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Open the pass, and prepare the model's arguments."""
        bridge, start, request = self.bridge, self._start, self._request
        listening = self._listening = self._traced or bridge.wiring.listening
        if listening:
            bridge.wiring.check_in_place()
        refuse_context_parallel()
        check_alike = None
        if (sharing := bridge.wiring.sharing) is not None:
            check_alike = sharing.asked_alike(
                [request.input, request.attention_mask, request.model_kwargs, start, self.stop]
            )
        opened = forward_pass(scope=self._scope)
        run = self.run = opened.run
        opened.__enter__()
        self._pass = opened
        if listening and bridge.wiring.calls.modules:
            self._until_the_end().enter_context(bridge.wiring.calls.counted())
        if start is not None:
            request = self._from_layer(request, start)
        self.inputs = prepare(bridge, request)
        run.take_arguments(bridge.core, self.inputs.kwargs)  # hooks of another bridge may ask
        masks = {} if run.rows is None else run.rows.masks
        if masks and changing_rotaries(bridge.core) and run.is_padded:
            rows = own_factors(bridge.core, masks.get("pos"))
            self._until_the_end().enter_context(rows)
        model = bridge.wiring.model
        if tells_layers_of_rows(model, self.inputs.kwargs):
            self._until_the_end().enter_context(no_hooks_of_rows_left(model))
        if check_alike is not None:
            check_alike()

    def _from_layer(self, request: Request, start: int) -> Request:
        """Return the request of a run that starts at a layer, with a stand-in for its tokens."""
        bridge = self.bridge
        check_inputs_of_blocks(bridge, request, start, self.stop)
        started = _starting(bridge, self.run, request, start)
        stand_in = self._until_the_end().enter_context(started)
        of_stream = {name: x for name, x in request.model_kwargs.items() if name != "input_ids"}
        request = replace(request, input=stand_in, model_kwargs=of_stream)
        # Whisper's decoder omits it if False.
        if may_take(bridge.core, "use_cache") and past_of(request.model_kwargs) is None:
            request = _without_cache(bridge.core, request)
        return request

    def __exit__(self, *error: object) -> None:
        around, self._around = self._around, None
        try:
            if around is not None:
                around.close()
        finally:
            if self._pass is not None:
                self._pass.__exit__(None, None, None)
            if self._repeated is not None:
                self._repeated.__exit__(None, None, None)

    def _until_the_end(self) -> ExitStack:
        if self._around is None:
            self._around = ExitStack()
        return self._around

    def run_model(self) -> Any:
        """Call the model; return its output, or, with `stop`, the residual stream at that layer."""
        if self.stop is not None:
            return _stopped(self.bridge, self.run, self.inputs, self.stop)
        model = self.bridge.wiring.model
        if self._listening or self._start is not None:
            return call_eagerly(model, recomputation_frame, (model, (), self.inputs.kwargs), {})
        return model(**self.inputs.kwargs)


def _without_cache(core: nn.Module, request: Request) -> Request:
    """Disable the key-value cache of a run that starts at a layer, so that its keys are complete.

    Only without a cache does transformers check whether a row contains several documents, at which
    positions restart.
    """
    config, mask, kwargs = config_of(core), request.attention_mask, request.model_kwargs
    caches = getattr(config, "use_cache", False) and not (core.training and is_checkpointed(core))
    packs = "position_ids" in kwargs and "use_cache" not in kwargs
    if packs and caches and mask is None:
        input = request.input
        assert isinstance(input, Tensor)
        mask = torch.ones(input.shape[:2], dtype=torch.long, device=input.device)
    return replace(request, attention_mask=mask, model_kwargs={"use_cache": False, **kwargs})


def _check_result(
    bridge: RunnableBridge,
    return_type: str | None,
    loss_per_token: bool,
    residual: bool,
    input: Input | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Reject a requested result that the run cannot return, before it starts."""
    if "labels" in model_kwargs:
        if loss_per_token and return_type != "predictions":
            raise ValueError(
                "loss_per_token and labels cannot be combined: with labels the model computes the"
                " loss itself, and gives its mean; leave labels out, or take the logits"
            )
        return
    if "unembed.hook_out" not in bridge.wiring.points:
        raise ValueError(
            f"{type(bridge.core).__name__} has no unembedding and predicts no tokens, so there is"
            f" no {return_type!r}"
        )
    if return_type == "predictions":
        return
    embeddings = (
        isinstance(input, Tensor) and input.is_floating_point() and takes(bridge.core).main is None
    )
    if residual or embeddings:
        raise ValueError(
            "a loss needs tokens: embeddings or a residual stream do not say what comes next"
        )
    if bridge.cfg.attention_dir == "bidirectional" and not bridge.core.config.is_encoder_decoder:
        raise ValueError(
            "a model that reads in both directions has no next-token loss; pass labels"
        )


def _check_loss(bridge: RunnableBridge, inputs: Inputs) -> None:
    """Reject a loss over nothing, or over padding, before the model runs."""
    assert inputs.tokens is not None
    check_counted(inputs.tokens, inputs.mask)
    config = bridge.core.config
    if not config.is_encoder_decoder or inputs.mask is not None:
        return
    pad = config.pad_token_id
    if pad is not None and pad != config.eos_token_id and bool((inputs.tokens[:, 1:] == pad).any()):
        raise ValueError(
            f"decoder_input_ids hold the padding token {pad}, and nothing says whether it counts:"
            " pass decoder_attention_mask, with 0 for padding"
        )


def check_inputs_of_blocks(
    bridge: RunnableBridge, request: Request, start: int, stop: int | None
) -> None:
    """Check that a run that starts at a layer has the other inputs that the blocks need.

    Args:
        bridge, request: as for `run_model`.
        start, stop: the layers, counted from the front.

    Raises:
        ValueError: inputs are missing, or a block reads the keys and values of a block that does
            not run.
    """
    name, n_layers = type(bridge.core).__name__, bridge.cfg.n_layers
    kwargs = request.model_kwargs
    for index in range(start, n_layers if stop is None else stop):
        for part in bridge.architecture.stack.block_at(index).attentions:
            if part.keys_of is not None and part.keys_of < start:
                raise ValueError(
                    f"block {index} reads the keys and values of block {part.keys_of}, which does"
                    f" not run with start_at_layer={start}"
                )
    if start == n_layers:
        return
    if directed := acts_by_tokens(bridge.original_model):
        raise ValueError(
            f"start_at_layer is not available with {directed}, which PEFT directs by the tokens of"
            " the whole call: run from the tokens, with hooks where the stream is to be another"
        )
    if kwargs.get("input_ids") is not None:
        return
    if gives_blocks_tokens(bridge.core):
        raise ValueError(
            f"the blocks of {name} read the tokens, too (per-layer inputs): pass what the stream is"
            " of, bridge(stream, start_at_layer=..., input_ids=tokens)"
        )
    besides = takes_besides(bridge.core)
    if besides is not None and kwargs.keys().isdisjoint((besides, *ALONG_IMAGES)):
        raise ValueError(
            f"{name} takes images or sound, which may change what tokens attend to, and a stream"
            " does not say whether it is of any: pass input_ids= and what else the run was given,"
            f" or {besides}=None where that was text alone"
        )


@contextmanager
def _starting(
    bridge: RunnableBridge, run: ForwardPass, request: Request, start: int
) -> Iterator[Tensor]:
    """Start a run at a layer; return the model's embeddings, or the stream's tokens."""
    input, tokens = request.input, request.model_kwargs.get("input_ids")
    check_residual(bridge.core, input, bridge.cfg.d_model)
    assert isinstance(input, Tensor)
    if tokens is not None and tokens.shape != input.shape[:2]:
        raise ValueError(
            f"input_ids are {list(tokens.shape)}, and the residual stream is of [batch, pos] ="
            f" {list(input.shape[:2])}"
        )
    if learns_prompt(bridge.original_model):
        raise ValueError(
            "start_at_layer is not available with a learned prompt (PEFT), which is put before the"
            " embeddings"
        )
    blocks = [Finder(bridge.original_model, path).module for path in bridge.block_paths]
    run.start_at = start
    with layer_range.starting(run, blocks, start, input, *bridge.block_output):
        yield _stand_in(bridge.core, input) if tokens is None else tokens


def _stand_in(core: nn.Module, residual: Tensor) -> Tensor:
    """Return stand-in tokens or embeddings for the model's call; their values do not matter."""
    shape, device = residual.shape[:-1], residual.device
    if gives_blocks_tokens(core) or looks_for_padding(core) or takes_besides(core):
        # A word token: not padding, and not an image placeholder, whose positions models keep for
        # later runs.
        return torch.full(shape, _word(core), dtype=torch.long, device=device)
    if may_take(core, "inputs_embeds"):
        return layer_range.placeholder(residual, token_embedding(core))
    return torch.zeros(shape, dtype=torch.long, device=device)


def _word(core: nn.Module) -> int:
    """Return the first token without a special meaning in the configuration."""
    configs = (config_of(core), config_of(core).get_text_config())
    meant = {
        x
        for config in configs
        for name, x in vars(config).items()
        if "token" in name and isinstance(x, int)
    }
    return next(token for token in itertools.count() if token not in meant)


def _stopped(bridge: RunnableBridge, run: ForwardPass, inputs: Inputs, stop: int) -> Tensor:
    last = stop == bridge.cfg.n_layers
    block = Finder(bridge.original_model, bridge.block_paths[stop - last]).module
    with layer_range.stopping(run, block, last, bridge.block_output[0]) as residuals:
        model = bridge.original_model
        call_eagerly(model, recomputation_frame, (model, (), inputs.kwargs), {})
    return residuals[0]


def _result(
    bridge: RunnableBridge,
    output: Any,
    inputs: Inputs,
    return_type: str | None,
    loss_per_token: bool,
) -> Any:
    if return_type is None:
        return None
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    if return_type == "logits":
        return logits
    if return_type == "logits_and_cache":
        return logits, past_of(output)
    if return_type == "predictions":
        return _predictions(bridge, logits, inputs)
    if "labels" in inputs.kwargs:
        loss = output.loss
    else:
        assert inputs.tokens is not None
        of_tokens = logits[:, -inputs.tokens.shape[1] :]
        loss = lm_loss(of_tokens, inputs.tokens, inputs.mask, loss_per_token)
    return loss if return_type == "loss" else (logits, loss)


def _predictions(bridge: RunnableBridge, logits: Tensor, inputs: Inputs) -> str | list[str]:
    if inputs.tokens is not None:
        # A learned prompt (PEFT) comes before the tokens.
        logits = logits[:, -inputs.tokens.shape[1] :]
    if inputs.mask is None:
        last = torch.full((logits.shape[0],), logits.shape[1] - 1, device=logits.device)
    else:
        last = last_tokens(inputs.mask)
    best = logits[torch.arange(len(last), device=logits.device), last].argmax(-1)
    texts = [bridge.to_single_str_token(token) for token in best.tolist()]
    return texts[0] if len(texts) == 1 else texts


# --------------------------------------------------------------------------------------------------
# Runs with hooks: the selected hook points, and hooks for the duration of a ``with`` statement.
# --------------------------------------------------------------------------------------------------


def runs_some_layers(forward_kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a run starts or stops at a layer."""
    return any(forward_kwargs.get(name) is not None for name in ("start_at_layer", "stop_at_layer"))


def points_that_run(
    bridge: RunnableBridge, points: Sequence[HookPoint], forward_kwargs: Mapping[str, Any]
) -> list[HookPoint]:
    """Return the hook points in the layers that run."""
    if not runs_some_layers(forward_kwargs):
        return list(points)
    start, stop = layer_range.check_layers(
        forward_kwargs.get("start_at_layer"),
        forward_kwargs.get("stop_at_layer"),
        bridge.cfg.n_layers,
    )
    depths = _depths(bridge, start, stop)
    return [hook for hook in points if hook.point.depth in depths]


def _depths(bridge: RunnableBridge, start: int | None, stop: int | None) -> range:
    """Return the range of depths of the hook points that run."""
    return range(-1 if start is None else start, bridge.cfg.n_layers + 1 if stop is None else stop)


def points_of_run(
    bridge: RunnableBridge, names: NamesFilter | HookPoint, forward_kwargs: Mapping[str, Any]
) -> list[HookPoint]:
    """Return the selected hook points that run; points listed by name must be among them.

    Raises:
        ValueError: a point listed by name does not run, or no point does.
    """
    points = bridge.select_hooks(names)
    running = points_that_run(bridge, points, forward_kwargs)
    if len(running) == len(points):
        return points
    layers = ", ".join(
        f"{name}={forward_kwargs.get(name)}" for name in ("start_at_layer", "stop_at_layer")
    )
    if named_one_by_one(names):
        outside = next(hook for hook in points if hook not in running)
        raise ValueError(f"{outside.name} does not run with {layers}")
    if not running:
        raise ValueError(f"none of the chosen hook points runs with {layers}")
    return running


@contextmanager
def hooked(
    bridge: RunnableBridge,
    fwd_hooks: Sequence[HookSpec],
    bwd_hooks: Sequence[HookSpec],
    reset_hooks_end: bool,
    clear_contexts: bool,
    must_run: bool = False,
) -> Iterator[None]:
    """Add hooks for the runs inside a ``with`` statement; see `TransformerBridge.hooks`.

    Args:
        bridge, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: as for `hooks`.
        must_run: whether every hook point that is named must have run when the statement ends.

    Raises:
        RuntimeError: a named hook point did not run.
    """
    chosen: list[tuple[HookPoint, HookFunction, Kind, bool]] = []
    both: tuple[tuple[Kind, Sequence[HookSpec]], ...] = (("fwd", fwd_hooks), ("bwd", bwd_hooks))
    for kind, specs in both:
        check_specs(f"{kind}_hooks", specs)
        for names, fn in specs:
            named = named_one_by_one(names)
            chosen += [
                (hook, checked_function(hook, fn), kind, named)
                for hook in bridge.select_hooks(names)
            ]
    try:
        if reset_hooks_end:
            scope = Scope()
            members = [
                (hook, Listener(kind, fn, scope, named=named)) for hook, fn, kind, named in chosen
            ]
            with bridge.wiring.scoped(members, scope):
                yield
            if must_run and bridge.refuses_silent_hooks and not bridge.core.training:
                _check_called(members)
        else:
            level = bridge.kept_level
            add_hooks(
                bridge, [(hook, Listener(kind, fn, level=level)) for hook, fn, kind, _ in chosen]
            )
            yield
    finally:
        if clear_contexts:
            clear_all_contexts(bridge)


def _check_called(members: Sequence[tuple[HookPoint, Listener]]) -> None:
    """Check that each hook on a named point was called.

    Experts to which no token was sent are excluded: their points have rows, and no batch.

    Raises:
        RuntimeError: one was not: the model did not call its module.
    """
    missing = [
        hook.name
        for hook, listener in members
        if listener.named and listener.kind == "fwd" and not listener.called
        if "batch" in hook.point.axes.split()
    ]
    if missing:
        raise RuntimeError(
            f"these hook points did not run on this input, so their hooks had no effect:"
            f" {', '.join(missing)}"
        )


def check_hooks_run(bridge: RunnableBridge, start: int | None, stop: int | None) -> None:
    """Reject a run of some layers in which a hook of a ``with`` statement, set by name, would never
    be called.

    Args:
        bridge: the bridge.
        start, stop: the layers, counted from the front.

    Raises:
        ValueError: there is such a hook. (Hooks added by `add_hook` raise no error: they are just
            not called in runs without their layer.)
    """
    runs = _depths(bridge, start, stop).__contains__
    refuse_unreached_points(bridge, runs, f"start_at_layer={start}, stop_at_layer={stop}")


def refuse_unreached_points(
    bridge: RunnableBridge, runs: Callable[[int], bool], how: str, context: RunContext | None = None
) -> None:
    """Reject a run that skips points at which hooks were set by name.

    Args:
        bridge: the bridge.
        runs: whether the points at a depth run.
        how: the reason for skipping them, for the error.
        context: the run's context; None: the current one.

    Raises:
        ValueError: there is such a hook.
    """
    context = CURRENT.get() if context is None else context
    opened = context.shared - context.inherited - {None}
    if not (opened and bridge.refuses_silent_hooks):
        return
    for hook in bridge.wiring.points.values():
        if not hook.listeners or runs(hook.point.depth):
            continue
        if any(listener.named and listener.scope in opened for listener in hook.listeners):
            raise ValueError(
                f"{hook.name} has a hook of a `with` statement, and does not run with {how}: the"
                " hook would never be called. Open it around other runs, or choose its points with"
                " a function"
            )


def check_specs(argument: str, specs: Sequence[HookSpec]) -> None:
    """Reject a value that is not a list of hook points and functions.

    Raises:
        TypeError: it is not such a list.
    """
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise TypeError(
            f"{argument} is {specs!r}; it must be a list of pairs (hook point, function)"
        )
    for index, spec in enumerate(specs):
        if not isinstance(spec, list | tuple) or len(spec) != 2:
            raise TypeError(
                f"{argument}[{index}] is {spec!r}; it must be a pair (hook point, function)"
            )
        if isinstance(spec[1], str | HookPoint):
            raise TypeError(
                f"{argument}[{index}] is {spec!r}: the hook point comes first, then the function"
            )


def add_hooks(bridge: RunnableBridge, members: Sequence[tuple[HookPoint, Listener]]) -> None:
    """Add permanent hooks: all of them, or none if one raises an error."""
    added: list[tuple[HookPoint, Listener]] = []
    try:
        for hook, listener in members:
            bridge.wiring.add(hook, listener)
            added.append((hook, listener))
    except ValueError:
        for hook, listener in added:
            bridge.wiring.remove(hook, (listener,))
        raise


def clear_all_contexts(bridge: RunnableBridge) -> None:
    """Clear the `ctx` of every hook point."""
    for hook in bridge.wiring.points.values():
        hook.clear_context()


# --------------------------------------------------------------------------------------------------
# The language-modelling loss of logits.
# --------------------------------------------------------------------------------------------------


def lm_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    per_token: bool = False,
) -> Float[Tensor, ""] | Float[Tensor, "batch pos-1"]:
    """Compute the mean cross-entropy of the next-token predictions, in float32 as transformers
    does.

    Args:
        logits: the logits at every position.
        tokens: the tokens that were run.
        attention_mask: 1 for tokens and 0 for padding. If a token or its successor is padding, its
            loss is 0 and excluded from the mean.
        per_token: return one value for each of the ``pos - 1`` predictions instead of their mean.

    Raises:
        ValueError: there is only one token, or no two adjacent tokens without padding; or the mask
            has a different shape.

    Returns:
        The mean in nats, or ``[batch, pos-1]``.

    Example:
        >>> import torch
        >>> from bridge.run.run import lm_loss
        >>> lm_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).exp()
        tensor(4.)
    """
    check_counted(tokens, attention_mask)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = cross_entropy(
        wide[:, :-1].transpose(1, 2), tokens[:, 1:].to(logits.device), reduction="none"
    )
    if attention_mask is not None:
        counted = (attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()).to(losses.device)
        losses = losses.masked_fill(~counted, 0.0)  # multiplying by 0 would keep NaN
        return losses if per_token else losses.sum() / counted.sum()
    return losses if per_token else losses.mean()


def check_counted(
    tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"] | None = None
) -> None:
    """Reject tokens without a prediction, whose mean loss is undefined.

    Args:
        tokens: as for `lm_loss`.
        mask: its attention mask.

    Raises:
        ValueError: there is only one token, or no two adjacent tokens without padding; or the mask
            has a different shape.
    """
    if tokens.shape[1] < 2:
        raise ValueError(
            "the loss of a next token needs two tokens at least, and the input has one"
        )
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            f"the attention_mask has shape {[*mask.shape]}, and the tokens {[*tokens.shape]}"
        )
    if mask is not None and not bool((mask[:, :-1].bool() & mask[:, 1:].bool()).any()):
        raise ValueError(
            "the attention mask leaves no two adjacent tokens, so there is no loss to take"
        )
