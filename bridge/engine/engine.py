"""`Engine`: a model in vLLM, with the hook points, names and interventions of a bridge.

What comes in is a model's folder, hook points, and prompts, each with its own `Interventions`; what goes out is text,
tokens, log-probabilities, and what was seen at hook points, by request.

1. *The same tree.* With its Transformers backend vLLM runs Hugging Face's own modules, so a declaration says where a
   point is there, too: a module's input or output, and which of its columns. Where vLLM made several projections one,
   they are some columns of that (`bridge.engine.insides`, the only place that knows vLLM).
2. *Placed before it is compiled.* A worker of ours puts hooks on those modules as soon as the model is loaded
   (`bridge.engine.worker`): tables, a number of a row for each token, a buffer of what passed. They are a part of what
   is compiled.
3. *Tables, not functions.* The operations of a request become rows (`bridge.engine.tables`). Before a pass every token
   gets its row, by whose it is and where it stands; in the pass all tokens are changed at once. So nothing depends on
   who else is in the pass, or on chunks, samples, or being computed again.
4. *Proved at start.* Each point's values and an edit's effect are compared with the plain model's
   (`bridge.engine.proof`), once: what was found is kept as inferred declarations are.
5. *Whose prefix is whose.* Keys and values behind an edit carry a salt made of it, so that they are shared by requests
   with that edit alone. A captured request is computed from its first token on.
6. *Two models side by side.* A request may have a LoRA adapter (proved as points are), and interventions that are made
   of what other requests of the call gave (`FromAnswers`), when these are done.

Refused by name: points inside of a forward (experts) or that are computed; operations that no row holds; functions;
points whose columns several processes share, and what of vLLM was not tried (`insides`). Not known here: what vLLM
schedules when.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load as tensors_of
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file

from adapters import kept
from adapters.sealed import sealed, unsealed
from adapters.views import Call, Deferred, View
from adapters.views.basis import InBasis, dense
from bridge.bridge import TransformerBridge
from bridge.engine import insides
from bridge.engine.proof import MOST_LIKELY, EngineProof, engine_point, rows_like, seen_in_order
from bridge.engine.tables import EngineEdit, EnginePlace, base_of, fit, lower, packed
from bridge.generation.batch import prompts_of
from bridge.generation.options import decode
from bridge.hooks.arguments import check_positive
from bridge.hooks.names import NamesFilter, WhenAsked
from bridge.interventions import Interventions
from bridge.run.inputs import HookSpec
from bridge.taps.attention_call import AttentionCall, DeferredAttention
from bridge.version import built

#: The keys of sites inside attention that are computed from queries and keys.
_COMPUTED = ("scores", "pattern")
#: What a router chooses: which experts, and how much of each.
_CHOICE = ("mlp.hook_topk_weights", "mlp.hook_expert_indices")
#: Of what is kept of a proof: a number that changes with it.
_FORM = 4


@dataclass(frozen=True)
class EngineAnswer:
    """One continuation of a prompt by an engine.

    Attributes:
        index: the number of its prompt.
        sample: which of several continuations of that.
        tokens: the new tokens ``[new]``.
        text: the same as text; None where the model has no tokenizer.
        likely: for each new token, the log-probabilities that were asked for, by token.
        activations: what was captured, by canonical name, of every token that was processed (all but the last):
            ``[pos ...]``; scores and patterns ``[head pos key_pos]``, computed when they are asked for.
        ended: it is whole; else this is what there is so far, without activations.
    """

    index: int
    sample: int
    tokens: Tensor
    text: str | None
    likely: list[dict[int, float]]
    activations: Mapping[str, Tensor]
    ended: bool = True


@dataclass(frozen=True)
class FromAnswers:
    """Interventions of one request that are made of what other requests of the same call gave, when these are done.

    Args:
        requests: the numbers of those, among the prompts of the call.
        make: is given their answers, in that order; it returns the interventions.

    Example:
        >>> from bridge.engine import FromAnswers
        >>> from bridge.interventions import AddScaled
        >>> point = "blocks.1.hook_resid_post"
        >>> def asked_about(base, tuned):
        ...     apart = tuned.activations[point][-1] - base.activations[point][-1]
        ...     return [(point, AddScaled(apart, positions=[3, 4]))]
        >>> FromAnswers([0, 1], asked_about).requests
        [0, 1]
    """

    requests: Sequence[int]
    make: Callable[..., Sequence[HookSpec]]


#: Texts, or tokens.
EnginePrompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
#: The interventions of each, or what makes them.
Each = Sequence[Sequence[HookSpec] | FromAnswers | None]


class Engine:
    """A model in vLLM, whose requests have interventions and captures of their own at hook points.

    It is started in a process of its own: guard a script with ``if __name__ == "__main__"``.

    Args:
        model: a folder, or a name on the hub, of a causal language model.
        points: the hook points that are edited or captured, as `TransformerBridge.select_hooks` takes them.
        dtype: of weights and activations; None: what the model's configuration says.
        rows: how many different edits the tables of a point have room for; more are done in turn.
        rank: how many directions an edit may project out at one place.
        probes: how many probes a request may have; conditions ask what they read.
        adapters: the folders of LoRA adapters that requests may have, as PEFT saves them, by name.
        options: of ``vllm.LLM``.

    Attributes:
        bridge: of the model without weights: names, axes, sizes, tokenizer.
        adapters: the folders of its LoRA adapters, by name.
        refused: why a hook point that was asked for is not offered, by name.

    Raises:
        VersionError: vLLM is not installed, or another version.
        UnknownHookError: a name that no hook point has.
        TypeError, ValueError: options that it cannot have.

    Example:
        >>> from bridge.engine import Engine  # doctest: +SKIP
        >>> engine = Engine("folder/of/a/model", points=["blocks.1.hook_resid_post"])  # doctest: +SKIP
        >>> engine.generate(["Mary and", "When John"], 4, capture=engine.offered())[0].text  # doctest: +SKIP
        ' John went to the'
    """

    def __init__(
        self, model: str | PathLike[str], points: NamesFilter, *, dtype: torch.dtype | None = None, rows: int = 64,
        rank: int = 1, probes: int = 0, adapters: Mapping[str, str | PathLike[str]] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        insides.check_vllm()
        insides.check_options(options)
        check_positive("rows", rows)
        self._rows, self._rank, self._probes, self._open = rows, rank, probes, False
        self._numbers = count()
        self.adapters = {n: fspath(folder) for n, folder in (adapters or {}).items()}
        name = fspath(model)
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            dtype = dtype or config.get_text_config().dtype or torch.float32
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.bridge = TransformerBridge(skeleton, _tokenizer(name))
        self._hooks = {hook.name: hook for hook in self.bridge.select_hooks(points)}
        asked = [list(self._hooks), str(dtype), rank, probes, {key: str(x) for key, x in options.items()}]
        place = _place(name, [*asked, {n: _files(Path(folder)) for n, folder in self.adapters.items()}])
        proved, plain = _read(place), None
        if proved is None:
            # Eager attention leaves nothing out; torch's kernel knows no soft cap (Gemma 2), and vLLM's does.
            hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").eval()
            plain = TransformerBridge(hf, None)
            like = rows_like(plain, list(self._hooks.values()))
            said = {n: engine_point(hook, hf, like.get(n)) for n, hook in self._hooks.items()}
            self._order = seen_in_order(plain, [n for n, point in said.items() if not isinstance(point, str)])
        else:
            said, self._order = proved["points"], proved["order"]
        self.refused: dict[str, str] = {n: point for n, point in said.items() if isinstance(point, str)}
        placed = {n: point for n, point in said.items() if not isinstance(point, str)}
        for n in [n for n, point in placed.items() if point["key"] in _COMPUTED]:
            point = placed.pop(n)
            placed |= {f"{n} {key}": {**point, "key": key} for key in "qk"}
        #: The model, the type, and what the worker is told.
        room = {"rows": rows, "rank": rank, "probes": probes}
        room["routers"] = any(n.endswith(_CHOICE) for n in placed)
        options |= insides.adapter_options(self.adapters)
        self.started_with = name, str(dtype).removeprefix("torch."), {**room, "points": placed}, options
        self._vllm = insides.started(*self.started_with)
        self._places: dict[str, EnginePlace] = {}
        self._kernels: dict[str, Mapping[str, Any]] = {}
        try:
            for n, found in self._vllm.collective_rpc("bridge_places")[0].items():
                computed = n.split(" ")[0]
                if "refused" in found:
                    self.refused[computed] = found["refused"]
                    continue
                columns, shape = tuple(found["columns"]), tuple(found["shape"])
                self._places[n] = EnginePlace(found["site"], found["width"], columns, shape, found["counts"])
                if computed != n:
                    self._kernels[computed] = found["kernel"]
            if plain is not None:
                proved = {"points": said, "order": self._order, "found": self._tried(plain, dtype)}
                _write(place, proved)
        except BaseException:
            self.close()  # nobody else can: there is no engine yet
            raise
        assert proved is not None
        self.refused |= {n: why for n, why in proved["found"].items() if why}

    def _tried(self, plain: TransformerBridge, dtype: torch.dtype) -> dict[str, str]:
        """What the engine says to the requests of a proof, compared; with each adapter, too, in the same passes."""
        hooks = [self._hooks[n] for n in self._hooks if n in self._places or n in self._kernels]
        proof = EngineProof(plain, hooks, self._places, dtype, self._rank, self._order if self._probes else ())
        names = [None, *self.adapters]
        asked = [
            _Asked(i * len(names) + j, request.prompt, request.new, self.edit(request.edits), request.capture, name)
            for i, request in enumerate(proof.requests)
            for j, name in enumerate(names)
        ]
        answers = sorted(self._answers(asked, False, logprobs=MOST_LIKELY), key=lambda answer: answer.index)
        found = proof.differences(answers[:: len(names)])
        hf: Any = plain.original_model
        for j, (name, folder) in enumerate(self.adapters.items(), 1):
            hf.load_adapter(folder, adapter_name=name)
            hf.set_adapter(name)
            proof.bridge = TransformerBridge(hf, None)
            said = proof.differences(answers[j :: len(names)])
            found |= {point: f"with adapter {name} {why}" for point, why in said.items() if why and not found[point]}
        return found

    def close(self) -> None:
        """Ends the engine's process."""
        insides.shut(self._vllm)

    def weights(self) -> str:
        """A hash of the weights that the engine has, as it has them."""
        return "".join(self._vllm.collective_rpc("bridge_weights"))

    @property
    def longest(self) -> int:
        """How many tokens a prompt may have."""
        return insides.longest_of(self._vllm) - 1  # one is generated behind it

    @property
    def device(self) -> str:
        """The kind of device that it computes on."""
        return insides.device_of(self._vllm)

    def offered(self) -> list[str]:
        """The hook points that are here what they are in a run; of others, `refused` says why."""
        return [name for name in self._hooks if name not in self.refused]

    def generate(
        self, prompts: EnginePrompts, max_new_tokens: int,
        each: Each | None = None, capture: NamesFilter = (), *,
        adapter_names: Sequence[str | None] | None = None, stop_at_eos: bool = True, prepend_bos: bool | None = None,
        verbose: bool = False, **sampling: Any,
    ) -> list[EngineAnswer]:  # fmt: skip
        """Continues prompts, each under its own interventions; see `stream` for answers as they come.

        Args:
            prompts: texts, or tokens.
            max_new_tokens: how many may follow each.
            each: for each prompt its interventions, or what makes them of other answers (`FromAnswers`), or None.
            capture: the hook points whose activations are wanted, of prompt and new tokens.
            adapter_names: for each prompt the LoRA adapter that it has, or None.
            stop_at_eos: whether a text ends where the model ends it.
            prepend_bos: whether texts start with BOS; None: what the model says.
            verbose: show a progress bar.
            sampling: of ``vllm.SamplingParams`` (``n``, ``temperature``, ``seed``, ``logprobs``); greedy without.

        Returns:
            The answers in the order of the prompts, those of one prompt by sample.

        Raises:
            ValueError: a hook point that is not offered, with the reason; an operation that cannot be here; an unknown
                adapter; requests that wait for each other.
            TypeError: a function in the place of an operation; `steps`, which is `stream`'s.
            IndexError: a position that its prompt has not.
        """
        if "steps" in sampling:
            raise TypeError("generate gives whole answers: steps is an argument of stream")
        answers = self.stream(
            prompts, max_new_tokens, each, capture, adapter_names=adapter_names, stop_at_eos=stop_at_eos,
            prepend_bos=prepend_bos, **sampling,
        )  # fmt: skip
        total = len(prompts) * int(sampling.get("n", 1))
        shown = tqdm(answers, total=total, disable=not verbose)
        return sorted(shown, key=lambda answer: (answer.index, answer.sample))

    def stream(
        self, prompts: EnginePrompts, max_new_tokens: int,
        each: Each | None = None, capture: NamesFilter = (), *,
        adapter_names: Sequence[str | None] | None = None, steps: bool = False, stop_at_eos: bool = True,
        prepend_bos: bool | None = None, **sampling: Any,
    ) -> Iterator[EngineAnswer]:  # fmt: skip
        """The same, each answer as it comes. Leave the loop, and what is under way is aborted.

        Args:
            prompts, max_new_tokens, each, capture, adapter_names, stop_at_eos, prepend_bos, sampling: as for
                `generate`.
            steps: give what there is of each answer after each step, too (`ended` is False then).

        Raises:
            ValueError, TypeError, IndexError: as there, before anything is run; what `FromAnswers` makes is checked
                when it is made.
        """
        asked = self.requests(prompts, max_new_tokens, each, capture, adapter_names, prepend_bos)
        if not any(request.made_from for request in asked):
            return self._answers(asked, stop_at_eos, steps, **sampling)
        if sampling.get("n", 1) != 1:
            raise ValueError("interventions that are made from answers need one answer of each prompt: n=1")
        order = TopologicalSorter({request.index: _waits_for(request, len(asked)) for request in asked})
        try:
            order.prepare()
        except CycleError as error:
            raise ValueError(f"requests {error.args[1]} wait for each other's answers") from None
        return self._in_order(asked, order, stop_at_eos, steps, **sampling)

    def requests(
        self, prompts: EnginePrompts, max_new_tokens: int,
        each: Each | None = None, capture: NamesFilter = (),
        adapter_names: Sequence[str | None] | None = None, prepend_bos: bool | None = None,
    ) -> list[_Asked]:  # fmt: skip
        """Requests as they are checked and lowered; `generate` and `stream` do so themselves.

        Args:
            prompts, max_new_tokens, each, capture, adapter_names, prepend_bos: as for `generate`.

        Raises:
            ValueError, TypeError, IndexError: as there.
        """
        check_positive("max_new_tokens", max_new_tokens)
        rows = prompts_of(self.bridge, prompts, prepend_bos)
        for name, given in (("each", each), ("adapter_names", adapter_names)):
            if given is not None and len(given) != len(rows):
                raise ValueError(f"{name} has {len(given)} entries, and there are {len(rows)} prompts")
        none = isinstance(capture, Sequence) and not isinstance(capture, str) and not capture
        names = () if none else tuple(hook.name for hook in self.bridge.select_hooks(capture))
        self._check_offered(names)
        asked, known = [], dict[int, EngineEdit]()  # what several requests share is lowered once
        named = zip(rows, each or [None] * len(rows), adapter_names or [None] * len(rows), strict=True)
        for index, (row, specs, adapter) in enumerate(named):
            self._check_adapter(adapter)
            if isinstance(specs, FromAnswers):
                asked.append(_Asked(index, row, max_new_tokens, _NOTHING, names, adapter, specs))
                continue
            edit = known[id(specs)] = known.get(id(specs)) or self.edit(specs or ())
            edit.check_prompt(len(row))
            self._check_seen(specs or (), names)
            asked.append(_Asked(index, row, max_new_tokens, edit, names, adapter))
        return asked

    def _in_order(
        self, asked: Sequence[_Asked], order: TopologicalSorter[int], stop_at_eos: bool, steps: bool, **sampling: Any
    ) -> Iterator[EngineAnswer]:
        """Runs requests when those are done whose answers they need."""
        wanted = {number for request in asked if request.made_from for number in request.made_from.requests}
        known: dict[int, EngineAnswer] = {}
        while order.is_active():
            ready = order.get_ready()
            wave = [self._with_edit(asked[number], known) for number in sorted(ready)]
            with closing(self._answers(wave, stop_at_eos, steps, **sampling)) as answers:
                for answer in answers:
                    if answer.ended and answer.index in wanted:
                        known[answer.index] = answer
                    yield answer
            order.done(*ready)

    def _with_edit(self, request: _Asked, known: Mapping[int, EngineAnswer]) -> _Asked:
        """A request whose interventions are known now."""
        if request.made_from is None:
            return request
        specs = request.made_from.make(*[known[number] for number in request.made_from.requests])
        edit = self.edit(specs)
        edit.check_prompt(len(request.prompt))
        self._check_seen(specs, request.capture)
        return replace(request, edit=edit)

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in self.adapters:
            has = ", ".join(self.adapters) or "none"
            raise ValueError(f"there is no adapter {name!r} in this engine, which has {has}: Engine(adapters=)")

    def check(self, each: Sequence[HookSpec] = (), capture: Sequence[str] = ()) -> None:
        """Refuses what a request cannot have; `generate` does so itself.

        Args:
            each: its interventions.
            capture: the names of hook points.

        Raises:
            ValueError: a hook point that is not offered, or an operation that cannot be here.
            TypeError: a function in the place of an operation.
        """
        self._check_offered(capture)
        self.edit(each)
        self._check_seen(each, capture)

    def _check_seen(self, specs: Sequence[HookSpec], capture: Sequence[str]) -> None:
        """Refuses to show an activation whose features are changed: there is one number, and a run has two."""
        hooks = [hook for names, _ in specs for hook in self.bridge.select_hooks(names)]
        changed = {base_of(hook): hook.name for hook in hooks if isinstance(hook.view, InBasis)}
        for name in capture:
            if (base := base_of(self.bridge.hook_dict[name])) in changed:
                raise ValueError(
                    f"{name} cannot be captured in an engine from a request that changes {changed[base]}: a run shows "
                    f"{base} as it was before and features as they were set, and an engine's pass has what came of "
                    "both. Capture it in a request without that change, or use bridge.generate_batch"
                )

    def _check_offered(self, names: Sequence[str]) -> None:
        for shown in names:
            name = base_of(hook := self.bridge.hook_dict[shown])
            if isinstance(hook.view, InBasis) and (hook.view.reads or name in self._kernels):
                raise ValueError(f"{shown} is no basis of what one hook point has, and is not offered in this engine")
            if name in self.refused:
                raise ValueError(f"{name} is not offered in this engine: {self.refused[name]}")
            if name not in self._hooks:
                raise ValueError(f"{name} is not among the points that this engine was started with: Engine(points=)")

    def edit(self, specs: Sequence[HookSpec]) -> EngineEdit:
        """Interventions as rows of tables.

        Args:
            specs: as `generate` takes them for one prompt.

        Raises:
            ValueError, TypeError: as there.
        """
        pairs = [(hook, fn) for names, fn in specs for hook in self.bridge.select_hooks(names)]
        self._check_offered([hook.name for hook, _ in pairs])
        if computed := [hook.name for hook, _ in pairs if hook.name in self._kernels]:
            raise ValueError(
                f"{computed[0]} is computed from queries and keys when an engine is done, so it can be captured here "
                "and not changed: use bridge.generate_batch"
            )
        if counts := [hook.name for hook, _ in pairs if self._places[base_of(hook)].counts]:
            raise ValueError(
                f"{counts[0]} holds the numbers of the experts that were chosen, which an engine shows and does not "
                "change: change hook_topk_weights, or use bridge.generate_batch"
            )
        checked = Interventions([(hook.name, fn) for hook, fn in pairs], self.bridge)
        lowered = [(hook, fn) for (hook, _), (_, fn) in zip(pairs, checked, strict=True)]
        edit = lower(lowered, self._places, self._rank, self._order, self._probes)
        if not fit([edit], self._rows):
            raise ValueError(f"one request needs more rows than there are ({self._rows}): Engine(rows=)")
        return edit

    def _answers(
        self, asked: Sequence[_Asked], stop_at_eos: bool, steps: bool = False, **sampling: Any
    ) -> Generator[EngineAnswer]:
        """Runs requests, as many at a time as there are rows for.

        Raises:
            ValueError: others are under way.
        """
        if self._open:
            raise ValueError("another stream of this engine is under way: take all its answers, or leave its loop")
        self._open, engine = True, self._vllm.llm_engine
        by_name: dict[str, _Asked] = {}
        try:
            for turn in self._turns(asked):
                edits = {request.edit.key: request.edit for request in turn if request.edit.sites}
                self._vllm.collective_rpc("bridge_edit", args=packed(list(edits.values())))
                for request in turn:
                    name = str(next(self._numbers))
                    prompt, ticket = self.asked(request, int(name))
                    params = insides.sampling(request.new, stop_at_eos, steps, ticket, sampling)
                    by_name[name] = request
                    engine.add_request(name, prompt, params, lora_request=self.adapter(request.adapter))
                so_far: dict[str, dict[int, Any]] = {}
                while engine.has_unfinished_requests():
                    found = engine.step()
                    for out in found:
                        so_far.setdefault(out.request_id, {}).update({one.index: one for one in out.outputs})
                    ended = [out.request_id for out in found if out.finished]
                    for name in [out.request_id for out in found if not out.finished]:
                        yield from self.made(by_name[name], list(so_far[name].values()), name, None)
                    numbers = [int(name) for name in ended if by_name[name].capture]
                    data = self._vllm.collective_rpc("bridge_take", args=(numbers,))[0] if numbers else None
                    captured = tensors_of(data) if data is not None else {}
                    for name in ended:
                        yield from self.made(by_name.pop(name), list(so_far.pop(name).values()), name, captured)
        finally:
            self._open = False
            engine.abort_request(list(by_name))
            if numbers := [int(name) for name, request in by_name.items() if request.capture]:
                self._vllm.collective_rpc("bridge_take", args=(numbers,))  # nobody wants it any more

    def asked(self, request: _Asked, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What vLLM is asked of a request, and what the worker is told of it.

        Args:
            request: the request.
            number: of what is captured of it.
        """
        salt = {"cache_salt": request.edit.key} if request.edit.sites else {}
        ticket = {"number": number, "capture": self._kept_for(request.capture)}
        ticket |= {"edit": request.edit.key} if salt else {}
        return {"prompt_token_ids": request.prompt, **salt}, ticket

    def adapter(self, name: str | None) -> Any:
        """vLLM's request of an adapter."""
        at = list(self.adapters)
        return None if name is None else insides.lora(name, at.index(name) + 1, self.adapters[name])

    def _turns(self, asked: Sequence[_Asked]) -> Iterator[list[_Asked]]:
        """Requests in turns whose different edits the tables have room for together."""
        turn: list[_Asked] = []
        edits: dict[str, EngineEdit] = {}
        for request in asked:
            edit = request.edit
            if edit.key not in edits and not fit([*edits.values(), edit], self._rows):
                yield turn
                turn, edits = [], {}
            edits[edit.key] = edit
            turn.append(request)
        yield turn

    def made(
        self, request: _Asked, outputs: Sequence[Any], number: str, captured: Mapping[str, Tensor] | None
    ) -> Iterator[EngineAnswer]:
        """The answers to one request.

        Args:
            request: the request.
            outputs: vLLM's.
            number: of what was captured.
            captured: that; None: it has not ended.
        """
        for out in outputs:
            seen: dict[str, Tensor | Deferred] = {}
            if captured is not None:
                for name in self._kept_for(request.capture):
                    x = captured[f"{number}/{out.index}/{name}"][: len(request.prompt) + len(out.token_ids) - 1]
                    seen[name] = x.reshape(len(x), *self._places[name].shape)
                seen = {name: self._shown(name, seen) for name in request.capture}
            likely = [{token: float(found.logprob) for token, found in one.items()} for one in out.logprobs or ()]
            text = None if self.bridge.tokenizer is None else decode(self.bridge, out.token_ids)
            yield EngineAnswer(
                request.index, out.index, torch.tensor(list(out.token_ids)), text, likely,
                WhenAsked(seen, _computed_now), captured is not None,
            )  # fmt: skip

    def _kept_for(self, names: Sequence[str]) -> list[str]:
        """What has to be captured, so that hook points are known."""
        kept: list[str] = []
        for name in names:
            base = base_of(self.bridge.hook_dict[name])
            kept += [f"{base} q", f"{base} k"] if base in self._kernels else [base]
        return list(dict.fromkeys(kept))

    def _shown(self, name: str, seen: Mapping[str, Any]) -> Tensor | Deferred:
        """What a hook point shows of what was captured: itself, its features, or what is computed from it."""
        hook = self.bridge.hook_dict[name]
        if isinstance(hook.view, InBasis):
            encoded = InBasis(name, View(), hook.view.basis)  # of what was captured, which was seen already
            return Deferred(encoded, seen[base_of(hook)][None], Call(torch.nn.Identity(), (), {}))
        return self._computed(name, seen) if name in self._kernels else seen[name]

    def _computed(self, name: str, seen: Mapping[str, Any]) -> Deferred:
        """Scores or a pattern, computed when they are asked for, as in a run."""
        kernel, point = self._kernels[name], self._hooks[name].point
        query, key = (seen[f"{name} {letter}"].float().transpose(0, 1)[None] for letter in "qk")
        options = {"softcap": kernel["softcap"], "sliding_window": kernel["sliding_window"]}
        attention = AttentionCall(
            query, key, key, None, query.shape[1], scale=kernel["scale"], kernel=insides.ATTENTION, options=options
        )
        call = Call(torch.nn.Identity(), (), {})  # no view of these asks its module
        return DeferredAttention(point.view, attention, str(point.site.key), call, attention.versions(), True)


def _computed_now(name: str, seen: Tensor | Deferred) -> Tensor:
    return dense(seen.value(name))[0] if isinstance(seen, Deferred) else seen


@dataclass(frozen=True)
class _Asked:
    """A request: its prompt as tokens, its edit, what is captured, its adapter, what its edit is made from."""

    index: int
    prompt: list[int]
    new: int
    edit: EngineEdit
    capture: tuple[str, ...]
    adapter: str | None = None
    made_from: FromAnswers | None = None


#: The edit of a request that has none, or none yet.
_NOTHING = lower((), {}, 0)


def _waits_for(request: _Asked, total: int) -> Sequence[int]:
    """The numbers of the requests whose answers one needs.

    Raises:
        ValueError: there is no such request.
    """
    numbers = request.made_from.requests if request.made_from is not None else ()
    for number in numbers:
        if type(number) is not int or not 0 <= number < total:
            raise ValueError(
                f"each[{request.index}] is made from request {number!r}, and there are {total}: 0 to {total - 1}"
            )
    return numbers


def _tokenizer(name: str) -> Any:
    """The tokenizer of a model; None where its folder has none."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(name)


def _place(name: str, asked: Sequence[object]) -> Path | None:
    """The file in which it is kept what was proved of an engine; None: it is not kept.

    Args:
        name: of the model.
        asked: what the engine was asked for.
    """
    if (where := kept.folder()) is None:
        return None
    folder = Path(name) if Path(name).is_dir() else Path(str(cached_file(name, CONFIG_NAME))).parent
    of = [
        _files(folder),
        (folder / CONFIG_NAME).read_text(),
        built(),
        insides.vllm_version(),
        transformers.__version__,
    ]
    return where / f"engine-{kept.digest(json.dumps([*of, torch.__version__, _FORM, *asked]))}.json"


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """What the files of a folder are known by."""
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]


def _read(place: Path | None) -> dict[str, Any] | None:
    """What was kept; None where nothing is that can be read."""
    if place is None or not place.is_file():
        return None
    try:
        return unsealed(place.read_text())
    except (ValueError, OSError):
        return None


def _write(place: Path | None, proved: Mapping[str, Any]) -> None:
    """Keeps it, next to its place and moved there, so that two processes cannot meet in it."""
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(f".{uuid.uuid4().hex}")
        beside.write_text(sealed(proved))
        beside.replace(place)
