"""Many requests at once: transformers' continuous batching, with hooks and caches of each."""

from __future__ import annotations

import copy
import logging
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from adapters.imports import check_batching
from adapters.linear import input_device
from adapters.observe.observe import WRONG, one_line
from adapters.spread import Turns, refuse_context_parallel
from adapters.views import Args, Kwargs
from bridge.arguments import check_positive, shown
from bridge.bases.bases import read_by
from bridge.cache import ActivationCache
from bridge.generation.options import (
    GenerationOptions,
    RunnableBridge,
    check_generates,
    check_mask_shape,
    decode,
    distance,
)
from bridge.generation.packed import (
    Edit,
    Packed,
    PackedHook,
    PackedRequest,
    RequestPart,
    TellsApart,
    check_tells_apart,
    is_wrong,
    not_finite,
    together,
)
from bridge.hooks.context import (
    CURRENT,
    ForwardPass,
    Generation,
    Listener,
    RunContext,
    Scope,
    without_hooks,
)
from bridge.hooks.hooks import HookPoint, checked_function
from bridge.hooks.names import NamesFilter
from bridge.interventions.operations import Operation
from bridge.interventions.probes import FittedProbe, ProbeReading, readings_of
from bridge.rows import check_said, check_zero_or_one
from bridge.run.inputs import HookSpec
from bridge.run.recorder import free_memory
from bridge.run.rotary import refuse_requests_that_differ
from bridge.run.run import check_specs
from bridge.run.spans import is_chat
from bridge.run.tokenization import Text, TextOptions, as_tokens, batch_of, check_ids
from bridge.wiring.compiled import has_other_hooks, mark_as_of_batch

# --------------------------------------------------------------------------------------------------
# How many requests are generated together: pages of keys and values, tokens of one pass, from model
# and memory.
# --------------------------------------------------------------------------------------------------


#: Tokens of a page: small pages waste little on short requests.
_PAGE = 16
#: Tokens of a pass on a processor where the prompts are shorter: a longer pass was slower, for its
#: mask is square.
_TOKENS = 512
#: Tokens of a pass on other devices.
_TOKENS_ELSEWHERE = 4096
#: What keys and values, and the masks, may take of the memory that is free.
_SHARE = 0.5


@dataclass(frozen=True)
class Capacity:
    """The number of requests and tokens that memory holds.

    Attributes:
        tokens: the number of tokens in one pass.
        pages: the number of pages of keys and values.
        page: the number of tokens in a page.
    """

    tokens: int
    pages: int
    page: int

    def pages_of(self, prompt: int, new: int) -> int:
        """Return the pages that a request needs, with a spare one for windows, whose pages are
        counted separately.
        """
        return -(-(prompt + new) // self.page) + 1

    def fits(self, prompt: int, new: int) -> bool:
        """Return whether a request fits alone."""
        return prompt <= self.tokens and self.pages_of(prompt, new) <= self.pages

    def config(self, requests: int, shares: bool = False) -> ContinuousBatchingConfig:
        """Return transformers' configuration with the settings that hooks need: one forward pass
        per step, and no shared pages.

        Args:
            requests: the number of requests.
            shares: whether prompts with the same beginning may share pages, because there are no
                hooks.
        """
        return ContinuousBatchingConfig(
            page_size=self.page,
            num_blocks=self.pages,
            max_batch_tokens=self.tokens,
            max_requests_per_batch=min(requests, self.tokens),
            max_blocks_per_request=0,
            allow_block_sharing=shares,  # keys and values behind an edit are those of its request
            use_cuda_graph=False,  # a replayed graph calls no hook
            use_async_batching=False,  # it would report the requests of the next pass
            auto_switch_to_flash=False,  # the user's kernel computes the values
            drop_unsupported_processors=False,  # they raise an error instead
            safety_margin=0.0,  # no request is let in that does not fit
        )


def capacity_for(
    model: PreTrainedModel, prompts: Sequence[int], new: int, free: int | None = None
) -> Capacity:
    """Return the capacity for some requests.

    Args:
        model: the model.
        prompts: the lengths of the prompts.
        new: the number of new tokens of each.
        free: bytes of memory; None: the free memory of the model's device.

    Raises:
        ValueError: the free memory cannot hold even the longest request on its own.
    """
    item = model.dtype.itemsize
    longest = max(prompts)
    most = _TOKENS if model.device.type == "cpu" else _TOKENS_ELSEWHERE
    tokens = max(longest, min(sum(prompts), most), min(len(prompts), most))
    # A page has its keys and values, and its columns of the masks of full and windowed attention.
    mask_row = 2 * tokens * item
    page = _page_size(model) + mask_row * _PAGE
    if free is None:
        free = free_memory(model.device)
    free = max(0, int(_SHARE * free) - mask_row * tokens)
    needed = sum(Capacity(tokens, 0, _PAGE).pages_of(length, new) for length in prompts)
    room = Capacity(tokens, min(needed, free // page), _PAGE)
    if not room.fits(longest, new):
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with {new} new ones it needs"
            f" {room.pages_of(longest, new) * page / 2**20:.0f} MiB of keys, values and"
            f" masks; {free / 2**20:.0f} MiB may be taken of what is free on"
            f" {model.device}: generate fewer tokens, or one by one with bridge.generate"
        )
    return room


def _page_size(model: PreTrainedModel) -> int:
    """Return the bytes of a page's keys and values in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * _PAGE * model.dtype.itemsize)


#: Lock: at most one pass at a time while transformers' engine has swapped the attention function.
_TURN = threading.RLock()


class _ExchangedAttention:
    """The attention functions of a model's modules: its own, and the replacements that
    transformers' engine sets for its passes.

    The engine replaces ``eager`` attention, and no other pass can run with its replacement.

    Args:
        core: the model.

    Attributes:
        is_exchanged: whether the engine's attention is set.
    """

    def __init__(self, core: PreTrainedModel) -> None:
        configs: dict[int, PreTrainedConfig] = {}
        for module in core.modules():
            if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
                configs[id(config)] = config
        self._core = core
        self._own = [(config, config._attn_implementation) for config in configs.values()]
        self._engines = self._own
        self.is_exchanged = core.config._attn_implementation == "eager"

    def note_engines(self) -> None:
        """Record the engine's attention, and restore the model's own."""
        self._engines = [(config, config._attn_implementation) for config, _ in self._own]
        self.is_exchanged = self._engines != self._own
        self.give_back()

    def exchange(self) -> None:
        """Set the engine's attention."""
        for config, name in self._engines:
            config._attn_implementation_internal = name

    def give_back(self) -> None:
        """Restore the model's own attention."""
        for config, name in self._own:
            config._attn_implementation_internal = name

    def wait_for_others(self) -> None:
        """Wait until the current passes of other threads have ended, because these passes do not
        wait for ours.
        """
        begun = self._passes_of_others()
        while begun and any(frame in begun for frame in self._passes_of_others()):
            time.sleep(1e-3)

    def _passes_of_others(self) -> list[FrameType]:
        frames = sys._current_frames()
        # Drop our own frame: a self-referencing frame keeps its callers alive.
        del frames[threading.get_ident()]
        call = nn.Module._call_impl.__code__
        passes: list[FrameType] = []
        for innermost in frames.values():
            frame: FrameType | None = innermost
            while frame is not None:
                if frame.f_code is call and frame.f_locals["self"] is self._core:
                    passes.append(frame)
                frame = frame.f_back
        return passes


#: The thread of each model's batch: a batch changes its model's attention until it ends.
_OWNERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_CHANGED = threading.Condition()


def _take(core: nn.Module) -> None:
    """Reserve a model for a batch; wait while another thread has it.

    Raises:
        ValueError: this thread has already reserved it.
    """
    with _CHANGED:
        if _OWNERS.get(core) == threading.get_ident():
            raise ValueError(
                "a batch of requests is under way on this model: take all its answers, or leave its"
                " loop, before another generate_batch"
            )
        _CHANGED.wait_for(lambda: core not in _OWNERS)
        _OWNERS[core] = threading.get_ident()


def _give_back(core: nn.Module) -> None:
    """Release a model for another batch."""
    with _CHANGED:
        _OWNERS.pop(core, None)
        _CHANGED.notify_all()


@dataclass(frozen=True)
class Answer:
    """A request that is finished.

    Attributes:
        index: its number among the prompts.
        tokens: the new tokens ``[new]``.
        text: the same as text; None for a bridge without a tokenizer.
        cache: the captured activations of every processed token (all but the last), as in a run of
            the whole sequence; None if none were requested.
        logits: the logits of each new token, ``[new, d_vocab]``; None if they were not requested.
        error: why it failed, or None. Other requests continue.
        readings: the reading of each probe, by name, of every processed token (all but the last).
    """

    index: int
    tokens: Tensor
    text: str | None = None
    cache: ActivationCache | None = None
    logits: Tensor | None = None
    error: BaseException | None = None
    readings: Mapping[str, ProbeReading] = field(default_factory=dict)


#: Texts, chats or tokens.
Prompts = Sequence[Text] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor


def prompts_of(
    bridge: RunnableBridge,
    prompts: Prompts,
    bos: bool | None,
    mask: Tensor | None = None,
) -> list[list[int]]:
    """Return prompts as tokens, without padding.

    Args:
        bridge: the bridge.
        prompts: texts, or tokens.
        bos: whether texts start with BOS; None: the model's default.
        mask: for prompts given as tokens, ``[request, pos]``: 1 for tokens and 0 for padding.

    Raises:
        TypeError: `prompts` is neither.
        ValueError: a mask that does not fit; padding without one.
    """
    if mask is not None:
        return _unmasked_rows(as_tokens(prompts), mask)
    if isinstance(prompts, str) or is_chat(prompts) or not isinstance(prompts, Sequence | Tensor):
        raise TypeError(
            f"prompts is {shown(prompts)}; it must be several texts, or the tokens of several"
            " prompts"
        )
    own = bridge.core.generation_config
    endings = own.eos_token_id if isinstance(own.eos_token_id, Sequence) else [own.eos_token_id]
    rows = [_prompt_tokens(bridge, i, prompt, bos) for i, prompt in enumerate(prompts)]
    for prompt, row in zip(prompts, rows, strict=True):
        if row and not isinstance(prompt, str) and not is_chat(prompt):
            check_said(torch.tensor(row, device="cpu"), own.pad_token_id, endings)
    return rows


def _unmasked_rows(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the tokens of each row that its mask keeps."""
    check_zero_or_one("attention_mask", mask)
    check_mask_shape(mask, tokens.shape)
    masks = mask.bool().to(tokens.device)
    return [row[real].tolist() for row, real in zip(tokens, masks, strict=True)]


def _prompt_tokens(bridge: RunnableBridge, index: int, prompt: Any, bos: bool | None) -> list[int]:
    """Return the tokens of one prompt."""
    row = prompt
    if isinstance(prompt, str) or is_chat(prompt):
        empty = not prompt and bos is False
        row = [] if empty else batch_of(bridge, [prompt], TextOptions(bos)).tokens[0]
    if isinstance(row, Tensor):
        row = row.tolist()
    if not isinstance(row, list | tuple) or any(type(token) is not int for token in row):
        raise TypeError(f"prompts[{index}] is {shown(prompt)}; it must be a text, or tokens [pos]")
    return list(row)


def generate_batch(
    bridge: RunnableBridge,
    prompts: Sequence[Sequence[int]],
    interventions: Sequence[HookSpec],
    each: Sequence[Sequence[HookSpec]] | None,
    options: GenerationOptions,
) -> Iterator[Answer]:
    """Continue many prompts at once; see `TransformerBridge.generate_batch`. All arguments are
    checked before it returns.

    Args:
        bridge: the bridge.
        prompts: as tokens.
        interventions, each: as for `TransformerBridge.generate_batch`.
        options: the other arguments, with `capture` as their `names_filter`.
    """
    sharing = bridge.wiring.sharing
    turns = None if sharing is None else sharing.turns(partial(_pass_of_nothing, bridge))
    check_batching()
    check_generates(bridge)
    _check_engine_takes(bridge.core)
    check_positive("max_new_tokens", options.max_new_tokens)
    refuse_requests_that_differ(bridge.core, [*map(len, prompts)], options.max_new_tokens)
    edits = _edits(bridge, interventions, each, len(prompts))
    captured = _captured(bridge, options.names_filter)
    _check_points(edits, captured)
    good: list[PackedRequest] = []
    failed: list[PackedRequest] = []
    for i, prompt in enumerate(prompts):
        request = _new_request(i, prompt)
        request.error = _prompt_error(bridge, request.prompt, options.max_new_tokens)
        (good if request.error is None else failed).append(request)
    if good or turns is not None:
        names = [hook.name for hook in (*edits, *captured)]
        _check_processes(bridge, [names, prompts, options.max_new_tokens])
        check_batches(bridge, turns)
    if not good:
        if turns is not None:
            turns.end()
        return iter([_answer(bridge, request, [], ()) for request in failed])
    answers = _answers(_Batch(bridge, good, edits, captured, options, turns=turns), failed)
    next(answers)  # from here on the generator's `finally` ends the batch, even if it is abandoned
    # Where processes share the model, nothing else may run it meanwhile: compute all answers first.
    return answers if sharing is None else iter(list(answers))


def with_readings(
    answers: Iterator[Answer], by_point: Mapping[str, Sequence[FittedProbe]]
) -> Iterator[Answer]:
    """Yield answers, whose caches have the hook points of probes, with the readings."""
    for answer in answers:
        acts = answer.cache and {point: answer.cache[point][0] for point in by_point}
        yield replace(answer, readings=readings_of(by_point, acts)) if acts else answer


def _check_processes(bridge: RunnableBridge, arguments: list[Any]) -> None:
    """Check that all processes that share the model got the same call."""
    refuse_context_parallel()
    if bridge.wiring.sharing is not None:
        bridge.wiring.sharing.check_alike(arguments)


def _new_request(index: int, prompt: Sequence[int]) -> PackedRequest:
    return PackedRequest(index, list(prompt), Generation(len(prompt)))


def _captured(bridge: RunnableBridge, capture: NamesFilter) -> Sequence[HookPoint]:
    """Return the captured hook points; none for an empty filter."""
    if callable(capture) or isinstance(capture, str) or capture:
        return bridge.select_hooks(capture)
    return []


def _check_points(edits: Mapping[HookPoint, Sequence[Edit]], captured: Sequence[HookPoint]) -> None:
    """Check that the tokens of a hook point can be told apart by request."""
    for hook in dict.fromkeys([*edits, *captured]):
        check_tells_apart(hook)
        for _, fn in edits.get(hook, ()):
            if isinstance(fn, Operation):
                fn.check_alone(hook)


def _check_engine_takes(core: Any) -> None:
    """Check that transformers' engine supports a model.

    Raises:
        ValueError: it does not.
    """
    if (plain := getattr(core, "plain_module", None)) is not None:
        raise ValueError(
            f"{type(plain).__name__} cannot generate many requests at once: it takes no cache of"
            " transformers'. bridge.generate continues several prompts of one length, each as it"
            " would be alone"
        )
    if core.config.is_encoder_decoder or not hasattr(core, "init_continuous_batching"):
        raise ValueError(
            f"{type(core).__name__} cannot generate many requests at once: transformers' continuous"
            f" batching is only for decoders. {_INSTEAD}"
        )


# --------------------------------------------------------------------------------------------------
# The check that transformers' engine gives several requests the results of each on its own.
# --------------------------------------------------------------------------------------------------


#: The alternative, for errors.
_INSTEAD = (
    "bridge.generate continues several prompts in one padded batch, each as it would be alone"
)
#: For each model, by attention and data type: the reason why it cannot be batched; "": it can.
_PROVED: WeakKeyDictionary[nn.Module, dict[tuple[str | None, torch.dtype], str]] = (
    WeakKeyDictionary()
)
#: Lengths of the prompts of a proof.
_PROOF = (7, 2, 4)
#: How many tokens follow each.
_PROOF_NEW = 3


def _pass_of_nothing(bridge: RunnableBridge, number: int) -> None:
    """Run the model on one token, for a pass in which only other processes have requests."""
    with torch.no_grad(), without_hooks():
        bridge.core(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=input_device(bridge.core)),
            use_cache=False,
        )


def check_batches(bridge: RunnableBridge, turns: Turns | None = None) -> None:
    """Check that several requests of a model give the same results as each on its own; each model
    is tested once.

    Args:
        bridge: the bridge.
        turns: the turns of processes that have different requests.

    Raises:
        ValueError: it does not.
    """
    core = bridge.core
    reasons = _PROVED.setdefault(core, {})
    key = (core.config._attn_implementation, core.dtype)
    if key not in reasons:
        reasons[key] = _why_not(bridge, turns)
    if reasons[key]:
        raise ValueError(
            f"generate_batch is not available for {type(core).__name__} ({_layer_kinds(bridge)}):"
            f" {reasons[key]}. {_INSTEAD}"
        )


def _layer_kinds(bridge: RunnableBridge) -> str:
    """Return the classes of a model's attention or mixing modules."""
    words = re.compile(
        "attention|mixer|mamba|deltanet|recurrent|lstm|rwkv|shortconv", re.IGNORECASE
    )
    names = dict.fromkeys(type(module).__name__ for module in bridge.core.modules())
    return ", ".join([name for name in names if words.search(name)][:3]) or "layers of its own"


def _why_not(bridge: RunnableBridge, turns: Turns | None) -> str:
    """Return why several requests of a model differ from each on its own; "" if they are equal."""
    longest = bridge.cfg.n_ctx
    if longest is not None and longest < max(_PROOF) + _PROOF_NEW:
        return ""
    generator = torch.Generator().manual_seed(0)
    high = max(2, bridge.cfg.d_vocab)
    low = min(3, high - 1)
    prompts = [
        torch.randint(low, high, (n,), generator=generator, device="cpu").tolist() for n in _PROOF
    ]
    options = GenerationOptions(
        max_new_tokens=_PROOF_NEW,
        stop_at_eos=False,
        do_sample=False,
        output_logits=True,
        verbose=False,
    )
    requests = [_new_request(i, prompt) for i, prompt in enumerate(prompts)]
    with quiet_engine():
        try:
            batch = _Batch(bridge, requests, {}, [], options, proof=True, turns=turns)
            answers = list(_answers(batch, []))[1:]
        except WRONG as error:
            return f"transformers' continuous batching does not support it ({one_line(error)})"
    for answer in answers:
        if answer.error is not None:
            return f"transformers' continuous batching fails with it ({one_line(answer.error)})"
        if off := _logit_error(bridge.core, prompts[answer.index], answer):
            return (
                f"with {len(prompts)} requests at once, each gets different logits from a run on"
                f" its own (off by {off}): transformers' continuous batching needs attention that"
                " uses its interface"
            )
    return ""


def _logit_error(core: Any, prompt: list[int], answer: Answer) -> str:
    """Return by how much an answer's logits differ from those of its sequence on its own."""
    assert answer.logits is not None
    sequence = torch.tensor([[*prompt, *answer.tokens.tolist()]], device=input_device(core))
    with torch.no_grad(), without_hooks():
        alone = core(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return distance(answer.logits.float(), alone.float(), core.dtype)


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Silence the engine's log of an error that is reported otherwise."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _edits(
    bridge: RunnableBridge,
    interventions: Sequence[HookSpec],
    each: Sequence[Sequence[HookSpec]] | None,
    requests: int,
) -> dict[HookPoint, list[Edit]]:
    """Return the functions at each hook point: the currently active hooks, the functions for all
    requests, and each request's functions.
    """
    if each is not None and len(each) != requests:
        raise ValueError(
            f"each has {len(each)} sets of interventions, and there are {requests} prompts"
        )
    edits: dict[HookPoint, list[Edit]] = {}
    for hook in bridge.wiring.points.values():
        for listener in hook.visible_listeners() if hook.listeners else ():
            if listener.kind in ("bwd", "edge", "follow"):
                raise ValueError(
                    f"{hook.name} has a hook of gradients, or a module in its place, which no"
                    " generation of many requests has a place for: take it away"
                )
            if listener.kind == "fwd":
                edits.setdefault(hook, []).append((None, listener.fn))
    for who, specs in [(None, interventions), *enumerate(each or ())]:
        check_specs("interventions" if who is None else f"each[{who}]", specs)
        for names, fn in specs:
            for hook in bridge.select_hooks(names):
                edits.setdefault(hook, []).append((who, checked_function(hook, fn)))
    return edits


def _prompt_error(bridge: RunnableBridge, prompt: list[int], new: int) -> ValueError | None:
    """Return the error of a prompt that cannot be continued; None if it can."""
    if not prompt:
        return ValueError("the prompt has no tokens")
    longest = bridge.cfg.n_ctx
    if longest is not None and len(prompt) + new > longest:
        return ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens={new}; {bridge.cfg.model_name}"
            f" has a context of {longest}"
        )
    try:
        check_ids(
            bridge.wiring.embedding, bridge.cfg, torch.tensor([prompt], device="cpu"), "the prompt"
        )
    except ValueError as error:
        return error
    return None


def _leave_causal(arguments: Kwargs) -> None:
    """Drop an argument that duplicates the mask and would change the model's configuration for all
    threads.
    """
    if arguments.get("is_causal") is False:
        del arguments["is_causal"]


def _check_processors(manager: ContinuousBatchingManager) -> None:
    """Check that transformers' engine supports every logits processor."""
    unsupported = [
        type(processor).__name__
        for processor in manager.logit_processor.logits_processor
        if getattr(processor, "supports_continuous_batching", None) is not True
    ]
    if unsupported:
        raise ValueError(
            f"{', '.join(unsupported)} is not available in generate_batch, which transformers"
            " says of it: use bridge.generate"
        )


class _Batch:
    """The requests of one call, transformers' manager of them, and the hooks of the passes."""

    def __init__(
        self,
        bridge: RunnableBridge,
        requests: Sequence[PackedRequest],
        edits: Mapping[HookPoint, Sequence[Edit]],
        captured: Sequence[HookPoint],
        options: GenerationOptions,
        proof: bool = False,
        turns: Turns | None = None,
    ) -> None:
        core = bridge.core
        sharing = bridge.wiring.sharing
        self.bridge = bridge
        self.requests = requests
        self.options = options
        self.edits = edits
        self.captured = captured
        self.others = turns
        self.retries = not proof and len(requests) > 1 and sharing is None
        self.room = self._capacity()
        self.by_id = {str(request.index): request for request in requests}
        self.scope = Scope()
        self._attention = _ExchangedAttention(core)
        has_hooks = bool(edits or captured or options.output_logits)
        #: No function is called in a pass: compilation and the sharing of pages stay as
        #: transformers has them.
        self._free = not has_hooks and sharing is None and not self._attention.is_exchanged
        self._prepare_state()
        config = GenerationConfig() if proof else copy.deepcopy(core.generation_config)
        _take(core)
        try:
            self._set_up(config)
        except BaseException:
            self.stop()
            raise

    def _prepare_state(self) -> None:
        """Set the attributes that depend on the edits, and the attributes that change during the
        batch."""
        #: The edited requests; None among them: all.
        self._edited = {index for edits in self.edits.values() for index, _ in edits}
        hooks = (*self.edits, *self.captured)
        self._whole_logits = any(hook.name.startswith("unembed") for hook in hooks)
        self._waiting = deque(self.requests)
        self._under_way: dict[str, PackedRequest] = {}
        self._lock = threading.Lock()
        self._packed: Packed | None = None
        self._pass: ForwardPass | None = None
        self._passing: int | None = None  # the thread of our pass
        self._turns = threading.local()
        self._is_over = False
        self._gave_whole_logits = False
        self._handles: list[Any] = []
        self._manager: ContinuousBatchingManager | None = None

    def _capacity(self) -> Capacity:
        """Return the capacity; if processes share the model, the smallest of theirs."""
        core = self.bridge.core
        sharing = self.bridge.wiring.sharing
        free = free_memory(core.device)
        if sharing is not None:
            free = sharing.least(free)
        lengths = [len(request.prompt) for request in self.requests]
        return capacity_for(core, lengths, self.options.max_new_tokens, free)

    def _set_up(self, config: GenerationConfig) -> None:
        """Add the hooks to the model, and create transformers' manager."""
        core = self.bridge.core
        if not self._free:
            with _TURN:  # torch hooks neither come nor go during another batch's pass
                self._handles = [
                    core.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                    core.register_forward_hook(self._end, with_kwargs=True, always_call=True),
                ]
        if self._attention.is_exchanged:
            self._attention.wait_for_others()
        with _TURN if self._attention.is_exchanged else nullcontext():
            self._manager = self._new_manager(config)

    @property
    def manager(self) -> ContinuousBatchingManager:
        assert self._manager is not None
        return self._manager

    def _new_manager(self, config: GenerationConfig) -> ContinuousBatchingManager:
        core = self.bridge.core
        self._configure(config)
        manager: ContinuousBatchingManager = core.init_continuous_batching(  # type: ignore[operator]
            generation_config=config,
            continuous_batching_config=self.room.config(len(self.requests), self._free),
        )
        # With functions, ours or torch hooks, nothing is compiled: code that was compiled before
        # does not know them.
        compiled = config.compile_config if self._free and not has_other_hooks(core) else None
        manager.continuous_batching_config.varlen_compile_config = compiled
        manager.continuous_batching_config.decode_compile_config = None
        try:
            _check_processors(manager)
            # Its errors are raised here rather than in the thread.
            processor = manager.batch_processor = manager._create_batch_processor()
        except BaseException:
            manager.destroy()
            self._attention.give_back()
            raise
        self._attention.note_engines()
        # It would give every part of the model the attention of the model as a whole.
        manager._original_attn_impl = None
        assert processor is not None
        cache = processor.cache
        mark_as_of_batch(cache)
        if self._free:
            runner = processor.model_runner
            runner.compute_batch = partial(self._free_pass, runner, runner.compute_batch)  # type: ignore[method-assign]
        if self.edits:
            cache.update = partial(self._update, cache.update)  # type: ignore[method-assign]
        return manager

    def _configure(self, config: GenerationConfig) -> None:
        """Write the options into a configuration of transformers.

        Raises:
            ValueError: the model's own configuration has an option that the engine does not
                support.
        """
        options = self.options
        config.update(**options.sampling())
        ending = config.eos_token_id if options.eos_token_id is None else options.eos_token_id
        config.eos_token_id = -1 if ending is None or not options.stop_at_eos else ending
        config.max_new_tokens = options.max_new_tokens
        for name in ("num_beams", "num_return_sequences"):
            if (getattr(config, name, None) or 1) != 1:
                raise ValueError(
                    f"{name} is {getattr(config, name)}; generate_batch makes one sequence of each"
                    " prompt"
                )
        if config.begin_suppress_tokens is not None:  # transformers' engine ends in an error
            raise ValueError(
                "begin_suppress_tokens is not available in generate_batch, which does not know"
                " the length of a prompt: use bridge.generate"
            )

    def _free_pass(
        self,
        runner: ModelRunner,
        compute: Callable[..., None],
        model: nn.Module,
        batch: dict[str, Any],
    ) -> None:
        """Run a pass without hooks, so that the model's own compiled code can be used. If other
        threads have hooks attached, or change hooks meanwhile and interrupt the compilation, the
        pass runs again uncompiled and writes the same keys, values and tokens. It is never compiled
        if a second run would differ: with a sliding window, part of a prompt overwrites the keys
        that it reads.
        """
        compiled = runner._compiled_varlen
        packing = runner.inputs_and_outputs
        assert isinstance(packing, ContinuousBatchingIOs)  # not the asynchronous ones
        # Parts of a prompt that follow others.
        parts = any(
            part.query_length not in (1, part.state.position_offset)
            for part in packing.requests_in_batch
        )
        repeatable = not parts or runner.cache.use_prefix_sharing  # false for models with windows
        with _TURN:
            run = ForwardPass()
            self._set_run(run)
            _leave_causal(batch)
            try:
                if compiled is not None and repeatable and not self.bridge.wiring.listening:
                    try:
                        return compute(model, batch)
                    except (AssertionError, RuntimeError) as error:
                        warnings.warn(
                            "a compiled pass of generate_batch failed, and is made uncompiled"
                            f" ({one_line(error)})",
                            stacklevel=1,
                        )
                runner._compiled_varlen = None
                compute(model, batch)
            finally:
                runner._compiled_varlen = compiled
                run.end()
                self._set_run(None)

    def _update(
        self,
        update: Callable[..., Any],
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Write keys and values. End requests whose keys or values are not finite, and write zeros
        instead. Otherwise they would reach all requests, because attention multiplies masked values
        by a weight of zero, and zero times NaN is NaN.
        """
        keys = key_states
        values = value_states
        if self._packed is not None and (is_wrong(keys) or is_wrong(values)):
            keys = keys.clone()
            values = values.clone()
            for part in self._packed.parts:
                if not self._is_edited(part.request):
                    continue
                own = (slice(None), slice(None), slice(*part.queries))
                if is_wrong(keys[own]) or is_wrong(values[own]):
                    keys[own] = values[own] = 0
                    name = f"what keys and values of layer {layer_idx} are made of"
                    self.fail(part.request, not_finite(part.request, name))
        return update(keys, values, layer_idx, *rest, **more)

    def _is_edited(self, request: PackedRequest) -> bool:
        return None in self._edited or request.index in self._edited

    def start(self) -> None:
        """Attach the listeners, and begin."""
        wiring = self.bridge.wiring
        hooks = dict.fromkeys([*self.edits, *self.captured])
        if hooks:
            wiring.check_in_place()
        members = []
        for hook in hooks:
            edits = self.edits.get(hook, ())
            function = PackedHook(self._now, edits, hook in self.captured, self.fail)
            listener = Listener("fwd" if edits else "read", function, self.scope)
            members.append((hook, listener))
        for hook, name in read_by([*self.edits, *self.captured]).items():
            check = TellsApart(self._now, hook, self.fail)
            members.append((wiring.points[name], Listener("read", check, self.scope)))
        with _TURN:
            wiring.attach_members(members, self.scope)
        # Sampled tokens depend on the order of the requests.
        if self._free and not self.manager.generation_config.do_sample:
            self._waiting = deque(sorted(self._waiting, key=lambda request: request.prompt))
        self.manager.start()
        self.feed()

    def stop(self) -> None:
        """End the batch, and remove its hooks."""
        try:
            self._waiting.clear()
            if self._manager is not None:
                if self._manager.is_running():
                    # Wakes the thread, which would otherwise wait a tenth of a second for requests.
                    self._manager.cancel_request("")
                    self._manager.stop(block=True, hard_stop=True)
                self._manager.destroy()
            with _TURN:
                self._attention.give_back()
                self._is_over = True
                for handle in self._handles:
                    handle.remove()
                self.bridge.wiring.detach_scope(self.scope)
        finally:
            _give_back(self.bridge.core)

    def feed(self) -> None:
        """Start as many requests as fit: with all their pages in memory and all their prompts'
        tokens in one pass.
        """
        with self._lock:
            pages_of = lambda request: self.room.pages_of(
                len(request.prompt), self.options.max_new_tokens
            )
            under_way = self._under_way.values()
            tokens = sum(1 if request.started else len(request.prompt) for request in under_way)
            pages = sum(map(pages_of, under_way))
            while self._waiting:
                request = self._waiting[0]
                tokens += len(request.prompt)
                pages += pages_of(request)
                if (tokens > self.room.tokens and not self._free) or pages > self.room.pages:
                    return
                self._waiting.popleft()
                self._under_way[str(request.index)] = request
                self.manager.add_request(request.prompt, request_id=str(request.index))

    def finished(self) -> Iterator[tuple[PackedRequest, Sequence[int], BaseException | None]]:
        """Yield the requests as they end, with their new tokens, and the error of their pass.

        Raises:
            RuntimeError: the thread that generates has ended without an error of its own.
        """
        pending = set(self.by_id)
        while pending:
            result = self.manager.get_result(timeout=0.2)
            status = self.manager.background_thread_status
            if result is None and self.manager.is_running():
                continue
            if result is None:
                fatal = status.fatal_error or RuntimeError("the thread that generates has ended")
                yield from ((self.by_id[name], [], fatal) for name in sorted(pending))
                return
            request = self.by_id[result.request_id]
            pending.discard(result.request_id)
            self.done(request)
            error: BaseException | None = None
            if result.error is not None:
                error = status.fatal_error or RuntimeError(result.error)
            yield request, result.generated_tokens, error

    def done(self, request: PackedRequest) -> None:
        """Free the memory of a request."""
        with self._lock:
            self._under_way.pop(str(request.index), None)
        self.feed()

    def fail(self, request: PackedRequest, error: BaseException) -> None:
        """End one request, with the first error of its functions."""
        if request.error is None:
            request.error = error

    def _set_run(self, run: ForwardPass | None) -> None:
        """Set the pass to which functions called by the engine's thread belong from now on."""
        CURRENT.set(RunContext(frozenset((self.scope,)), run=run))

    def _now(self) -> Packed:
        assert self._packed is not None
        return self._packed

    def _is_ours(self, kwargs: Mapping[str, Any]) -> bool:
        processor = None if self._manager is None else self._manager.batch_processor
        return processor is not None and kwargs.get("cache") is processor.cache

    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> Any:
        """Begin the pass once no other is running: set its requests and its context. `kwargs` is
        missing if this hook was added or removed during another thread's pass.
        """
        if kwargs is None:
            return None
        ours = self._is_ours(kwargs)
        if self._passing == threading.get_ident():
            raise RuntimeError(
                "a function of generate_batch runs the model inside of a pass of many requests,"
                " whose functions would see that run too: run it before or afterwards"
            )
        if not (ours or self._attention.is_exchanged):
            return None
        _TURN.acquire()
        if self._is_over:  # the hooks were removed meanwhile: `_end` would not release the lock
            _TURN.release()
            return None
        self._turns.taken = getattr(self._turns, "taken", 0) + 1
        if not ours:
            return None
        self._attention.exchange()
        self._passing = threading.get_ident()
        self._packed = self._new_packed(kwargs)
        self._pass = ForwardPass()
        self._pass.gradients = False
        self._set_run(self._pass)
        self.feed()
        if self.others is not None:
            self.others.take(1)
        kwargs = dict(kwargs)
        self._gave_whole_logits = self._whole_logits and "logits_to_keep" in kwargs
        if self._gave_whole_logits:
            del kwargs["logits_to_keep"]
        _leave_causal(kwargs)
        return args, kwargs

    def _new_packed(self, kwargs: Kwargs) -> Packed:
        """Return the requests of a pass.

        Raises:
            RuntimeError: a prompt was split over several passes.
        """
        processor = self.manager.batch_processor
        assert processor is not None
        packing = processor.inputs_and_outputs
        assert isinstance(packing, ContinuousBatchingIOs)  # not the asynchronous ones
        states = packing.requests_in_batch
        packed = Packed.of([self.by_id[state.state.request_id] for state in states], kwargs)
        for part, state in zip(packed.parts, states, strict=True):
            if not state.has_new_token or (part.first and not part.request.started):
                raise RuntimeError(
                    f"request {part.request.index} was split over several passes, though room for"
                    " it was left: its functions would see parts of it"
                )
            part.request.started = True
        return packed

    def _end(self, module: nn.Module, args: Args, *more: Any) -> Any:
        """End the pass. `more` has its keyword arguments (see `_begin`) and its output."""
        kwargs = more[0] if len(more) > 1 else {}
        output = more[-1]
        ours = self._is_ours(kwargs)
        if not ours and self._passing == threading.get_ident():
            return None  # it was refused
        try:
            return self._ended(kwargs, output) if ours and self._pass is not None else None
        finally:
            if ours:
                self._passing = None
                self._attention.give_back()
            if getattr(self._turns, "taken", 0):
                self._turns.taken -= 1
                _TURN.release()

    def _ended(self, kwargs: Kwargs, output: Any) -> Any:
        """End our pass; return its output."""
        assert self._pass is not None
        self._pass.end()
        self._pass = None
        self._set_run(None)
        if output is None:  # it raised
            return None
        if self.others is not None:
            self.others.under_way = False
        assert self._packed is not None
        parts = self._packed.parts
        logits = output.logits
        if logits.shape[1] != len(parts):
            logits = logits[:, kwargs["logits_indices"].long()]
        if self.edits:
            logits = self._without_wrong_logits(logits, parts)
        # With all logits, the engine still reads those of the last tokens alone.
        if self._gave_whole_logits or (self.edits and logits.shape == output.logits.shape):
            output.logits = logits
        if self.options.output_logits:
            for part, row in zip(parts, logits[0].detach(), strict=True):
                part.request.logits.append(row.clone())
        return output

    def _without_wrong_logits(self, logits: Tensor, parts: Sequence[RequestPart]) -> Tensor:
        """Return logits to sample from. End requests whose logits are not finite, and use zeros for
        them.
        """
        if not is_wrong(logits, masks=True):
            return logits
        logits = logits.clone()
        for row, part in enumerate(parts):
            if self._is_edited(part.request) and is_wrong(logits[:, row], masks=True):
                logits[:, row] = 0
                self.fail(part.request, not_finite(part.request, "what logits are made of"))
        return logits


def _answers(batch: _Batch, failed: Sequence[PackedRequest]) -> Iterator[Answer]:
    """Yield an empty answer once the batch has begun, and then the answers as they are computed."""
    bridge = batch.bridge
    options = batch.options
    bar = tqdm(
        total=len(batch.requests) + len(failed),
        desc="requests",
        unit="request",
        disable=not options.verbose,
    )
    repeats: list[PackedRequest] = []
    with bar:
        try:
            yield Answer(-1, torch.tensor([], device="cpu"))
            for request in failed:
                bar.update()
                yield _answer(bridge, request, [], ())
            batch.start()
            for request, tokens, error in batch.finished():
                if error is not None and request.error is None:
                    if batch.retries:  # one request's edits ended the pass of all
                        repeats.append(request)
                        continue
                    if batch.others is not None and batch.others.under_way:
                        raise RuntimeError(
                            "a pass broke off, and other processes wait in it: end all"
                        ) from error
                    request.error = error
                bar.update()
                yield _answer(bridge, request, tokens, batch.captured, options.output_logits)
        finally:
            batch.stop()
            if batch.others is not None:
                batch.others.end()
        for request in repeats:
            for answer in _repeated(batch, request):
                bar.update()
                yield answer


def _repeated(batch: _Batch, request: PackedRequest) -> Iterator[Answer]:
    """Run a request again, on its own, and return its answer."""
    requests = [_new_request(request.index, request.prompt)]
    options = replace(batch.options, verbose=False)
    alone = _Batch(batch.bridge, requests, batch.edits, batch.captured, options)
    answers = _answers(alone, [])
    next(answers)
    return answers


def _answer(
    bridge: RunnableBridge,
    request: PackedRequest,
    tokens: Sequence[int],
    captured: Sequence[HookPoint],
    logits: bool = False,
) -> Answer:
    new = torch.tensor(list(tokens), dtype=torch.long, device="cpu")
    if request.error is not None:
        return Answer(request.index, new[:0], error=request.error)
    answer = Answer(request.index, new)
    if bridge.tokenizer is not None:
        answer = replace(answer, text=decode(bridge, new.tolist()))
    if captured:
        values = {hook.name: together(request.kept.pop(hook.name), hook) for hook in captured}
        answer = replace(answer, cache=ActivationCache(values, bridge))
    return replace(answer, logits=torch.stack(request.logits)) if logits else answer
