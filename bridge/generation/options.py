"""The arguments of a generation: from the user's to those of the model's own `generate`."""

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
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from adapters.inputs import accepted_by, gives_cache, takes, with_past_named
from adapters.linear import has_weights, input_device
from adapters.observe.observe import WRONG, one_line
from adapters.views import Kwargs
from bridge.arguments import check_choice, check_types
from bridge.generation.penalties import add_penalties
from bridge.hooks.context import Generation, without_hooks
from bridge.hooks.names import NamesFilter, suggestion
from bridge.interventions.probes import FittedProbe
from bridge.rows import BatchRows, Side, check_said, check_zero_or_one
from bridge.run.inputs import (
    TAKEN_BY,
    Input,
    RunnableBridge,
    added_around,
    embeddings_given,
    refuse_wrapped_positions,
)
from bridge.run.rotary import refuse_rows_that_pass
from bridge.run.spans import is_chat
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

# --------------------------------------------------------------------------------------------------
# The prompt and the result: padding, texts, rows without padding.
# --------------------------------------------------------------------------------------------------


@dataclass
class GenerationPrompt:
    """The prompt of a generation.

    Attributes:
        kwargs: the prompt as arguments of the model's `generate`.
        tokens: ``[batch, pos]``, padded on the side that generation needs; None for embeddings.
        rows: the positions of each row's tokens.
        to_the_right: whether the user's rows are right-padded.
        kind: ``"str"``, ``"list"`` or ``"tokens"``: the kind of the user's input.
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
    more: Kwargs,
) -> GenerationPrompt:
    """Return the prompt, left-padded for a decoder and right-padded for an encoder.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: how text is tokenized, and on which side returned rows are padded.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding.
        more: further arguments of the model; arguments that run along the tokens' axis are moved
            together with the tokens.

    Raises:
        ValueError: an unknown side; a mask that does not fit; no tokens; or tokens have to be
            moved, and it is unclear whether an argument runs along their axis.
    """
    core = bridge.core
    check_choice("padding_side", options.padding_side, (None, "left", "right"))
    if takes(core).main is not None:
        prompt = _media_prompt(bridge, input, options, mask)
        prompt.rows.note(more)
        return prompt
    if mask is not None:
        check_zero_or_one("attention_mask", mask)
        mask = mask.long().to(input_device(core))
    side: Side = "right" if core.config.is_encoder_decoder else "left"
    if isinstance(input, Tensor) and input.is_floating_point():
        kwargs = _embedded_kwargs(bridge, input, more)
    else:
        kwargs, mask = _token_kwargs(bridge, input, options._replace(padding_side=side), mask)
    kind = _kind(input)
    right_padded = options.padding_side == "right"
    if mask is not None:
        check_mask_shape(mask, next(iter(kwargs.values())).shape[:2])
        kwargs["attention_mask"] = mask
        if options.padding_side is None and kind == "tokens":
            right_padded = bool((mask[:, -1] == 0).any())
    everything = {**more, **kwargs}
    rows = BatchRows(core, everything)
    rows.arrange(everything, side)
    more.update((name, everything[name]) for name in more)
    kwargs = {name: everything[name] for name in kwargs}
    if mask is not None:
        refuse_wrapped_positions(bridge, kwargs["attention_mask"])
    return GenerationPrompt(kwargs, everything.get("input_ids"), rows, right_padded, kind)


def check_mask_shape(mask: Tensor, shape: torch.Size) -> None:
    """Check that a mask has the shape of its tokens."""
    if mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; the tokens have {list(shape)}"
        )


def _kind(input: Input) -> str:
    """Return the kind of an input: ``"tokens"``, ``"str"`` or ``"list"``."""
    if texts_in(input) is None:
        return "tokens"
    return "str" if isinstance(input, str) or is_chat(input) else "list"


def _embedded_kwargs(bridge: RunnableBridge, input: Tensor, more: Kwargs) -> Kwargs:
    """Return embeddings as arguments of `generate`; remove a conflicting embedding from `more`."""
    check_embeddings(bridge.core, input)
    by_name = {"inputs_embeds": more.pop("inputs_embeds", None)}
    embeddings = embeddings_given(bridge, input, by_name)
    embeddings = embeddings if embeddings.ndim == 3 else embeddings[None]
    return {"inputs_embeds": embeddings.to(input_device(bridge.core))}


def _token_kwargs(
    bridge: RunnableBridge, input: Input, options: TextOptions, mask: Tensor | None
) -> tuple[Kwargs, Tensor | None]:
    """Return texts or tokens as arguments of `generate`, and their mask."""
    where = input_device(bridge.core)
    tokens, own_mask = _tokens_of(bridge, input, options)
    if texts_in(input) is not None:
        # Without a mask, transformers would mask padding tokens that are part of the prompt.
        mask = torch.ones_like(tokens) if own_mask is None else own_mask
        mask = mask.to(where)
    return {"input_ids": tokens.to(where)}, mask


def _tokens_of(
    bridge: RunnableBridge, input: Input, options: TextOptions
) -> tuple[Tensor, Tensor | None]:
    """Return texts or tokens as tokens ``[batch, pos]``, and the mask of texts."""
    texts = texts_in(input)
    if texts is None:
        tokens = as_tokens(input)
        mask = None
    else:
        batch = batch_of(bridge, texts, options)
        tokens = batch.tokens
        mask = batch.mask
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens, "the prompt")
    return tokens, mask


def _media_prompt(
    bridge: RunnableBridge, input: Input, options: TextOptions, mask: Tensor | None
) -> GenerationPrompt:
    """Return the prompt of a model whose first blocks read images or sound: the images or sound, or
    the decoder's first tokens.

    Raises:
        TypeError: text or tokens for a model that reads none.
    """
    core = bridge.core
    where = input_device(core)
    kwargs: Kwargs = {} if mask is None else {"attention_mask": mask.to(where)}
    tokens: Tensor | None = None
    if isinstance(input, Tensor) and input.is_floating_point():
        kwargs[takes(core).main or ""] = input.to(where)
    elif not isinstance(input, str) or input:  # "": images or sound alone, passed by name
        left_padded = options._replace(padding_side="left")
        tokens, decoder_mask = _tokens_of(bridge, input, left_padded)
        if decoder_mask is not None:
            kwargs["decoder_attention_mask"] = decoder_mask.to(where)
        tokens = kwargs["decoder_input_ids"] = tokens.to(where)
    return GenerationPrompt(kwargs, tokens, BatchRows(core, kwargs), False, _kind(input))


#: For each model, the warning about its rows, by attention, data type and padding; "": none.
_WARNINGS: WeakKeyDictionary[nn.Module, dict[object, str]] = WeakKeyDictionary()


def warn_of_rows(bridge: RunnableBridge, prompt: GenerationPrompt, more: Kwargs) -> None:
    """Warn if the model's own `generate` continues a row of a batch differently than when run on
    its own; each model is tested once.

    If processes share the model, it is not tested, because not all of them may have such rows; nor
    is a model with other torch hooks, because these would see the test.

    Args:
        bridge, prompt: the bridge and the prompt.
        more: the arguments of the model's `generate`.
    """
    core = bridge.core
    mask = prompt.rows.masks.get("pos")
    padded = mask is not None and not bool(mask.all())
    # A state that is not transformers' cache may be shared by all rows.
    mixed = prompt.rows.count > 1 and not gives_cache(core)
    if not (padded or mixed) or core.training or bridge.wiring.sharing is not None:
        return
    warnings_by_key = _WARNINGS.setdefault(core, {})
    key = (getattr(core.config, "_attn_implementation", None), core.dtype, padded)
    if key not in warnings_by_key:
        if has_other_hooks(bridge.original_model):
            return
        padding = None
        tokens = prompt.kwargs.get("input_ids")
        if mask is not None and padded:
            padding = 0 if tokens is None else int(tokens[mask == 0][0])
        start = {name: more[name] for name in ("decoder_start_token_id",) if name in more}
        media = prompt.kwargs.get(takes(core).main or "")
        warnings_by_key[key] = _row_warning(bridge, media, padding, start)
    if warnings_by_key[key]:
        instead = "rows of one length together, or one by one" if padded else "one by one"
        warnings.warn(
            f"{warnings_by_key[key]}. The text is that of its own `generate`; for each row's as it"
            f" is alone, generate {instead}",
            stacklevel=5,
        )


def _row_warning(
    bridge: RunnableBridge, like: Tensor | None, padding: float | None, start: Kwargs
) -> str:
    """Return a warning if a row of a batch of two differs from the row on its own, or if that could
    not be tested; else "".

    Args:
        bridge: the bridge.
        like: the model's images or sound, if its input is not tokens.
        padding: the padding value of the row; None: no padding.
        start: further arguments that `generate` needs.
    """
    core = bridge.core
    where = input_device(bridge.core)
    name = type(getattr(core, "plain_module", core)).__name__
    row = "a row" if padding is None else "a padded row"
    words = _plain_tokens(bridge, padding)
    if not len(words):
        return ""
    batch, mask, own = _test_rows(core, words, like, padding)
    devices = [where] if where.type == "cuda" else []
    with torch.no_grad(), without_hooks(), torch.random.fork_rng(devices):
        try:
            masks = (None, None) if padding is None else (mask, mask[1:, own])
            together = _forced_logits(core, batch, masks[0], words[:1], start)
            alone = _forced_logits(core, batch[1:, own], masks[1], words[:1], start)
        except WRONG as error:
            if padding is None:
                return ""
            return (
                f"whether {name} continues {row} of a batch as it would be alone could not be tried"
                f" ({one_line(error)})"
            )
    off = distance(together, alone, core.dtype)
    if not off:
        return ""
    return f"{name} continues {row} of a batch otherwise than alone (its logits are off by {off})"


def _plain_tokens(bridge: RunnableBridge, padding: float | None) -> Tensor:
    """Return token ids ``[token]`` that are neither special nor padding; none for a context that is
    too short for the test.
    """
    core = bridge.core
    cfg = bridge.cfg
    if cfg.n_ctx is not None and cfg.n_ctx < 10:
        return torch.tensor([], device="cpu")
    special = {padding}
    for config in (core.config, core.config.get_text_config(), core.generation_config):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")) and isinstance(value, int):
                special.add(value)
    ids = range(min(cfg.d_vocab, 2**14))
    return torch.tensor([i for i in ids if i not in special], device="cpu")


def _test_rows(
    core: Any, words: Tensor, like: Tensor | None, padding: float | None
) -> tuple[Tensor, Tensor, slice]:
    """Return two random rows, their mask, and the real positions of the second one."""
    generator = torch.Generator().manual_seed(0)
    rows = words[torch.randint(0, len(words), (2, 8), generator=generator, device="cpu")]
    if like is not None:
        rows = torch.randn(2, *like.shape[1:], generator=generator, device="cpu").to(like.dtype)
    length = rows.shape[1]
    own = slice(0, length)
    mask = torch.ones(2, length, dtype=torch.long, device="cpu")
    if padding is not None:
        right_padded = core.config.is_encoder_decoder or like is not None
        half = length // 2
        own = slice(0, half) if right_padded else slice(half, length)
        mask[1] = 0
        mask[1, own] = 1
        rows[1][mask[1] == 0] = padding
    return rows, mask, own


def _forced_logits(
    core: Any, rows: Tensor, mask: Tensor | None, token: Tensor, start: Kwargs
) -> Tensor:
    """Return the last row's logits ``[step, d_vocab]`` of two steps that both choose `token`."""
    where = input_device(core)
    inputs = {takes(core).main or "input_ids": rows.to(where)}
    if mask is not None:
        inputs["attention_mask"] = mask.to(where)
    output = core.generate(
        **inputs,
        **start,
        max_new_tokens=2,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=None,
        pad_token_id=core.generation_config.pad_token_id or 0,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[lambda ids, scores: scores.index_fill(-1, token.to(where), float("inf"))],
    )
    return torch.stack(output.logits)[:, -1].float()


def distance(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Return the relative error of logits as text; "" within rounding.

    Args:
        logits, expected: the logits, of any shape.
        dtype: the dtype in which they were computed.
    """
    size = expected.norm().clamp_min(1e-30)
    off = float((logits - expected).norm() / size)
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.05
    return "" if off <= tolerance else f"{off:.2g}"


def check_return_type(return_type: str | None) -> None:
    """Check that `generate` knows the return type.

    Raises:
        ValueError: the return type is unknown.
    """
    check_choice("return_type", return_type, ("input", "str", "tokens", None))


def is_as_text(return_type: str | None, prompt: GenerationPrompt) -> bool:
    """Tell whether the result is text."""
    return return_type == "str" or (return_type == "input" and prompt.kind != "tokens")


def decode(bridge: HasTokenizer, ids: Sequence[int]) -> str:
    """Return the text of a row of tokens, without special tokens."""
    tokenizer = bridge.tokenizer_facts.tokenizer
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def rows_of(prompt: GenerationPrompt, sequences: Int[Tensor, "batch pos"]) -> list[Tensor]:
    """Return the generated rows without the left padding of the prompt."""
    return list(sequences) if prompt.tokens is None else prompt.rows.stripped(sequences)


def texts_of(
    bridge: RunnableBridge, rows: Sequence[Tensor], prompt: GenerationPrompt
) -> str | list[str]:
    """Return the text of each row; for a prompt of one text, a single text."""
    return of_prompt([decode(bridge, row.tolist()) for row in rows], prompt)


def of_prompt(texts: list[str], prompt: GenerationPrompt) -> str | list[str]:
    """Return the texts; for a prompt of one text with one continuation, that text."""
    return texts[0] if prompt.kind == "str" and len(texts) == 1 else texts


def aligned(
    sequences: Int[Tensor, "batch pos"], prompt: GenerationPrompt
) -> Int[Tensor, "batch pos"]:
    """Return the sequences, with the padding of the prompt on the user's side."""
    if not prompt.to_the_right or prompt.tokens is None:
        return sequences
    return prompt.rows.padded_behind(sequences)


# --------------------------------------------------------------------------------------------------
# The steps of a generation: counting, stopping, penalties; and the arguments.
# --------------------------------------------------------------------------------------------------


class Steps(StoppingCriteria):
    """Counter of a generation's steps. It advances the progress bar, and ends a cancelled
    generation.

    Args:
        bar: the progress bar.
        generation: the object that counts the steps.
    """

    def __init__(self, bar: tqdm, generation: Generation) -> None:
        self.bar = bar
        self.generation = generation
        self.cancelled = False

    def __call__(
        self, input_ids: Tensor, scores: Tensor | tuple[Tensor, ...] | None, **kwargs: object
    ) -> Tensor:
        self.generation.step += 1
        self.generation.note_endings(input_ids[:, -1])
        self.bar.update()
        return torch.full(
            (input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device
        )


def _string_criterion(
    strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Callable[..., Tensor]:
    """Return a stopping criterion: a row ends when its newest token completes one of the strings.

    transformers' own criterion requires a token to have the same text everywhere in a word, which
    fails for word-level tokenizers; here the end of the row is decoded.
    """
    several = [strings] if isinstance(strings, str) else list(strings)
    if not all(several):
        raise ValueError(
            f"stop_strings is {strings!r}; it must be a string, or several, and none of them empty"
        )
    # A token is at least one byte of text; the margin is for tokens without text.
    window = max(len(string.encode()) for string in several) + 8

    def is_completed(row: list[int]) -> bool:
        texts = [tokenizer.decode(x, clean_up_tokenization_spaces=False) for x in (row, row[:-1])]
        now, before = map(str, texts)
        return any(now.count(string) > before.count(string) for string in several)

    def ends(input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        done = [is_completed(row) for row in input_ids[:, -window:].tolist()]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    return ends


@dataclass(frozen=True, kw_only=True)
class _SamplingOptions:
    """The arguments that choose the next token and end a row, for `generate`, `generate_batch` and
    everything that passes them on; see `TransformerBridge.generate`.
    """

    max_new_tokens: int = 10
    stop_at_eos: bool = True
    eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None

    def sampling(self) -> Kwargs:
        """Return the sampling arguments that are set, as transformers names them."""
        names = ("do_sample", "top_k", "top_p", "temperature", "repetition_penalty")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(_SamplingOptions):
    """The arguments of `TransformerBridge.generate` except the prompt, with the same meaning and
    defaults.
    """

    freq_penalty: float = 0.0
    num_return_sequences: int = 1
    use_past_kv_cache: bool = True
    prepend_bos: bool | None = None
    padding_side: str | None = None
    return_type: str | None = "input"
    output_logits: bool = False
    return_cache: bool = False
    return_input_tokens: bool = False
    readings: Sequence[FittedProbe] = ()
    stop_strings: str | Sequence[str] | None = None
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None
    names_filter: NamesFilter = None
    device: torch.device | str | None = None
    verbose: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GenerationOptions:
        """Return the options in keyword arguments; arguments of the model or of transformers become
        `more`.
        """
        hints = _hints()
        known: dict[str, Any] = {}
        more: dict[str, Any] = {}
        for name, value in arguments.items():
            (known if name in hints else more)[name] = value
        check_types("generate", known, hints)
        if known.get("max_new_tokens", 1) < 1:
            raise ValueError(f"max_new_tokens is {known['max_new_tokens']}; it must be 1 or more")
        return cls(**known, more=more)


@functools.cache
def _hints() -> dict[str, Any]:
    """Return the type hint of each argument except `more`."""
    hints = typing.get_type_hints(GenerationOptions)
    del hints["more"]
    return hints


def check_generates(bridge: RunnableBridge) -> None:
    """Check that a model can generate.

    Raises:
        TypeError: it cannot. RuntimeError: it has no weights.
    """
    if not has_weights(bridge.core):
        raise RuntimeError(
            f"{type(bridge.core).__name__} has no weights here (it is on the meta device), so it"
            " cannot generate. The bridge of an engine only names hook points: call"
            " engine.generate, not engine.bridge.generate"
        )
    if not hasattr(bridge.core, "generate") or not bridge.core.can_generate():
        raise TypeError(
            f"{type(bridge.core).__name__} does not generate text: transformers gives it no"
            " `generate`"
        )


def check_plain_loop(bridge: RunnableBridge, feature: str, instead: str) -> None:
    """Check, for a model that makes text from images or sound, that generation has one step per
    token.

    Raises:
        ValueError: the class overrides `generate`.
    """
    own = type(bridge.core)
    inputs = takes(bridge.core)
    if inputs.main is None and not inputs.needed:
        return
    if getattr(own, "generate", None) is not GenerationMixin.generate:
        raise ValueError(
            f"{feature} is not available for {own.__name__}, whose `generate` is its own: it may"
            f" run the model more often than there are tokens, and leave some out. {instead}."
        )


def prepared(
    bridge: RunnableBridge, input: Input, options: GenerationOptions
) -> tuple[GenerationPrompt, Kwargs]:
    """Return the prompt and the other arguments of the model's `generate`.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: the options of the generation.

    Raises:
        TypeError: an unknown argument, or a model that cannot generate.
        ValueError: the context is full, or an input does not fit.
    """
    check_generates(bridge)
    more = with_past_named(options.more, accepted_by(bridge.core))
    _check_known(bridge, {name: value for name, value in more.items() if value is not input})
    _check_used(options, more)
    text = TextOptions(options.prepend_bos, options.padding_side)
    prompt = prompt_of(bridge, input, text, more.pop("attention_mask", None), more)
    kwargs = prompt.kwargs
    if "input_ids" in kwargs and "attention_mask" not in kwargs:
        mask = inferred_mask(bridge, kwargs["input_ids"], options.eos_token_id, more)
        kwargs["attention_mask"] = mask
    _check_room(bridge, prompt, options.max_new_tokens)
    if prompt.tokens is not None:
        lengths = [prompt.tokens.shape[1] - before for before in prompt.rows.before]
        refuse_rows_that_pass(bridge.core, lengths, options.max_new_tokens)
    warn_of_rows(bridge, prompt, more)
    arguments = _model_arguments(bridge, options, more)
    add_penalties(bridge, arguments, options.freq_penalty, prompt.rows)
    if hasattr(bridge.core, "_expand_variables_for_generation"):
        _repeat_decoder_inputs(kwargs, options.num_return_sequences)
        _repeat_decoder_inputs(arguments, options.num_return_sequences)
    return prompt, arguments


def _model_arguments(bridge: RunnableBridge, options: GenerationOptions, more: Kwargs) -> Kwargs:
    """Return the arguments of the model's `generate` other than the prompt."""
    # The model's own configuration may set other values of the first and the last.
    arguments: Kwargs = {
        "max_new_tokens": options.max_new_tokens,
        **more,
        **options.sampling(),
        "num_return_sequences": options.num_return_sequences,
        **_ending(bridge, options, more),
    }
    if not options.use_past_kv_cache:
        arguments["use_cache"] = False
    arguments["stopping_criteria"] = _stopping_criteria(bridge, options)
    return arguments


def _repeat_decoder_inputs(arguments: Kwargs, times: int) -> None:
    """Repeat the decoder's tensors for each returned sequence: Whisper repeats only its sound."""
    for name, value in arguments.items():
        if name.startswith("decoder_") and isinstance(value, Tensor):
            arguments[name] = value.repeat_interleave(times, 0)


def _stopping_criteria(bridge: RunnableBridge, options: GenerationOptions) -> StoppingCriteriaList:
    """Return the user's stopping criteria, including the stop strings."""
    criteria = options.stopping_criteria
    several = list(criteria or []) if isinstance(criteria, Sequence | None) else [criteria]
    if wrong := [criterion for criterion in several if not callable(criterion)]:
        raise TypeError(
            f"stopping_criteria has {wrong[0]!r}; it takes a StoppingCriteria of transformers, or"
            " several"
        )
    stopping = StoppingCriteriaList(several)
    if options.stop_strings not in (None, [], ()):
        tokenizer = bridge.tokenizer_facts.tokenizer
        stopping.append(_string_criterion(options.stop_strings, tokenizer))
    return stopping


def inferred_mask(
    bridge: RunnableBridge, tokens: Tensor, eos_token_id: int | Sequence[int] | None, more: Kwargs
) -> Tensor:
    """Return a mask for tokens without one: all tokens count, as in a forward pass. Without the
    mask, `generate` would treat EOS as padding if ``stop_at_eos=False`` hides the EOS token from
    it.

    Args:
        bridge: the bridge.
        tokens: ``[batch, pos]``.
        eos_token_id: the id that ends a row; None: the one in the model's configuration.
        more: the arguments of the model's `generate`, which may name the padding token.

    Raises:
        ValueError: there are padding tokens, which a forward pass would read as tokens, but
            `generate` would not.
    """
    own = bridge.core.generation_config
    eos = own.eos_token_id if eos_token_id is None else eos_token_id
    endings = set(eos) if isinstance(eos, Sequence) else {eos}
    check_said(tokens, more.get("pad_token_id", own.pad_token_id), endings)
    return torch.ones_like(tokens)


def _ending(bridge: RunnableBridge, options: GenerationOptions, more: Kwargs) -> Kwargs:
    """Return the token ids that end a row, and the id with which a finished row is padded."""
    ids: Kwargs = {}
    ending = options.eos_token_id
    if ending is not None:
        ids["eos_token_id"] = list(ending) if isinstance(ending, Sequence) else ending
    own = bridge.core.generation_config
    eos = ids.get("eos_token_id", own.eos_token_id)
    if own.pad_token_id is None and "pad_token_id" not in more and eos is not None:
        # As transformers would choose, but without its notice.
        ids["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    if not options.stop_at_eos:
        ids["eos_token_id"] = None
    return ids


def _check_known(bridge: RunnableBridge, more: Kwargs) -> None:
    known = set(vars(GenerationConfig()))
    own: Any = type(bridge.core)
    known |= set(inspect.signature(own.generate).parameters)
    known |= accepted_by(bridge.core) | added_around(bridge.original_model)
    known -= {"self", "inputs", "kwargs", "generation_config", "input_ids", "inputs_embeds"}
    for name in more:
        if name == "generation_config":
            raise TypeError(
                "generation_config is not taken together with the arguments of generate, which"
                " might contradict it: give what it says as arguments, set it on the model"
                " (hf_model.generation_config), or use hf_generate"
            )
        if name not in known and name in TAKEN_BY:
            raise TypeError(f"{name!r} is not an argument of generate: {TAKEN_BY[name]}")
        if name not in known:
            ours = ["input", *_hints(), "more"]
            raise TypeError(
                f"{name!r} is an argument of neither generate nor GenerationConfig nor "
                f"{type(bridge.core).__name__}.{suggestion(name, (*ours, *known))}"
            )


def _check_used(options: GenerationOptions, more: Mapping[str, Any]) -> None:
    """Check that every argument has an effect.

    Raises:
        ValueError: an argument has no effect.
    """
    if more.get("max_length") is not None:
        raise ValueError(
            f"max_length={more['max_length']} would have no effect together with "
            f"max_new_tokens={options.max_new_tokens}: "
            "say with max_new_tokens how many tokens to make"
        )
    for name in (
        "return_dict_in_generate",
        "output_scores",
        "output_attentions",
        "output_hidden_states",
    ):
        if more.get(name) and not options.output_logits:
            raise ValueError(
                f"{name}=True is of transformers' own result: use output_logits=True, which returns"
                " it, or hf_generate"
            )
    if not options.return_cache:
        for name in ("names_filter", "device"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name} is of the cache of activations, and none was asked for: add"
                    " return_cache=True"
                )


def _check_room(bridge: RunnableBridge, prompt: GenerationPrompt, max_new_tokens: int) -> None:
    cfg = bridge.cfg
    if cfg.n_ctx is None or bridge.core.config.is_encoder_decoder:
        return
    length = next(iter(prompt.kwargs.values())).shape[1] - min(prompt.rows.before)
    if length + max_new_tokens > cfg.n_ctx:
        raise ValueError(
            f"the prompt has {length} tokens and max_new_tokens={max_new_tokens}; {cfg.model_name}"
            f" has a context of {cfg.n_ctx}: there is room for {max(0, cfg.n_ctx - length)} new"
            " tokens"
        )
