"""Many requests at once: transformers' continuous batching, with hooks and caches for each request."""

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
from dataclasses import dataclass, replace
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
from bridge.bases.bases import read_by
from bridge.cache import ActivationCache
from bridge.generation.options import GenerationOptions, RunnableBridge, check_generates, decode, distance
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
from bridge.hooks.arguments import check_positive, shown
from bridge.hooks.context import CURRENT, ForwardPass, Generation, Listener, RunContext, Scope, without_hooks
from bridge.hooks.hooks import HookPoint, checked_function
from bridge.hooks.rows import check_said, check_zero_or_one
from bridge.interventions.operations import Operation
from bridge.run.inputs import HookSpec
from bridge.run.recorder import free_memory
from bridge.run.run import check_specs
from bridge.run.tokenization import TextOptions, as_tokens, batch_of, check_ids
from bridge.wiring.compiled import has_other_hooks, mark_as_of_batch

# ----------------------------------------------------------------------------------------------------------------------
# How many requests are generated together: pages of keys and values, tokens of one pass, from model and memory.
# ----------------------------------------------------------------------------------------------------------------------


#: Tokens of a page: small pages waste little on short requests.
_PAGE = 16
#: Tokens of a pass where the prompts are shorter: on a processor a longer pass was slower, for its mask is square.
_TOKENS, _TOKENS_ELSEWHERE = 512, 4096
#: What keys and values, and the masks, may take of the memory that is free.
_SHARE = 0.5


@dataclass(frozen=True)
class Capacity:
    """What there is room for at once.

    Attributes:
        tokens: of one pass.
        pages: of keys and values.
        page: the tokens of a page.
    """

    tokens: int
    pages: int
    page: int

    def pages_of(self, prompt: int, new: int) -> int:
        """The pages that a request needs, with one to spare for windows, whose pages are counted by themselves."""
        return -(-(prompt + new) // self.page) + 1

    def fits(self, prompt: int, new: int) -> bool:
        """Whether a request fits alone."""
        return prompt <= self.tokens and self.pages_of(prompt, new) <= self.pages

    def config(self, requests: int, shares: bool = False) -> ContinuousBatchingConfig:
        """The same for transformers, with what hooks need: a forward pass in each step, pages of each request alone.

        Args:
            requests: how many there are.
            shares: there are no hooks, so that prompts that begin alike share their pages.
        """
        return ContinuousBatchingConfig(
            page_size=self.page,
            num_blocks=self.pages,
            max_batch_tokens=self.tokens,
            max_requests_per_batch=min(requests, self.tokens),
            max_blocks_per_request=0,
            allow_block_sharing=shares,  # keys and values behind an edit are those of its request
            use_cuda_graph=False,  # a replayed graph calls no hook
            use_async_batching=False,  # which requests a pass holds would be told of the next one
            auto_switch_to_flash=False,  # the values are those of the kernel that the model was loaded with
            drop_unsupported_processors=False,  # refused by name in place of being left out
            safety_margin=0.0,  # no request is let in that does not fit
        )


def capacity_for(model: PreTrainedModel, prompts: Sequence[int], new: int, free: int | None = None) -> Capacity:
    """What there is room for.

    Args:
        model: the model.
        prompts: the lengths of the prompts.
        new: the new tokens of each.
        free: bytes of memory; None: those that are free on the model's device.

    Raises:
        ValueError: the memory that is free does not hold the longest request alone.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = model.dtype.itemsize
    page = 2 * config.num_hidden_layers * heads * width * _PAGE * item
    longest = max(prompts)
    most = _TOKENS if model.device.type == "cpu" else _TOKENS_ELSEWHERE
    tokens = max(longest, min(sum(prompts), most), min(len(prompts), most))
    mask = 2 * tokens * item * _PAGE  # for each page: the masks of full and of windowed attention
    wanted = sum(Capacity(tokens, 0, _PAGE).pages_of(length, new) for length in prompts)
    free = int(_SHARE * (free_memory(model.device) if free is None else free)) - 2 * tokens * tokens * item
    pages = min(wanted, max(0, free) // (page + mask))
    room = Capacity(tokens, pages, _PAGE)
    if not room.fits(longest, new):
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with {new} new ones it needs "
            f"{room.pages_of(longest, new) * (page + mask) / 2**20:.0f} MiB of keys, values and masks; "
            f"{max(0, free) / 2**20:.0f} MiB may be taken of what is free on {model.device}: generate fewer tokens, or "
            "one by one with bridge.generate"
        )
    return room


#: Held by a packed pass, and by any other of a model whose attention the engine exchanges in its passes.
_TURN = threading.RLock()


class _ExchangedAttention:
    """What the parts of a model compute attention with: their own, and what transformers' engine sets for its passes.

    The engine gives a model another in the place of ``eager``, with which no other pass can be.

    Args:
        core: the model.

    Attributes:
        is_exchanged: the engine needs another.
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
        """Notes what the engine has set, and gives the model its own back."""
        self._engines = [(config, config._attn_implementation) for config, _ in self._own]
        self.is_exchanged = self._engines != self._own
        self.give_back()

    def exchange(self) -> None:
        """Gives the model what the engine needs."""
        for config, name in self._engines:
            config._attn_implementation_internal = name

    def give_back(self) -> None:
        """Gives the model its own."""
        for config, name in self._own:
            config._attn_implementation_internal = name

    def wait_for_others(self) -> None:
        """Waits until the passes are over that other threads are inside of: nothing has told them to take turns."""
        begun = self._passes_of_others()
        while begun and any(frame in begun for frame in self._passes_of_others()):
            time.sleep(1e-3)

    def _passes_of_others(self) -> list[FrameType]:
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # one that holds itself would hold all that it was called from
        found: list[FrameType] = []
        for innermost in frames.values():
            frame: FrameType | None = innermost
            while frame is not None:
                if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is self._core:
                    found.append(frame)
                frame = frame.f_back
        return found


#: Which models have a batch, and in which thread: a batch changes its model's attention until it is over.
_OWNERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_CHANGED = threading.Condition()


def _take(core: nn.Module) -> None:
    """Takes a model for a batch, when no other thread has it any more.

    Raises:
        ValueError: this very thread has it.
    """
    with _CHANGED:
        if _OWNERS.get(core) == threading.get_ident():
            raise ValueError(
                "a batch of requests is under way on this model: take all its answers, or leave its loop, before "
                "another generate_batch"
            )
        _CHANGED.wait_for(lambda: core not in _OWNERS)
        _OWNERS[core] = threading.get_ident()


def _give_back(core: nn.Module) -> None:
    """Lets another batch have it."""
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
        cache: the captured activations of every token that was processed (all but the last), as a run of the sequence
            has them; None where none were asked for.
        logits: of each new token ``[new, d_vocab]``; None where they were not asked for.
        error: why it failed; the other requests go on.
    """

    index: int
    tokens: Tensor
    text: str | None = None
    cache: ActivationCache | None = None
    logits: Tensor | None = None
    error: BaseException | None = None


def prompts_of(
    bridge: RunnableBridge,
    prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
    bos: bool | None,
    mask: Tensor | None = None,
) -> list[list[int]]:
    """Prompts as tokens, without padding.

    Args:
        bridge: the bridge.
        prompts: texts, or tokens.
        bos: whether texts start with BOS; None: what the model says.
        mask: of tokens ``[request, pos]``, 1 for tokens and 0 for padding.

    Raises:
        TypeError: something else.
        ValueError: a mask that does not fit; padding without one.
    """
    if mask is not None:
        tokens = as_tokens(prompts)
        check_zero_or_one("attention_mask", mask)
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask has shape {list(mask.shape)}; the tokens have {list(tokens.shape)}")
        return [row[real].tolist() for row, real in zip(tokens, mask.bool().to(tokens.device), strict=True)]
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | Tensor):
        raise TypeError(f"prompts is {shown(prompts)}; it must be several texts, or the tokens of several prompts")
    found: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            prompt = batch_of(bridge, [prompt], TextOptions(bos)).tokens[0] if prompt or bos is not False else []
        row = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        if not isinstance(row, list | tuple) or any(type(token) is not int for token in row):
            raise TypeError(f"prompts[{index}] is {shown(prompts[index])}; it must be a text, or tokens [pos]")
        found.append(list(row))
    own = bridge.core.generation_config
    endings = own.eos_token_id if isinstance(own.eos_token_id, Sequence) else [own.eos_token_id]
    for prompt, row in zip(prompts, found, strict=True):
        if row and not isinstance(prompt, str):
            check_said(torch.tensor(row), own.pad_token_id, endings)
    return found


def generate_batch(
    bridge: RunnableBridge,
    prompts: Sequence[Sequence[int]],
    interventions: Sequence[HookSpec],
    each: Sequence[Sequence[HookSpec]] | None,
    options: GenerationOptions,
) -> Iterator[Answer]:
    """Continues many prompts at once; see `TransformerBridge.generate_batch`. Everything is checked before it returns.

    Args:
        bridge: the bridge.
        prompts: as tokens.
        interventions, each: as there.
        options: what it is told besides: as there, with `capture` as their `names_filter`.
    """
    sharing = bridge.wiring.sharing
    turns = None if sharing is None else sharing.turns(partial(_pass_of_nothing, bridge))
    check_batching()
    check_generates(bridge)
    _check_engine_takes(bridge.core)
    check_positive("max_new_tokens", options.max_new_tokens)
    edits = _edits(bridge, interventions, each, len(prompts))
    capture = options.names_filter
    captured = bridge.select_hooks(capture) if callable(capture) or isinstance(capture, str) or capture else []
    for hook in dict.fromkeys([*edits, *captured]):
        check_tells_apart(hook)
    for hook, at_point in edits.items():
        for _, fn in at_point:
            if isinstance(fn, Operation):
                fn.check_alone(hook)
    failed: list[PackedRequest] = []
    good: list[PackedRequest] = []
    for index, prompt in enumerate(prompts):
        request = PackedRequest(index, list(prompt), Generation(len(prompt)))
        request.error = _cannot(bridge, request.prompt, options.max_new_tokens)
        (good if request.error is None else failed).append(request)
    if good or turns is not None:
        refuse_context_parallel()
        if sharing is not None:
            sharing.check_alike([[hook.name for hook in (*edits, *captured)], prompts, options.max_new_tokens])
        check_batches(bridge, turns)
    if not good:
        if turns is not None:
            turns.end()
        return iter([_answer(bridge, request, [], ()) for request in failed])
    answers = _answers(_Batch(bridge, good, edits, captured, options, turns=turns), failed)
    next(answers)  # from here on its end is seen to, whether or not it is gone through
    # Where processes share the model, nothing else may be asked of it meanwhile: all are made before one is given.
    return answers if sharing is None else iter(list(answers))


def _check_engine_takes(core: Any) -> None:
    """Refuses a model that transformers' engine does not take at all.

    Raises:
        ValueError: it is one.
    """
    if (plain := getattr(core, "plain_module", None)) is not None:
        raise ValueError(
            f"{type(plain).__name__} cannot generate many requests at once: it takes no cache of transformers'. "
            "bridge.generate continues several prompts of one length, each as it would be alone"
        )
    if core.config.is_encoder_decoder or not hasattr(core, "init_continuous_batching"):
        raise ValueError(
            f"{type(core).__name__} cannot generate many requests at once: transformers' continuous batching is "
            f"for decoders alone. {_INSTEAD}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Whether transformers' engine makes of several requests what it makes of each: it may be asked for any model.
# ----------------------------------------------------------------------------------------------------------------------


#: What works where this does not.
_INSTEAD = "bridge.generate continues several prompts in one padded batch, each as it would be alone"
#: For each model what was found, by its attention and type: why it cannot be batched; "": it can.
_PROVED: WeakKeyDictionary[nn.Module, dict[tuple[str | None, torch.dtype], str]] = WeakKeyDictionary()
#: Lengths of the prompts of a proof, and how many tokens follow each.
_PROOF, _PROOF_NEW = (7, 2, 4), 3


def _pass_of_nothing(bridge: RunnableBridge, number: int) -> None:
    """The model's own forward of one token, for what other processes need of this one in theirs."""
    with torch.no_grad(), without_hooks():
        bridge.core(input_ids=torch.zeros((1, 1), dtype=torch.long, device=input_device(bridge.core)), use_cache=False)


def check_batches(bridge: RunnableBridge, turns: Turns | None = None) -> None:
    """Refuses a model of which several requests at once are not what each is alone: tried once for each model.

    Args:
        bridge: the bridge.
        turns: of processes that have requests of their own.

    Raises:
        ValueError: it is one.
    """
    core = bridge.core
    found = _PROVED.setdefault(core, {})
    key = (core.config._attn_implementation, core.dtype)
    if key not in found:
        found[key] = _why_not(bridge, turns)
    if found[key]:
        raise ValueError(
            f"generate_batch cannot be had of {type(core).__name__} ({_layer_kinds(bridge)}): {found[key]}. {_INSTEAD}"
        )


def _layer_kinds(bridge: RunnableBridge) -> str:
    """What the layers of a model attend, or mix, with: the classes of these parts."""
    words = re.compile("attention|mixer|mamba|deltanet|recurrent|lstm|rwkv|shortconv", re.IGNORECASE)
    names = dict.fromkeys(type(module).__name__ for module in bridge.core.modules())
    return ", ".join([name for name in names if words.search(name)][:3]) or "layers of its own"


def _why_not(bridge: RunnableBridge, turns: Turns | None) -> str:
    """Why several requests of a model are not what each is alone; "" where they are."""
    core, drawn = bridge.core, torch.Generator().manual_seed(0)
    longest = bridge.cfg.n_ctx
    if longest is not None and longest < max(_PROOF) + _PROOF_NEW:
        return ""
    high = max(2, bridge.cfg.d_vocab)
    prompts = [torch.randint(min(3, high - 1), high, (n,), generator=drawn).tolist() for n in _PROOF]
    options = GenerationOptions(
        max_new_tokens=_PROOF_NEW, stop_at_eos=False, do_sample=False, output_logits=True, verbose=False
    )
    requests = [PackedRequest(i, prompt, Generation(len(prompt))) for i, prompt in enumerate(prompts)]
    with quiet_engine():
        try:
            batch = _Batch(bridge, requests, {}, [], options, proof=True, turns=turns)
            answers = list(_answers(batch, []))[1:]
        except WRONG as error:
            return f"transformers' continuous batching does not take it ({one_line(error)})"
    for answer in answers:
        if answer.error is not None:
            return f"transformers' continuous batching fails with it ({one_line(answer.error)})"
        assert answer.logits is not None
        sequence = torch.tensor([[*prompts[answer.index], *answer.tokens.tolist()]], device=input_device(core))
        with torch.no_grad(), without_hooks():
            alone = core(input_ids=sequence, use_cache=False).logits[0, len(prompts[answer.index]) - 1 : -1].float()
        if off := distance(answer.logits.float(), alone, core.dtype):
            return (
                f"of {len(prompts)} requests at once each has other logits than alone (off by {off}), for "
                "transformers' continuous batching needs attention that goes through its interface"
            )
    return ""


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Without what transformers' engine logs of an error that is told otherwise."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _edits(
    bridge: RunnableBridge, interventions: Sequence[HookSpec], each: Sequence[Sequence[HookSpec]] | None, requests: int
) -> dict[HookPoint, list[Edit]]:
    """The functions at each hook point: those that a run would call now, those of all requests, those of each."""
    if each is not None and len(each) != requests:
        raise ValueError(f"each has {len(each)} sets of interventions, and there are {requests} prompts")
    found: dict[HookPoint, list[Edit]] = {}
    for hook in bridge.wiring.points.values():
        for listener in hook.visible_listeners() if hook.listeners else ():
            if listener.kind in ("bwd", "edge", "follow"):
                raise ValueError(
                    f"{hook.name} has a hook of gradients, or a module in its place, which no generation of many "
                    "requests has a place for: take it away"
                )
            if listener.kind == "fwd":
                found.setdefault(hook, []).append((None, listener.fn))
    for who, specs in [(None, interventions), *enumerate(each or ())]:
        check_specs("interventions" if who is None else f"each[{who}]", specs)
        for names, fn in specs:
            for hook in bridge.select_hooks(names):
                found.setdefault(hook, []).append((who, checked_function(hook, fn)))
    return found


def _cannot(bridge: RunnableBridge, prompt: Sequence[int], new: int) -> ValueError | None:
    """Why a prompt cannot be continued; None where it can."""
    if not prompt:
        return ValueError("the prompt has no tokens")
    longest = bridge.cfg.n_ctx
    if longest is not None and len(prompt) + new > longest:
        return ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens={new}; {bridge.cfg.model_name} has a context of "
            f"{longest}"
        )
    try:
        check_ids(bridge.wiring.embedding, bridge.cfg, torch.tensor([list(prompt)]), "the prompt")
    except ValueError as error:
        return error
    return None


def _leave_causal(arguments: Kwargs) -> None:
    """Takes away what the mask says anyway, and what would change the configuration of the model, for all threads."""
    if arguments.get("is_causal") is False:
        del arguments["is_causal"]


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
        self.others = turns
        self.bridge, self.requests, self.captured, self.options = bridge, requests, captured, options
        sharing = bridge.wiring.sharing
        self.retries = not proof and len(requests) > 1 and sharing is None
        lengths = [len(request.prompt) for request in requests]
        free = free_memory(bridge.core.device)
        free = free if sharing is None else sharing.least(free)
        self.room = capacity_for(bridge.core, lengths, options.max_new_tokens, free)
        self.by_id = {str(request.index): request for request in requests}
        self.edits = edits
        self._attention = _ExchangedAttention(bridge.core)
        looked_at = bool(edits or captured or options.output_logits)
        #: No function is called in a pass: compilation and the sharing of pages stay as transformers has them.
        self._free = not looked_at and sharing is None and not self._attention.is_exchanged
        self._edited = {who for at_point in edits.values() for who, _ in at_point}  # None among them: all are
        self._waiting = deque(requests)
        self._under_way: dict[str, PackedRequest] = {}
        self._lock = threading.Lock()
        self._packed: Packed | None = None
        self._pass: ForwardPass | None = None
        self._passing: int | None = None  # the thread of our pass
        self._turns = threading.local()
        self._is_over = False
        self._whole_logits = any(hook.name.startswith("unembed") for hook in (*edits, *captured))
        self.scope = Scope()
        self._gave_whole_logits = False
        self._handles: list[Any] = []
        self._manager: ContinuousBatchingManager | None = None
        core = bridge.core
        _take(core)
        try:
            with _TURN:  # no torch hook comes or goes while another batch's pass is under way
                if not self._free:
                    self._handles = [
                        core.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                        core.register_forward_hook(self._end, with_kwargs=True, always_call=True),
                    ]
            if self._attention.is_exchanged:
                self._attention.wait_for_others()
            with _TURN if self._attention.is_exchanged else nullcontext():
                self._manager = self._made_manager(
                    GenerationConfig() if proof else copy.deepcopy(core.generation_config)
                )
        except BaseException:
            self.stop()
            raise

    @property
    def manager(self) -> ContinuousBatchingManager:
        assert self._manager is not None
        return self._manager

    def _made_manager(self, config: GenerationConfig) -> ContinuousBatchingManager:
        core, options = self.bridge.core, self.options
        sampling = {name: getattr(options, name) for name in ("do_sample", "top_k", "top_p", "temperature")}
        config.update(**{name: value for name, value in sampling.items() if value is not None})
        ending = config.eos_token_id if options.eos_token_id is None else options.eos_token_id
        config.eos_token_id = -1 if ending is None or not options.stop_at_eos else ending
        config.max_new_tokens = options.max_new_tokens
        for name in ("num_beams", "num_return_sequences"):
            if (getattr(config, name, None) or 1) != 1:
                raise ValueError(f"{name} is {getattr(config, name)}; generate_batch makes one sequence of each prompt")
        if config.begin_suppress_tokens is not None:  # transformers' engine ends in an error
            raise ValueError(
                "begin_suppress_tokens cannot be had in generate_batch, which knows no length of a prompt: use "
                "bridge.generate"
            )
        manager: ContinuousBatchingManager = core.init_continuous_batching(  # type: ignore[operator]
            generation_config=config, continuous_batching_config=self.room.config(len(self.requests), self._free)
        )
        # transformers takes it from elsewhere; with functions, ours or torch hooks, nothing is compiled: code that was
        # compiled before does not know them.
        compiled = config.compile_config if self._free and not has_other_hooks(core) else None
        manager.continuous_batching_config.varlen_compile_config = compiled
        manager.continuous_batching_config.decode_compile_config = None
        try:
            unsupported = [
                type(processor).__name__
                for processor in manager.logit_processor.logits_processor
                if getattr(processor, "supports_continuous_batching", None) is not True
            ]
            if unsupported:
                raise ValueError(
                    f"{', '.join(unsupported)} cannot be had in generate_batch, which transformers says of it: use "
                    "bridge.generate"
                )
            manager.batch_processor = manager._create_batch_processor()  # what the thread would refuse is refused here
        except BaseException:
            manager.destroy()
            self._attention.give_back()
            raise
        self._attention.note_engines()
        manager._original_attn_impl = None  # it would give every part of the model the attention of the whole
        assert manager.batch_processor is not None
        cache = manager.batch_processor.cache
        mark_as_of_batch(cache)
        if self._free:
            runner = manager.batch_processor.model_runner
            runner.compute_batch = partial(self._free_pass, runner, runner.compute_batch)  # type: ignore[method-assign]
        if self.edits:
            cache.update = partial(self._update, cache.update)  # type: ignore[method-assign]
        return manager

    def _free_pass(
        self, runner: ModelRunner, compute: Callable[..., None], model: nn.Module, batch: dict[str, Any]
    ) -> None:
        """A pass that nobody looks into: what may be compiled is the model's own, with nothing of ours inside.

        Where functions of other threads are attached, or what they change meanwhile ends the compilation, it is made
        uncompiled: it writes the same keys, values and tokens. Where it would not, it is not compiled: of a window, a
        part of a prompt overwrites what it reads.
        """
        compiled = runner._compiled_varlen
        packing = runner.inputs_and_outputs
        assert isinstance(packing, ContinuousBatchingIOs)  # the other kind is of asynchronous batching
        states = packing.requests_in_batch
        parts = any(part.query_length not in (1, part.state.position_offset) for part in states)  # behind others
        again = not parts or runner.cache.use_prefix_sharing  # which no model with windows has
        with _TURN:
            begun = ForwardPass()
            self._set_run(begun)
            _leave_causal(batch)
            try:
                if compiled is not None and again and not self.bridge.wiring.listening:
                    try:
                        return compute(model, batch)
                    except (AssertionError, RuntimeError) as error:
                        said = f"a compiled pass of generate_batch failed, and is made uncompiled ({one_line(error)})"
                        warnings.warn(said, stacklevel=1)
                runner._compiled_varlen = None
                compute(model, batch)
            finally:
                runner._compiled_varlen = compiled
                begun.end()
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
        """Keys and values go where all requests' are; first, those that are no numbers end their request.

        They would reach everybody: attention multiplies what it does not attend to by a weight of zero.
        """
        keys, values = key_states, value_states
        if self._packed is not None and (is_wrong(keys) or is_wrong(values)):
            keys, values = keys.clone(), values.clone()
            for part in self._packed.parts:
                mine = slice(*part.queries)
                if self._is_edited(part.request) and (is_wrong(keys[:, :, mine]) or is_wrong(values[:, :, mine])):
                    keys[:, :, mine] = values[:, :, mine] = 0
                    what = f"what keys and values of layer {layer_idx} are made of"
                    self.fail(part.request, not_finite(part.request, what))
        return update(keys, values, layer_idx, *rest, **more)

    def _is_edited(self, request: PackedRequest) -> bool:
        return None in self._edited or request.index in self._edited

    def start(self) -> None:
        """Attaches what listens, and begins."""
        wiring = self.bridge.wiring
        if self.edits or self.captured:
            wiring.check_in_place()
        members = []
        for hook in dict.fromkeys([*self.edits, *self.captured]):
            edits = self.edits.get(hook, ())
            at_point = PackedHook(self._now, edits, hook in self.captured, self.fail)
            members.append((hook, Listener("fwd" if edits else "read", at_point, self.scope)))
        for hook, name in read_by([*self.edits, *self.captured]).items():
            members.append((wiring.points[name], Listener("read", TellsApart(self._now, hook, self.fail), self.scope)))
        with _TURN:
            wiring.attach_members(members, self.scope)
        if self._free and not self.manager.generation_config.do_sample:  # what is drawn depends on who comes first
            self._waiting = deque(sorted(self._waiting, key=lambda request: request.prompt))
        self.manager.start()
        self.feed()

    def stop(self) -> None:
        """Ends it, and takes away what was attached."""
        try:
            self._waiting.clear()
            if self._manager is not None:
                if self._manager.is_running():
                    self._manager.cancel_request("")  # wakes it: it would look for new ones in a tenth of a second
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
        """Lets in as many requests as fit: all their pages in memory; all tokens of their prompts in one pass."""
        with self._lock:
            new = self.options.max_new_tokens
            under_way = self._under_way.values()
            tokens = sum(1 if request.started else len(request.prompt) for request in under_way)
            pages = sum(self.room.pages_of(len(request.prompt), new) for request in under_way)
            while self._waiting:
                request = self._waiting[0]
                tokens += len(request.prompt)
                pages += self.room.pages_of(len(request.prompt), new)
                if (tokens > self.room.tokens and not self._free) or pages > self.room.pages:
                    return
                self._waiting.popleft()
                self._under_way[str(request.index)] = request
                self.manager.add_request(request.prompt, request_id=str(request.index))

    def finished(self) -> Iterator[tuple[PackedRequest, Sequence[int], BaseException | None]]:
        """The requests as they end, each with its new tokens, and what ended the pass that it was in.

        Raises:
            RuntimeError: the thread that generates has ended, and nobody says of what.
        """
        left = set(self.by_id)
        while left:
            result = self.manager.get_result(timeout=0.2)
            status = self.manager.background_thread_status
            if result is None and self.manager.is_running():
                continue
            if result is None:
                fatal = status.fatal_error or RuntimeError("the thread that generates has ended")
                yield from ((self.by_id[name], [], fatal) for name in sorted(left))
                return
            request = self.by_id[result.request_id]
            left.discard(result.request_id)
            self.done(request)
            error = None if result.error is None else status.fatal_error or RuntimeError(result.error)
            yield request, result.generated_tokens, error

    def done(self, request: PackedRequest) -> None:
        """A request needs no room any more."""
        with self._lock:
            self._under_way.pop(str(request.index), None)
        self.feed()

    def fail(self, request: PackedRequest, error: BaseException) -> None:
        """Ends one request alone, for what its function raised; the first reason is the one that is told."""
        if request.error is None:
            request.error = error

    def _set_run(self, run: ForwardPass | None) -> None:
        """Says in which pass the functions are that are called from here on, in the engine's thread."""
        CURRENT.set(RunContext(frozenset((self.scope,)), run=run))

    def _now(self) -> Packed:
        assert self._packed is not None
        return self._packed

    def _is_ours(self, kwargs: Mapping[str, Any]) -> bool:
        processor = None if self._manager is None else self._manager.batch_processor
        return processor is not None and kwargs.get("cache") is processor.cache

    # `kwargs` is missing where this hook came, or went, while another thread's pass was already under way.
    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> Any:
        """The pass begins, when no other is under way: whose tokens are in it, in which context its hooks run."""
        if kwargs is None:
            return None
        ours = self._is_ours(kwargs)
        if self._passing == threading.get_ident():
            raise RuntimeError(
                "a function of generate_batch runs the model inside of a pass of many requests, whose functions would "
                "see that run too: run it before or afterwards"
            )
        if not (ours or self._attention.is_exchanged):
            return None
        _TURN.acquire()
        if self._is_over:  # this waited while the hooks were removed: nothing would give the turn back
            _TURN.release()
            return None
        self._turns.taken = getattr(self._turns, "taken", 0) + 1
        if not ours:
            return None
        self._attention.exchange()
        self._passing = threading.get_ident()
        processor = self.manager.batch_processor
        assert processor is not None
        packing = processor.inputs_and_outputs
        assert isinstance(packing, ContinuousBatchingIOs)  # the other kind is of asynchronous batching
        states = packing.requests_in_batch
        self._packed = Packed.of([self.by_id[state.state.request_id] for state in states], kwargs)
        for part, state in zip(self._packed.parts, states, strict=True):
            if not state.has_new_token or (part.first and not part.request.started):
                raise RuntimeError(
                    f"request {part.request.index} was split over several passes, though room for it was left: its "
                    "functions would see parts of it"
                )
            part.request.started = True
        self._pass = ForwardPass()
        self._pass.gradients = False
        self._set_run(self._pass)
        self.feed()
        if self.others is not None:
            self.others.take(1)
        self._gave_whole_logits = self._whole_logits and "logits_to_keep" in kwargs
        left = dict(kwargs)
        if self._gave_whole_logits:
            del left["logits_to_keep"]
        _leave_causal(left)
        return args, left

    def _end(self, module: nn.Module, args: Args, *more: Any) -> Any:
        """The pass is over: `more` is what it was called with by name (see `_begin`), and what it gave."""
        kwargs, output = more[0] if len(more) > 1 else {}, more[-1]
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
        """What is left of our pass, and what it gives."""
        assert self._pass is not None
        self._pass.end()
        self._pass = None
        self._set_run(None)
        if output is None:  # it raised
            return None
        if self.others is not None:
            self.others.under_way = False
        assert self._packed is not None
        chosen = output.logits
        if chosen.shape[1] != len(self._packed.parts):
            chosen = chosen[:, kwargs["logits_indices"].long()]
        if self.edits:
            chosen = self._without_wrong_logits(chosen, self._packed.parts)
            if not self._gave_whole_logits and chosen.shape == output.logits.shape:
                output.logits = chosen
        if self.options.output_logits:
            for part, logits in zip(self._packed.parts, chosen[0].detach(), strict=True):
                part.request.logits.append(logits.clone())
        if self._gave_whole_logits:
            output.logits = chosen  # what runs the model has asked for no others
        return output

    def _without_wrong_logits(self, logits: Tensor, parts: Sequence[RequestPart]) -> Tensor:
        """Logits to draw tokens from: those of a request that are no numbers end it, and nothing is drawn from them."""
        if not is_wrong(logits, masks=True):
            return logits
        logits = logits.clone()
        for row, part in enumerate(parts):
            if self._is_edited(part.request) and is_wrong(logits[:, row], masks=True):
                logits[:, row] = 0
                self.fail(part.request, not_finite(part.request, "what logits are made of"))
        return logits


def _answers(batch: _Batch, failed: Sequence[PackedRequest]) -> Iterator[Answer]:
    """The answers in the order in which they are found. What it gives first is nothing: it has begun."""
    bridge, options = batch.bridge, batch.options
    bar = tqdm(total=len(batch.requests) + len(failed), desc="requests", unit="request", disable=not options.verbose)
    again: list[PackedRequest] = []
    with bar:
        try:
            yield Answer(-1, torch.tensor([]))
            for request in failed:
                bar.update()
                yield _answer(bridge, request, [], ())
            batch.start()
            for request, tokens, error in batch.finished():
                if error is not None and request.error is None:
                    if batch.retries:  # somebody's edits ended the pass of all: each shows for itself
                        again.append(request)
                        continue
                    if batch.others is not None and batch.others.under_way:
                        raise RuntimeError("a pass broke off, and other processes wait in it: end all") from error
                    request.error = error
                bar.update()
                yield _answer(bridge, request, tokens, batch.captured, options.output_logits)
        finally:
            batch.stop()
            if batch.others is not None:
                batch.others.end()
        for request in again:
            anew = PackedRequest(request.index, request.prompt, Generation(len(request.prompt)))
            one = _answers(_Batch(bridge, [anew], batch.edits, batch.captured, replace(options, verbose=False)), [])
            next(one)
            for answer in one:
                bar.update()
                yield answer


def _answer(
    bridge: RunnableBridge,
    request: PackedRequest,
    tokens: Sequence[int],
    captured: Sequence[HookPoint],
    logits: bool = False,
) -> Answer:
    new = torch.tensor(list(tokens), dtype=torch.long)
    if request.error is not None:
        return Answer(request.index, new[:0], error=request.error)
    cache = None
    if captured:
        cache = ActivationCache({hook.name: together(request.kept.pop(hook.name), hook) for hook in captured}, bridge)
    return Answer(
        request.index,
        new,
        None if bridge.tokenizer is None else decode(bridge, new.tolist()),
        cache,
        torch.stack(request.logits) if logits else None,
    )
