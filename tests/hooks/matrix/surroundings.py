"""What a run may stand in: kinds of input, of model, of thread, of grad mode, of other hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import accelerate
import peft
import torch
from torch import Tensor, nn

from adapters.inputs import accepted_arguments
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.hooks.matrix.places import PLACES
from tests.tiny_models import checkpoint

TOKENS = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(3))
DECODER = torch.randint(3, 61, (2, 5), generator=torch.Generator().manual_seed(4))
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
DICT: dict[str, Any] = {
    "output_logits": True,
    "return_dict_in_generate": True,
    "eos_token_id": None,
}
MASKS = {
    "left": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]),
    "right": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
}


@dataclass
class Setting:
    """One family in one surrounding.

    Attributes:
        bridge: around the model.
        core: the Hugging Face model without wrappers.
        given: makes the arguments of one run of the bridge, anew each time.
        plain: makes those of the Hugging Face model.
        inside: what both runs stand in.
        plain_model: what is run with plain torch hooks, where it is not the bridge's model.
        tolerance: how far numbers may differ that are not computed in the same way.
    """

    bridge: TransformerBridge
    core: nn.Module
    given: Callable[[], tuple[Tensor, dict[str, Any]]]
    plain: Callable[[], dict[str, Any]]
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    plain_model: nn.Module | None = None
    call: Callable[[Callable[[], Any]], Any] = field(default=lambda run: run())
    tolerance: float = 1e-5

    def run_plain(self) -> Tensor:
        with self.inside():
            model = self.plain_model or self.bridge.original_model
            return self.call(lambda: model(**self.plain()).logits)

    def generate_plain(self) -> Tensor:
        """The logits of a few steps of the Hugging Face model's own generation."""
        with self.inside():
            given = self.plain()
            given = {name: given[name] for name in ("input_ids", "attention_mask") if name in given}
            model: Any = self.plain_model or self.bridge.original_model
            return self.call(lambda: torch.stack(model.generate(**given, **GREEDY, **DICT).logits))

    def generate(self, hooks: list[Any]) -> Tensor:
        """Those of the bridge's, with hooks."""

        def steps() -> Tensor:
            tokens, kwargs = self.given()
            mask = {name: kwargs[name] for name in ("attention_mask",) if name in kwargs}
            options = {
                **GREEDY,
                **mask,
                "output_logits": True,
                "stop_at_eos": False,
                "verbose": False,
            }
            with self.bridge.hooks(hooks):
                return torch.stack(self.bridge.generate(tokens, **options)["logits"])

        with self.inside():
            return self.call(steps)

    def run(self, how: Callable[..., Any], **more: Any) -> Any:
        with self.inside():
            tokens, kwargs = self.given()
            return self.call(lambda: how(tokens, **kwargs, **more))


@functools.cache
def model_of(case: str, **more: Any) -> nn.Module:
    return tiny(case, **more)


def setting(model: nn.Module, **more: Any) -> Setting:
    bridge = TransformerBridge(model)
    fields: dict[str, Any] = {
        "given": lambda: (TOKENS, {}),
        "plain": lambda: {"input_ids": TOKENS},
    } | more
    return with_decoder(Setting(bridge, bridge.core, **fields))


def with_decoder(made: Setting) -> Setting:
    """Gives an encoder-decoder model tokens for its decoder."""
    if made.bridge.core.config.is_encoder_decoder:
        given, plain, decoder = made.given, made.plain, {"decoder_input_ids": DECODER}
        made.given = lambda: (given()[0], given()[1] | decoder)
        made.plain = lambda: plain() | decoder
    return made


def plain(case: str) -> Setting:
    return setting(model_of(case))


def eager(case: str) -> Setting:
    return setting(model_of(case, attn_implementation="eager"))


def padded(case: str, side: str) -> Setting:
    mask = MASKS[side]
    arguments: dict[str, Any] = {"input_ids": TOKENS, "attention_mask": mask}
    model = model_of(case)
    if side == "left" and "position_ids" in accepted_arguments(type(model).forward):
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return setting(
        model, given=lambda: (TOKENS, {"attention_mask": mask}), plain=lambda: dict(arguments)
    )


def past(case: str) -> Setting:
    model = model_of(case)

    with torch.no_grad():
        kept = model(TOKENS[:, :2], use_cache=True).past_key_values

    def before() -> dict[str, Any]:
        return {"past_key_values": copy.deepcopy(kept)}  # a run adds to it

    return setting(
        model,
        given=lambda: (TOKENS[:, 2:], before()),
        plain=lambda: {"input_ids": TOKENS[:, 2:], **before()},
    )


def embeddings(case: str) -> Setting:
    model = model_of(case)
    embedded = model.get_input_embeddings()(TOKENS).detach()
    return setting(model, given=lambda: (embedded, {}), plain=lambda: {"inputs_embeds": embedded})


def inference(case: str) -> Setting:
    return setting(model_of(case), inside=torch.inference_mode)


def no_grad(case: str) -> Setting:
    return setting(model_of(case), inside=torch.no_grad)


def another_thread(case: str) -> Setting:
    def call(run: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    return setting(model_of(case), call=call)


def float64(case: str) -> Setting:
    return setting(model_of(case, dtype=torch.float64), tolerance=1e-12)


def bfloat16(case: str) -> Setting:
    return setting(model_of(case, dtype=torch.bfloat16), tolerance=0.05)


def autocast(case: str) -> Setting:
    return setting(
        model_of(case), inside=lambda: torch.autocast("cpu", torch.bfloat16), tolerance=0.05
    )


def lora(case: str) -> Setting:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # PEFT's own
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        return setting(peft.get_peft_model(tiny(case), config).eval())


def offloaded(case: str) -> Setting:
    return setting(accelerate.cpu_offload(tiny(case), execution_device="cpu"))


def deep_copy(case: str) -> Setting:
    bridge = copy.deepcopy(TransformerBridge(model_of(case)))
    return with_decoder(
        Setting(bridge, bridge.core, lambda: (TOKENS, {}), lambda: {"input_ids": TOKENS})
    )


def frozen(case: str) -> Setting:
    return setting(tiny(case).requires_grad_(False))


def checkpointed(case: str) -> Setting:
    model = tiny(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # dropout is drawn anew in each run
        for name, value in list(vars(module).items()):
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)
    checkpoint(model, {"use_reentrant": False})
    return setting(model.train())


def compiled(case: str) -> Setting:
    model = tiny(case)
    return setting(torch.compile(model, backend="eager"), plain_model=model)


def other_hooks(case: str) -> Setting:
    """Functions that only look are at every point, and a second bridge listens to the same
    model.
    """
    found = plain(case)
    names = [
        name for name, hook in found.bridge.hook_dict.items() if hook.point.group == "standard"
    ]
    second = TransformerBridge(model_of(case))

    @contextmanager
    def inside() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(found.bridge.hooks(fwd_hooks=[(names, lambda x, hook: None)]))
            stack.enter_context(second.hooks(fwd_hooks=[(names[::3], lambda x, hook: None)]))
            yield

    found.inside = inside
    return found


SURROUNDINGS: dict[str, Callable[[str], Setting]] = {
    "plain": plain,
    "eager": eager,
    "left-padded": functools.partial(padded, side="left"),
    "right-padded": functools.partial(padded, side="right"),
    "past": past,
    "embeddings": embeddings,
    "inference-mode": inference,
    "no-grad": no_grad,
    "another-thread": another_thread,
    "float64": float64,
    "bfloat16": bfloat16,
    "autocast": autocast,
    "lora": lora,
    "offloaded": offloaded,
    "deep-copy": deep_copy,
    "frozen": frozen,
    "checkpointed": checkpointed,
    "other-hooks": other_hooks,
    "compiled": compiled,
}

_NO_PAST = "an encoder keeps no keys and values"
_GROUPED = "torch's grouped multiplication, which runs the experts, has no float64"
#: What is left out, with the reason.
SKIPPED: dict[tuple[str, str], str] = {
    ("bert", "past"): _NO_PAST,
    (
        "t5",
        "past",
    ): "its past is made by the decoder, whose first tokens are no part of what is given",
} | {
    (case, "float64"): _GROUPED
    for case in ("mixtral-gqa", "gpt_oss-gqa", "qwen2_moe-gqa", "qwen3_moe-gqa")
}
#: Compiling takes seconds for each family: by default it is done for these.
COMPILED = ("gpt2", "llama-gqa", "gpt_neox", "mixtral-gqa", "t5")
if os.environ.get("MATRIX") != "all":
    SKIPPED |= {
        (case, "compiled"): "compiling takes seconds: MATRIX=all does it for every family"
        for case in PLACES
        if case not in COMPILED
    }
#: Where the input of a run is also one of `generate`.
GENERATES = (
    "plain",
    "eager",
    "left-padded",
    "no-grad",
    "inference-mode",
    "float64",
    "bfloat16",
    "lora",
    "offloaded",
    "deep-copy",
    "frozen",
    "another-thread",
    "other-hooks",
)
#: Families whose generation is not compared, with the reason.
NO_GENERATION = {
    "bert": "an encoder does not generate",
    "t5": (
        "transformers makes its cache for as many layers as the encoder has, and this decoder has"
        " more"
    ),
}
