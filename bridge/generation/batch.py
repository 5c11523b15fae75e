"""Many requests at once: transformers' continuous batching, with hooks and caches for each request."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from adapters.imports import check_batching
from adapters.spread import refuse_context_parallel
from bridge.bases.bases import read_by
from bridge.cache import ActivationCache
from bridge.generation.options import RunnableBridge, check_generates, decode
from bridge.generation.packed import Edit, Packed, PackedHook, PackedRequest, TellsApart, check_tells_apart, together
from bridge.hooks.arguments import check_positive, shown
from bridge.hooks.context import CURRENT, ForwardPass, Generation, Listener, RunContext, Scope
from bridge.hooks.hooks import HookPoint, checked_function
from bridge.hooks.names import NamesFilter
from bridge.interventions.operations import Operation
from bridge.run.inputs import HookSpec
from bridge.run.recorder import free_memory
from bridge.run.run import check_specs
from bridge.run.tokenization import TextOptions, batch_of, check_ids

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

    def config(self, requests: int) -> ContinuousBatchingConfig:
        """The same for transformers, with what hooks need: a forward pass in each step, pages of each request alone.

        Args:
            requests: how many there are.
        """
        return ContinuousBatchingConfig(
            page_size=self.page,
            num_blocks=self.pages,
            max_batch_tokens=self.tokens,
            max_requests_per_batch=min(requests, self.tokens),
            max_blocks_per_request=0,
            allow_block_sharing=False,  # keys and values behind an edit are those of its request
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


#: A packed pass has the model's configuration say that it is not causal until it is over (transformers 5.23). No other
#: pass of the model may begin meanwhile: it would see later tokens.
_TURN = threading.RLock()


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


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What `TransformerBridge.generate_batch` is told besides prompts and interventions; see there."""

    max_new_tokens: int
    capture: NamesFilter
    stop_at_eos: bool
    eos_token_id: int | Sequence[int] | None
    sampling: Mapping[str, Any]
    output_logits: bool
    verbose: bool


def prompts_of(
    bridge: RunnableBridge,
    prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
    bos: bool | None,
) -> list[list[int]]:
    """Prompts as tokens, without padding.

    Args:
        bridge: the bridge.
        prompts: texts, or tokens.
        bos: whether texts start with BOS; None: what the model says.

    Raises:
        TypeError: something else.
    """
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
    return found


def generate_batch(
    bridge: RunnableBridge,
    prompts: Sequence[Sequence[int]],
    interventions: Sequence[HookSpec],
    each: Sequence[Sequence[HookSpec]] | None,
    options: BatchOptions,
) -> Iterator[Answer]:
    """Continues many prompts at once; see `TransformerBridge.generate_batch`. Everything is checked before it returns.

    Args:
        bridge: the bridge.
        prompts: as tokens.
        interventions, each, options: as there.
    """
    if (sharing := bridge.wiring.sharing) is not None:
        sharing.refuse("generate_batch", own_rows_alone=True)
    check_batching()
    check_generates(bridge)
    if bridge.core.config.is_encoder_decoder or not hasattr(bridge.core, "init_continuous_batching"):
        raise ValueError(f"{type(bridge.core).__name__} cannot generate many requests at once: use bridge.generate")
    check_positive("max_new_tokens", options.max_new_tokens)
    edits = _edits(bridge, interventions, each, len(prompts))
    none = isinstance(options.capture, Sequence) and not isinstance(options.capture, str) and not options.capture
    captured = [] if options.capture is None or none else bridge.select_hooks(options.capture)
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
    if not good:
        return iter([_answer(bridge, request, [], ()) for request in failed])
    lengths = [len(request.prompt) for request in good]
    free = free_memory(bridge.core.device)
    refuse_context_parallel()
    if sharing is not None:
        sharing.check_alike([[hook.name for hook in (*edits, *captured)], prompts, options.max_new_tokens])
        free = sharing.least(free)
    room = capacity_for(bridge.core, lengths, options.max_new_tokens, free)
    batch = _Batch(bridge, good, edits, captured, options, room)
    answers = _answers(batch, failed)
    # Where processes share the model, nothing else may be asked of it meanwhile: all are made before one is given.
    return answers if sharing is None else iter(list(answers))


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


class _Batch:
    """The requests of one call, transformers' manager of them, and the hooks of the passes."""

    def __init__(
        self,
        bridge: RunnableBridge,
        requests: Sequence[PackedRequest],
        edits: Mapping[HookPoint, Sequence[Edit]],
        captured: Sequence[HookPoint],
        options: BatchOptions,
        room: Capacity,
    ) -> None:
        self.bridge, self.requests, self.captured, self.options, self.room = bridge, requests, captured, options, room
        self.by_id = {str(request.index): request for request in requests}
        self._edits = edits
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
        self.manager = self._made_manager()

    def _made_manager(self) -> ContinuousBatchingManager:
        core, options = self.bridge.core, self.options
        attention = core.config._attn_implementation
        config: GenerationConfig = copy.deepcopy(core.generation_config)
        given = {name: value for name, value in options.sampling.items() if value is not None}
        unknown = config.update(**given)
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: no argument of generate_batch, and no field of GenerationConfig")
        ending = config.eos_token_id if options.eos_token_id is None else options.eos_token_id
        config.eos_token_id = -1 if ending is None or not options.stop_at_eos else ending
        config.max_new_tokens = options.max_new_tokens
        for name in ("num_beams", "num_return_sequences"):
            if (getattr(config, name, None) or 1) != 1:
                raise ValueError(f"{name} is {getattr(config, name)}; generate_batch makes one sequence of each prompt")
        manager: ContinuousBatchingManager = core.init_continuous_batching(  # type: ignore[operator]
            generation_config=config, continuous_batching_config=self.room.config(len(self.requests))
        )
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
            manager.warmup()  # makes what the thread would make: what it refuses is refused here
        except BaseException:
            manager.destroy()
            if core.config._attn_implementation != attention:  # a manager that was not started does not give it back
                core.set_attn_implementation(attention)
            raise
        return manager

    def start(self) -> list[Any]:
        """Attaches the hooks and begins; returns what to remove."""
        wiring, core = self.bridge.wiring, self.bridge.core
        if self._edits or self.captured:
            wiring.check_in_place()
        members = []
        for hook in dict.fromkeys([*self._edits, *self.captured]):
            edits = self._edits.get(hook, ())
            at_point = PackedHook(self._now, edits, hook in self.captured, self.fail)
            members.append((hook, Listener("fwd" if edits else "read", at_point, self.scope)))
        for hook, name in read_by([*self._edits, *self.captured]).items():
            members.append((wiring.points[name], Listener("read", TellsApart(self._now, hook), self.scope)))
        wiring.attach_members(members, self.scope)
        handles = [
            core.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            core.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]
        self.manager.start()
        self.feed()
        return handles

    def stop(self, handles: Sequence[Any]) -> None:
        """Ends it, and takes away what `start` attached."""
        self._waiting.clear()
        self.manager.stop(block=True, hard_stop=True)
        self.manager.destroy()
        with _TURN:
            self._is_over = True
            for handle in handles:
                handle.remove()
        self.bridge.wiring.detach_scope(self.scope)

    def feed(self) -> None:
        """Lets in as many requests as fit: all tokens of their prompts in one pass, all their pages in memory."""
        with self._lock:
            new = self.options.max_new_tokens
            under_way = self._under_way.values()
            tokens = sum(1 if request.started else len(request.prompt) for request in under_way)
            pages = sum(self.room.pages_of(len(request.prompt), new) for request in under_way)
            while self._waiting:
                request = self._waiting[0]
                tokens += len(request.prompt)
                pages += self.room.pages_of(len(request.prompt), new)
                if tokens > self.room.tokens or pages > self.room.pages:
                    return
                self._waiting.popleft()
                self._under_way[str(request.index)] = request
                self.manager.add_request(request.prompt, request_id=str(request.index))

    def done(self, request: PackedRequest) -> None:
        """A request needs no room any more."""
        with self._lock:
            self._under_way.pop(str(request.index), None)
        self.feed()

    def fail(self, request: PackedRequest, error: BaseException) -> None:
        """Ends one request alone, for what its function raised."""
        request.error = error

    def _now(self) -> Packed:
        assert self._packed is not None
        return self._packed

    def _is_ours(self, kwargs: Mapping[str, Any]) -> bool:
        processor = self.manager.batch_processor
        return processor is not None and kwargs.get("cache") is processor.cache

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass begins, when no other is under way: whose tokens are in it, in which context its hooks run."""
        ours = self._is_ours(kwargs)
        if self._passing == threading.get_ident():
            raise RuntimeError(
                "a function of generate_batch runs the model inside of a pass of many requests, in which it is not "
                "causal: run it before or afterwards"
            )
        _TURN.acquire()
        if self._is_over:  # this waited while the hooks were removed: nothing would give the turn back
            _TURN.release()
            return None
        self._turns.taken = getattr(self._turns, "taken", 0) + 1
        if not ours:
            return None
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
        CURRENT.set(RunContext(frozenset((self.scope,)), run=self._pass))
        self.feed()
        self._gave_whole_logits = self._whole_logits and "logits_to_keep" in kwargs
        if self._gave_whole_logits:
            return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}
        return None

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The pass is over."""
        ours = self._is_ours(kwargs)
        if not ours and self._passing == threading.get_ident():
            return None  # it was refused
        try:
            return self._ended(kwargs, output) if ours and self._pass is not None else None
        finally:
            if ours:
                self._passing = None
            if getattr(self._turns, "taken", 0):
                self._turns.taken -= 1
                _TURN.release()

    def _ended(self, kwargs: dict[str, Any], output: Any) -> Any:
        """What is left of our pass, and what it gives."""
        assert self._pass is not None
        self._pass.end()
        self._pass = None
        CURRENT.set(RunContext(frozenset((self.scope,))))
        if output is None:  # it raised
            return None
        assert self._packed is not None
        chosen = output.logits
        if chosen.shape[1] != len(self._packed.parts):
            chosen = chosen[:, kwargs["logits_indices"].long()]
        if self.options.output_logits:
            for part, logits in zip(self._packed.parts, chosen[0].detach(), strict=True):
                part.request.logits.append(logits.clone())
        if self._gave_whole_logits:
            output.logits = chosen  # what runs the model has asked for no others
        return output


def _answers(batch: _Batch, failed: Sequence[PackedRequest]) -> Iterator[Answer]:
    bridge, options = batch.bridge, batch.options
    bar = tqdm(total=len(batch.requests) + len(failed), desc="requests", unit="request", disable=not options.verbose)
    handles: list[Any] = []
    try:
        with bar:
            for request in failed:
                bar.update()
                yield _answer(bridge, request, [], ())
            handles = batch.start()
            left = {str(request.index) for request in batch.requests}
            while left:
                result = batch.manager.get_result(timeout=0.2)
                if result is None:
                    if batch.manager.is_running():
                        continue
                    raise RuntimeError(
                        "the thread that generates has ended"
                    ) from batch.manager.background_thread_status.fatal_error
                request = batch.by_id[result.request_id]
                left.discard(result.request_id)
                batch.done(request)
                if result.error is not None and request.error is None:
                    request.error = batch.manager.background_thread_status.fatal_error or RuntimeError(result.error)
                bar.update()
                yield _answer(bridge, request, result.generated_tokens, batch.captured, options.output_logits)
    finally:
        batch.stop(handles)


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
