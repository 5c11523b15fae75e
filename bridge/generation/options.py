"""How to generate: from a user's arguments to those of the model's own `generate`."""

from __future__ import annotations

import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from adapters.inputs import accepted_arguments, accepted_by, gives_cache, takes, with_past_named
from adapters.linear import input_device
from adapters.observe.observe import WRONG, one_line
from adapters.views import Kwargs
from bridge.hooks.arguments import check_choice, check_types
from bridge.hooks.context import Generation, without_hooks
from bridge.hooks.names import NamesFilter, suggestion
from bridge.hooks.rows import BatchRows, Side, check_said, check_zero_or_one
from bridge.run.inputs import TAKEN_BY, Input, RunnableBridge, added_around, embeddings_given
from bridge.run.tokenization import (
    HasTokenizer,
    TextOptions,
    as_tokens,
    batch_of,
    check_embeddings,
    check_ids,
    texts_in,
)
from bridge.wiring.compiled import has_other_hooks

# ----------------------------------------------------------------------------------------------------------------------
# What generation starts from, and what it returns: padding in front of rows, texts, rows without padding.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class GenerationPrompt:
    """What generation starts from.

    Attributes:
        kwargs: the prompt as arguments of the model's `generate`.
        tokens: ``[batch, pos]``, with padding where generation needs it; None for embeddings.
        rows: how its rows lie.
        to_the_right: the user wants padding behind the rows.
        kind: ``"str"``, ``"list"`` or ``"tokens"``: what the user passed.
    """

    kwargs: Kwargs
    tokens: Tensor | None
    rows: BatchRows
    to_the_right: bool
    kind: str


def prompt_of(
    bridge: RunnableBridge,
    input: Input,
    options: TextOptions,
    mask: Shaped[Tensor, "batch pos"] | None,
    more: Kwargs | None,
) -> GenerationPrompt:
    """The prompt with padding where generation needs it: in front of a decoder's tokens, behind an encoder's.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: how text becomes tokens; its side is that of what is returned.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding.
        more: further arguments of the model; what goes along the tokens is moved with them.

    Raises:
        ValueError: an unknown side; a mask that does not fit; no tokens; an argument of which nobody knows whether it
            goes along the tokens, where these have to be moved.
    """
    where, core, more = input_device(bridge.core), bridge.core, {} if more is None else more
    check_choice("padding_side", options.padding_side, (None, "left", "right"))
    if takes(core).main is not None:
        prompt = _behind_images_or_sound(bridge, input, options, mask)
        prompt.rows.note(more)
        return prompt
    if mask is not None:
        check_zero_or_one("attention_mask", mask)
        mask = mask.long().to(where)
    side: Side = "right" if core.config.is_encoder_decoder else "left"
    texts, embedded = texts_in(input), isinstance(input, Tensor) and input.is_floating_point()
    tokens: Tensor | None = None
    if embedded:
        assert isinstance(input, Tensor)
        check_embeddings(core, input)
        input = embeddings_given(bridge, input, {"inputs_embeds": more.pop("inputs_embeds", None)})
        given = {"inputs_embeds": (input if input.ndim == 3 else input[None]).to(where)}
    else:
        if texts is None:
            tokens = as_tokens(input)
        else:
            batch = batch_of(bridge, texts, options._replace(padding_side=side))
            # Without a mask transformers would take a padding token for one that is not meant.
            tokens, mask = batch.tokens, torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
            mask = mask.to(where)
        check_ids(bridge.wiring.embedding, bridge.cfg, tokens, "the prompt")
        given = {"input_ids": tokens.to(where)}
    shape = next(iter(given.values())).shape[:2]
    if mask is not None:
        if mask.shape != shape:
            raise ValueError(f"attention_mask has shape {list(mask.shape)}; the tokens have {list(shape)}")
        given["attention_mask"] = mask
    behind = options.padding_side == "right"
    if options.padding_side is None and texts is None and mask is not None:
        behind = bool((mask[:, -1] == 0).any())
    everything = {**more, **given}
    rows = BatchRows(core, everything)
    rows.arrange(everything, side)
    more.update((name, everything[name]) for name in more)
    kind = "tokens" if texts is None else "str" if isinstance(input, str) else "list"
    return GenerationPrompt({name: everything[name] for name in given}, everything.get("input_ids"), rows, behind, kind)


def _behind_images_or_sound(
    bridge: RunnableBridge, input: Input, options: TextOptions, mask: Tensor | None
) -> GenerationPrompt:
    """The prompt of a model whose first blocks read images or sound: these, or what its decoder begins with.

    Raises:
        TypeError: text or tokens for a model that reads none.
    """
    taken, where = takes(bridge.core), input_device(bridge.core)
    given: Kwargs = {} if mask is None else {"attention_mask": mask.to(where)}
    if isinstance(input, Tensor) and input.is_floating_point():
        given[taken.main or ""] = input.to(where)
        return GenerationPrompt(given, None, BatchRows(bridge.core, given), False, "tokens")
    if isinstance(input, str) and not input:  # the images or the sound alone, by their name
        return GenerationPrompt(given, None, BatchRows(bridge.core, given), False, "str")
    texts = texts_in(input)
    if texts is not None:
        batch = batch_of(bridge, texts, options._replace(padding_side="left"))
        tokens, kind = batch.tokens, "str" if isinstance(input, str) else "list"
        if batch.mask is not None:
            given["decoder_attention_mask"] = batch.mask.to(where)
    else:
        tokens, kind = as_tokens(input), "tokens"
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens, "the prompt")
    given["decoder_input_ids"] = tokens.to(where)
    return GenerationPrompt(given, given["decoder_input_ids"], BatchRows(bridge.core, given), False, kind)


#: For each model what is said of its rows, by its attention, its type and whether they are padded; "": nothing.
_SAID: WeakKeyDictionary[nn.Module, dict[object, str]] = WeakKeyDictionary()


def tell_of_rows(bridge: RunnableBridge, prompt: GenerationPrompt, more: Kwargs) -> None:
    """Warns where a model's own `generate` continues a row otherwise in a batch than alone: tried once for each model.

    Processes that share a model are not asked, for not all of them may have such rows. Nor is a model with torch hooks
    that are not ours: they would see the trial.

    Args:
        bridge, prompt: the bridge, and what it starts from.
        more: the arguments of the model's `generate`.
    """
    core, mask = bridge.core, prompt.rows.masks.get("pos")
    padded = mask is not None and not bool(mask.all())
    mixed = prompt.rows.count > 1 and not gives_cache(core)  # a state of the model's own kind may be of all rows
    if not (padded or mixed) or core.training or bridge.wiring.sharing is not None:
        return
    said = _SAID.setdefault(core, {})
    key = (getattr(core.config, "_attn_implementation", None), core.dtype, padded)
    if key not in said and has_other_hooks(bridge.original_model):
        return
    if key not in said:
        padding, tokens = None, prompt.kwargs.get("input_ids")
        if mask is not None and padded:
            padding = 0 if tokens is None else int(tokens[mask == 0][0])
        begin = {name: more[name] for name in ("decoder_start_token_id",) if name in more}
        said[key] = _said_of_rows(bridge, prompt.kwargs.get(takes(core).main or ""), padding, begin)
    if said[key]:
        instead = "rows of one length together, or one by one" if padded else "one by one"
        warnings.warn(
            f"{said[key]}. The text is that of its own `generate`; for each row's as it is alone, generate {instead}",
            stacklevel=5,
        )


def _said_of_rows(bridge: RunnableBridge, like: Tensor | None, padding: float | None, begin: Kwargs) -> str:
    """What is to be said of a model whose row is another in a batch of two than alone, or cannot be tried; else "".

    Args:
        bridge: the bridge.
        like: what it hears or sees, where that is no tokens.
        padding: of the row; None: it has none.
        begin: what its `generate` has to be told.
    """
    core, drawn, where = bridge.core, torch.Generator().manual_seed(0), input_device(bridge.core)
    name, one = type(getattr(core, "plain_module", core)).__name__, "a row" if padding is None else "a padded row"
    if bridge.cfg.n_ctx is not None and bridge.cfg.n_ctx < 10:
        return ""
    known = (core.config, core.config.get_text_config(), core.generation_config)
    special = {
        each for one in known for name, each in one.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(each, int)
    }  # fmt: skip
    words = torch.tensor([i for i in range(min(bridge.cfg.d_vocab, 2**14)) if i not in (*special, padding)])
    if not len(words):
        return ""
    whole = words[torch.randint(0, len(words), (2, 8), generator=drawn)]
    if like is not None:
        whole = torch.randn(2, *like.shape[1:], generator=drawn).to(like.dtype)
    n = whole.shape[1]
    mine, mask = slice(0, n), torch.ones(2, n, dtype=torch.long)
    if padding is not None:
        mine = slice(0, n // 2) if core.config.is_encoder_decoder or like is not None else slice(n // 2, n)
        mask[1] = 0
        mask[1, mine] = 1
        whole[1][mask[1] == 0] = padding

    def logits(rows: Tensor, mask: Tensor) -> Tensor:
        given = {takes(core).main or "input_ids": rows.to(where)}
        if padding is not None:
            given["attention_mask"] = mask.to(where)
        made = core.generate(  # type: ignore[operator]
            **given, **begin, max_new_tokens=2, do_sample=False, num_beams=1, num_return_sequences=1, eos_token_id=None,
            pad_token_id=core.generation_config.pad_token_id or 0, output_logits=True, return_dict_in_generate=True,
            logits_processor=[lambda ids, scores: scores.index_fill(-1, words[:1].to(where), float("inf"))],
        )  # fmt: skip
        return torch.stack(made.logits)[:, -1].float()

    with torch.no_grad(), without_hooks(), torch.random.fork_rng([where] if where.type == "cuda" else []):
        try:
            together, alone = logits(whole, mask), logits(whole[1:, mine], mask[1:, mine])
        except WRONG as error:
            said = f"whether {name} continues {one} of a batch as it would be alone could not be tried"
            return "" if padding is None else f"{said} ({one_line(error)})"
    off = distance(together, alone, core.dtype)
    return off and f"{name} continues {one} of a batch otherwise than alone (its logits are off by {off})"


def distance(found: Tensor, right: Tensor, dtype: torch.dtype) -> str:
    """How far logits are from those that they should be, relative to these; "" where rounding makes as much.

    Args:
        found, right: of any shape.
        dtype: that they were computed in.
    """
    off = float((found - right).norm() / right.norm().clamp_min(1e-30))
    return "" if off <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.05) else f"{off:.2g}"


def check_return_type(return_type: str | None) -> None:
    """Refuses what `generate` cannot return.

    Raises:
        ValueError: it is none of the known ones.
    """
    check_choice("return_type", return_type, ("input", "str", "tokens", None))


def is_as_text(return_type: str | None, prompt: GenerationPrompt) -> bool:
    """Whether text is to be returned."""
    return return_type == "str" or (return_type == "input" and prompt.kind != "tokens")


def decode(bridge: HasTokenizer, ids: Sequence[int]) -> str:
    """The text of a row of tokens, without those that are no text."""
    tokenizer = bridge.tokenizer_facts.tokenizer
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def rows_of(prompt: GenerationPrompt, sequences: Int[Tensor, "batch pos"]) -> list[Tensor]:
    """Each row of what was generated from a prompt, without the padding in front of it."""
    return list(sequences) if prompt.tokens is None else prompt.rows.stripped(sequences)


def texts_of(bridge: RunnableBridge, rows: Sequence[Tensor], prompt: GenerationPrompt) -> str | list[str]:
    """The text of each row; of one text, its text alone."""
    return of_prompt([decode(bridge, row.tolist()) for row in rows], prompt)


def of_prompt(texts: list[str], prompt: GenerationPrompt) -> str | list[str]:
    """What was made of each row of a prompt; of one text, what was made of it."""
    return texts[0] if prompt.kind == "str" and len(texts) == 1 else texts


def aligned(sequences: Int[Tensor, "batch pos"], prompt: GenerationPrompt) -> Int[Tensor, "batch pos"]:
    """The sequences, with the padding of the prompt on the side that was asked for."""
    if not prompt.to_the_right or prompt.tokens is None:
        return sequences
    return prompt.rows.padded_behind(sequences)


# ----------------------------------------------------------------------------------------------------------------------
# What is done at each step of a generation: counting, stopping, penalties.
# ----------------------------------------------------------------------------------------------------------------------


class Steps(StoppingCriteria):
    """Counts the steps of a generation, moves its progress bar, and ends it when it is called off.

    Args:
        bar: the progress bar.
        generation: what counts them.
    """

    def __init__(self, bar: tqdm, generation: Generation) -> None:
        self.bar = bar
        self.generation = generation
        self.cancelled = False

    def __call__(self, input_ids: Tensor, scores: Tensor | tuple[Tensor, ...] | None, **kwargs: object) -> Tensor:
        self.generation.step += 1
        self.bar.update()
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


def _stops_at(strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Callable[..., Tensor]:
    """A stopping criterion: a row ends when its newest token completes one of some strings, over whatever tokens.

    transformers' own criterion needs each token's text to be the same everywhere in a word, which word-level tokenizers
    do not give it; here the end of the row is decoded.
    """
    several = [strings] if isinstance(strings, str) else list(strings)
    if not all(several):
        raise ValueError(f"stop_strings is {strings!r}; it must be a string, or several, and none of them empty")
    # A token is at least a byte of text; some margin for those that are none.
    window = max(len(string.encode()) for string in several) + 8

    def ends(input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        done = []
        for row in input_ids[:, -window:].tolist():
            now, before = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (row, row[:-1]))
            done.append(any(now.count(string) > before.count(string) for string in several))
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    return ends


def _less_frequent(penalty: float, input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor: the logit of each token less a penalty for every time it stands in the sequence.

    HookedTransformer does so.
    """
    counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
    return scores - penalty * counts


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The arguments of `TransformerBridge.generate` but for the prompt, with the same meaning and defaults."""

    max_new_tokens: int = 10
    stop_at_eos: bool = True
    eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    freq_penalty: float = 0.0
    repetition_penalty: float | None = None
    num_return_sequences: int = 1
    use_past_kv_cache: bool = True
    prepend_bos: bool | None = None
    padding_side: str | None = None
    return_type: str | None = "input"
    output_logits: bool = False
    return_cache: bool = False
    return_input_tokens: bool = False
    stop_strings: str | Sequence[str] | None = None
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None
    names_filter: NamesFilter = None
    device: torch.device | str | None = None
    verbose: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GenerationOptions:
        """From keyword arguments, of which those that are none of ours are `more`."""
        ours = _hints()
        known = {name: value for name, value in arguments.items() if name in ours}
        check_types("generate", known, ours)
        if known.get("max_new_tokens", 1) < 1:
            raise ValueError(f"max_new_tokens is {known['max_new_tokens']}; it must be 1 or more")
        return cls(**known, more={name: value for name, value in arguments.items() if name not in ours})


@functools.cache
def _hints() -> dict[str, Any]:
    """What annotations say of each argument but `more`."""
    return {name: hint for name, hint in typing.get_type_hints(GenerationOptions).items() if name != "more"}


def check_generates(bridge: RunnableBridge) -> None:
    """Refuses a model that does not generate.

    Raises:
        TypeError: it does not.
    """
    if not hasattr(bridge.core, "generate") or not bridge.core.can_generate():
        raise TypeError(f"{type(bridge.core).__name__} does not generate text: transformers gives it no `generate`")


def check_plain_loop(bridge: RunnableBridge, wanted: str, instead: str) -> None:
    """Refuses what needs the steps of a generation to be those of its tokens, where images or sound are made text of.

    Raises:
        ValueError: the class has a `generate` of its own for that.
    """
    own, taken = type(bridge.core), takes(bridge.core)
    if (taken.main is not None or taken.needed) and getattr(own, "generate", None) is not GenerationMixin.generate:
        raise ValueError(
            f"{wanted} cannot be had of {own.__name__}, whose `generate` is its own: it may run the model more often "
            f"than there are tokens, and leave some out. {instead}."
        )


def prepared(bridge: RunnableBridge, input: Input, options: GenerationOptions) -> tuple[GenerationPrompt, Kwargs]:
    """The prompt, and the arguments of the model's `generate` besides.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: likewise.

    Raises:
        TypeError: an argument that nobody knows, or a model that does not generate.
        ValueError: no room in the context, or an input that does not fit.
    """
    check_generates(bridge)
    more = with_past_named(options.more, accepted_by(bridge.core))
    _check_known(bridge, {name: given for name, given in more.items() if given is not input})
    _check_used(options, more)
    text = TextOptions(options.prepend_bos, options.padding_side)
    prompt = prompt_of(bridge, input, text, more.pop("attention_mask", None), more)
    if prompt.tokens is not None and "input_ids" in prompt.kwargs and "attention_mask" not in prompt.kwargs:
        prompt.kwargs["attention_mask"] = inferred_mask(bridge, prompt.tokens, options.eos_token_id, more)
    _check_room(bridge, prompt, options.max_new_tokens)
    tell_of_rows(bridge, prompt, more)
    arguments: Kwargs = {"max_new_tokens": options.max_new_tokens, "do_sample": options.do_sample, **more}
    for name in ("top_k", "top_p", "temperature", "repetition_penalty"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    arguments["num_return_sequences"] = options.num_return_sequences  # whatever the model's own configuration says
    if hasattr(bridge.core, "_expand_variables_for_generation"):  # Whisper repeats what it hears, and leaves this alone
        for given in (prompt.kwargs, arguments):
            begins = {name: x for name, x in given.items() if name.startswith("decoder_") and isinstance(x, Tensor)}
            given.update({name: x.repeat_interleave(options.num_return_sequences, 0) for name, x in begins.items()})
    if not options.use_past_kv_cache:
        arguments["use_cache"] = False
    arguments |= _ending(bridge, options, more)
    if options.freq_penalty:
        processors = arguments.pop("logits_processor", None) or []
        arguments["logits_processor"] = LogitsProcessorList(
            [*processors, functools.partial(_less_frequent, options.freq_penalty)]
        )
    criteria = options.stopping_criteria
    several = list(criteria or []) if isinstance(criteria, Sequence | None) else [criteria]
    if wrong := [each for each in several if not callable(each)]:
        raise TypeError(f"stopping_criteria has {wrong[0]!r}; it takes a StoppingCriteria of transformers, or several")
    arguments["stopping_criteria"] = StoppingCriteriaList(several)
    if options.stop_strings not in (None, [], ()):
        arguments["stopping_criteria"].append(_stops_at(options.stop_strings, bridge.tokenizer_facts.tokenizer))
    return prompt, arguments


def inferred_mask(
    bridge: RunnableBridge, tokens: Tensor, eos_token_id: int | Sequence[int] | None, more: Kwargs
) -> Tensor:
    """The mask of tokens that are given without one: all of them count, as in a forward pass.

    It is said here because not stopping at EOS, which hides EOS from `generate`, must not make padding of it.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.
        eos_token_id: what ends a row; None: what the model's configuration says.
        more: the arguments of the model's `generate`, which may say what padding is.

    Raises:
        ValueError: there are padding tokens: a forward pass reads them as tokens, and `generate` would not.
    """
    own = bridge.core.generation_config
    eos = own.eos_token_id if eos_token_id is None else eos_token_id
    check_said(tokens, more.get("pad_token_id", own.pad_token_id), set(eos) if isinstance(eos, Sequence) else {eos})
    return torch.ones_like(tokens)


def _ending(bridge: RunnableBridge, options: GenerationOptions, more: Kwargs) -> Kwargs:
    """What ends a row, and what fills it up afterwards."""
    given: Kwargs = {}
    ending = options.eos_token_id
    if ending is not None:
        given["eos_token_id"] = list(ending) if isinstance(ending, Sequence) else ending
    own = bridge.core.generation_config
    eos = given.get("eos_token_id", own.eos_token_id)
    if own.pad_token_id is None and "pad_token_id" not in more and eos is not None:
        given["pad_token_id"] = eos[0] if isinstance(eos, list) else eos  # as transformers would, without its notice
    if not options.stop_at_eos:
        given["eos_token_id"] = None
    return given


def _check_known(bridge: RunnableBridge, more: Kwargs) -> None:
    known = set(vars(GenerationConfig()))
    own: Any = type(bridge.core)  # of which `check_generates` has seen that it generates
    known |= set(inspect.signature(own.generate).parameters)
    known |= accepted_arguments(type(bridge.core).forward) | added_around(bridge.original_model)
    known -= {"self", "inputs", "kwargs", "generation_config", "input_ids", "inputs_embeds"}
    for name in more:
        if name == "generation_config":
            raise TypeError(
                "generation_config is not taken together with the arguments of generate, which might contradict it: "
                "give what it says as arguments, set it on the model (hf_model.generation_config), or use hf_generate"
            )
        if name not in known and name in TAKEN_BY:
            raise TypeError(f"{name!r} is no argument of generate: {TAKEN_BY[name]}")
        if name not in known:
            ours = ["input", *_hints(), "more"]
            raise TypeError(
                f"{name!r} is an argument of neither generate nor GenerationConfig nor "
                f"{type(bridge.core).__name__}.{suggestion(name, (*ours, *known))}"
            )


def _check_used(options: GenerationOptions, more: Mapping[str, Any]) -> None:
    """Refuses arguments that would be taken and have no effect.

    Raises:
        ValueError: there is one.
    """
    if more.get("max_length") is not None:
        raise ValueError(
            f"max_length={more['max_length']} would have no effect together with "
            f"max_new_tokens={options.max_new_tokens}: "
            "say with max_new_tokens how many tokens to make"
        )
    for name in ("return_dict_in_generate", "output_scores", "output_attentions", "output_hidden_states"):
        if more.get(name) and not options.output_logits:
            raise ValueError(
                f"{name}=True is of transformers' own result: use output_logits=True, which returns it, or hf_generate"
            )
    if not options.return_cache:
        for name in ("names_filter", "device"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name} is of the cache of activations, and none was asked for: add return_cache=True"
                )


def _check_room(bridge: RunnableBridge, prompt: GenerationPrompt, max_new_tokens: int) -> None:
    cfg = bridge.cfg
    if cfg.n_ctx is None or bridge.core.config.is_encoder_decoder:
        return
    length = next(iter(prompt.kwargs.values())).shape[1] - min(prompt.rows.before)
    if length + max_new_tokens > cfg.n_ctx:
        raise ValueError(
            f"the prompt has {length} tokens and max_new_tokens={max_new_tokens}; {cfg.model_name} has a "
            f"context of {cfg.n_ctx}: there is room for {max(0, cfg.n_ctx - length)} new tokens"
        )
