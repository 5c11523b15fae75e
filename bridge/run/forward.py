"""One forward pass: from what a user gives and wants to the call of the Hugging Face model and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adapters.inputs.arguments import gives_cache, may_take, takes
from adapters.paths import learns_prompt, token_embedding
from bridge.hooks.context import ForwardPass, forward_pass
from bridge.hooks.listener import Scope
from bridge.hooks.modules import Finder
from bridge.hooks.recomputation import recomputation_frame
from bridge.run import layer_range
from bridge.run.checks import check_residual, check_whole_logits
from bridge.run.hooked import check_hooks_run
from bridge.run.loss import check_counted, lm_loss
from bridge.run.model_inputs import Inputs, check_arguments, prepare
from bridge.run.protocol import Input, RunnableBridge
from bridge.run.request import Request
from bridge.wiring.compiled import call_eagerly

RETURN_TYPES = ("logits", "loss", "both", "predictions", "logits_and_cache", None)
_OURS = (
    "return_type", "loss_per_token", "prepend_bos", "padding_side", "attention_mask", "start_at_layer",
    "stop_at_layer", "names_filter", "incl_bwd", "pos_slice", "device", "remove_batch_dim", "return_cache_object",
    "fwd_hooks", "bwd_hooks", "reset_hooks_end", "clear_contexts",
)  # fmt: skip


def run_model(bridge: RunnableBridge, asked: Request, return_type: str | None, loss_per_token: bool) -> Any:
    """One forward pass: see `TransformerBridge.forward`."""
    model_kwargs = asked.model_kwargs
    check_arguments(bridge.core, model_kwargs, _OURS)
    if return_type not in RETURN_TYPES:
        raise ValueError(f"return_type is {return_type!r}; it must be one of {', '.join(map(repr, RETURN_TYPES))}")
    if return_type == "logits_and_cache":
        if not gives_cache(bridge.core):
            raise ValueError(
                f"{type(bridge.core).__name__} returns no past_key_values, so there is no 'logits_and_cache'; "
                "return_type='logits' gives its logits"
            )
        model_kwargs.setdefault("use_cache", True)
    start, stop = checked_layers(bridge, asked.start_at_layer, asked.stop_at_layer)
    if stop is None:
        check_whole_logits(return_type, model_kwargs)
        _check_result(bridge, return_type, loss_per_token, start is not None, asked.input, model_kwargs)
    with PreparedPass(bridge, asked, start, stop) as pass_:
        if stop is None and return_type in ("loss", "both") and "labels" not in model_kwargs:
            _check_loss(bridge, pass_.inputs)
        output = pass_.run_model()
    return output if stop is not None else _result(bridge, output, pass_.inputs, return_type, loss_per_token)


def checked_layers(
    bridge: RunnableBridge, start_at_layer: int | None, stop_at_layer: int | None
) -> tuple[int | None, int | None]:
    """The layers that a run starts and stops at, counted from the front.

    Raises:
        TypeError: one is no whole number.
        ValueError: one is out of range, or the model cannot do that.
    """
    if start_at_layer is None and stop_at_layer is None:
        return None, None
    start, stop = layer_range.check_layers(start_at_layer, stop_at_layer, bridge.cfg.n_layers)
    # Of one module that is all blocks, all calls can be left out, not some.
    no_block = start == bridge.cfg.n_layers and stop is None and any("@" in path for path in bridge.block_paths)
    if bridge.no_layer_runs and not no_block:
        raise ValueError(f"{bridge.cfg.model_name} cannot start or stop at a layer: {bridge.no_layer_runs}")
    check_hooks_run(bridge, start, stop)
    return start, stop


class PreparedPass:
    """One forward pass: all around the call of the model, for a ``with`` statement. (A generator would take longer.)

    Args:
        bridge, asked: as for `run_model`.
        start, stop: of `checked_layers`.
        traced: somebody may begin to listen while the model runs.
        scope: what this pass alone sees.

    Attributes:
        bridge, stop: likewise.
        run: what it remembers, once it was entered.
        inputs: what the model is called with, then.
    """

    run: ForwardPass
    inputs: Inputs

    def __init__(
        self,
        bridge: RunnableBridge,
        asked: Request,
        start: int | None,
        stop: int | None,
        traced: bool = False,
        scope: Scope | None = None,
    ) -> None:
        self.bridge, self.stop = bridge, stop
        self._asked, self._start, self._traced, self._scope = asked, start, traced, scope
        self._around: ExitStack | None = None

    def __enter__(self) -> PreparedPass:
        bridge, start, asked = self.bridge, self._start, self._asked
        listening = self._listening = self._traced or bridge.wiring.listening
        if listening:
            bridge.wiring.check_in_place()
        bridge.wiring.check_all_alike([asked.input, asked.attention_mask, asked.model_kwargs, start, self.stop])
        self._pass = forward_pass(scope=self._scope)
        run = self.run = self._pass.__enter__()
        try:
            if listening and bridge.wiring.calls.modules:
                self._until_the_end().enter_context(bridge.wiring.calls.counted())
            if start is not None:
                stands_in = self._until_the_end().enter_context(_starting(bridge, run, asked.input, start))
                asked = replace(asked, input=stands_in)
                told = may_take(bridge.core, "use_cache")
                if (
                    told and asked.model_kwargs.get("past_key_values") is None
                ):  # Whisper's decoder leaves it out with False
                    asked.model_kwargs.setdefault("use_cache", False)
            self.inputs = prepare(bridge, asked)
            if listening or "inputs_embeds" in self.inputs.kwargs:
                run.take_arguments(bridge.core, self.inputs.kwargs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        around, self._around = self._around, None
        try:
            if around is not None:
                around.close()
        finally:
            self._pass.__exit__(None, None, None)

    def _until_the_end(self) -> ExitStack:
        if self._around is None:
            self._around = ExitStack()
        return self._around

    def run_model(self) -> Any:
        """Calls the model: its output, or with `stop` the residual stream at that layer."""
        if self.stop is not None:
            return _stopped(self.bridge, self.run, self.inputs, self.stop)
        model = self.bridge.wiring.model
        if self._listening or self._start is not None:
            return call_eagerly(model, recomputation_frame, (model, (), self.inputs.kwargs), {})
        return model(**self.inputs.kwargs)


def _check_result(
    bridge: RunnableBridge,
    return_type: str | None,
    loss_per_token: bool,
    residual: bool,
    input: Input | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Refuses what the run could not give, before it runs."""
    if return_type not in ("loss", "both", "predictions"):
        return
    if "labels" in model_kwargs:
        if loss_per_token and return_type != "predictions":
            raise ValueError(
                "loss_per_token and labels cannot be had together: with labels the model computes the loss itself, and "
                "gives its mean; leave labels out, or take the logits"
            )
        return
    if "unembed.hook_out" not in bridge.wiring.points:
        raise ValueError(
            f"{type(bridge.core).__name__} has no unembedding and predicts no tokens, so there is no {return_type!r}"
        )
    if return_type == "predictions":
        return
    embeddings = isinstance(input, Tensor) and input.is_floating_point() and takes(bridge.core).main is None
    if residual or embeddings:
        raise ValueError("a loss needs tokens: embeddings or a residual stream do not say what comes next")
    if bridge.cfg.attention_dir == "bidirectional" and not bridge.core.config.is_encoder_decoder:
        raise ValueError("a model that reads in both directions has no next-token loss; pass labels")


def _check_loss(bridge: RunnableBridge, inputs: Inputs) -> None:
    """Refuses a loss that would be of nothing, or of padding, before the model runs."""
    assert inputs.tokens is not None
    check_counted(inputs.tokens, inputs.mask)
    config = bridge.core.config
    if not config.is_encoder_decoder or inputs.mask is not None:
        return
    pad = config.pad_token_id
    if pad is not None and pad != config.eos_token_id and bool((inputs.tokens[:, 1:] == pad).any()):
        raise ValueError(
            f"decoder_input_ids hold the padding token {pad}, and nothing says whether it counts: pass "
            "decoder_attention_mask, with 0 for padding"
        )


@contextmanager
def _starting(bridge: RunnableBridge, run: ForwardPass, input: Input | None, start: int) -> Iterator[Tensor]:
    """A run from a layer on; what the model is given as embeddings."""
    check_residual(bridge.core, input, bridge.cfg.d_model)
    assert isinstance(input, Tensor)
    if learns_prompt(bridge.original_model):
        raise ValueError(
            "start_at_layer cannot be had with a learned prompt (PEFT), which is put before the embeddings"
        )
    blocks = [Finder(bridge.original_model, path).module for path in bridge.block_paths]
    run.start_at = start
    if start:
        begins = layer_range.skipping(run, blocks[:start], input, *bridge.block_output)
    else:
        begins = layer_range.entering(run, blocks[0], input)
    with begins:
        if may_take(bridge.core, "inputs_embeds"):
            yield layer_range.placeholder(input, token_embedding(bridge.core))
        else:
            yield torch.zeros(input.shape[:-1], dtype=torch.long, device=input.device)


def _stopped(bridge: RunnableBridge, run: ForwardPass, inputs: Inputs, stop: int) -> Tensor:
    last = stop == bridge.cfg.n_layers
    block = Finder(bridge.original_model, bridge.block_paths[stop - last]).module
    with layer_range.stopping(run, block, last, bridge.block_output[0]) as found:
        model = bridge.original_model
        call_eagerly(model, recomputation_frame, (model, (), inputs.kwargs), {})
    return found[0]


def _result(bridge: RunnableBridge, output: Any, inputs: Inputs, return_type: str | None, loss_per_token: bool) -> Any:
    if return_type is None:
        return None
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    if return_type == "logits":
        return logits
    if return_type == "logits_and_cache":
        return logits, output.past_key_values
    if return_type == "predictions":
        return _predictions(bridge, logits, inputs)
    if "labels" in inputs.kwargs:
        loss = output.loss
    else:
        assert inputs.tokens is not None
        loss = lm_loss(logits[:, -inputs.tokens.shape[1] :], inputs.tokens, inputs.mask, loss_per_token)
    return loss if return_type == "loss" else (logits, loss)


def _predictions(bridge: RunnableBridge, logits: Tensor, inputs: Inputs) -> str | list[str]:
    if inputs.tokens is not None:
        logits = logits[:, -inputs.tokens.shape[1] :]  # a learned prompt (PEFT) comes before the tokens
    if inputs.mask is None:
        last = torch.full((logits.shape[0],), logits.shape[1] - 1, device=logits.device)
    else:
        last = inputs.mask.shape[1] - 1 - inputs.mask.flip(-1).argmax(-1)
    best = logits[torch.arange(len(last), device=logits.device), last].argmax(-1)
    texts = [bridge.to_single_str_token(token) for token in best.tolist()]
    return texts[0] if len(texts) == 1 else texts
