"""`Engine`: a model in vLLM, with the hook points, names and interventions of a bridge.

The inputs are a model folder, hook points, and prompts, each with its own `Interventions`. The
outputs are text, tokens, log-probabilities and captured activations, per request.

1. *The same tree.* vLLM's Transformers backend runs Hugging Face's own modules, so a declaration
   applies there, too: a hook point is a module's input or output and some of its columns. If vLLM
   merged several projections into one, each is a range of columns of the merged one
   (`bridge.engine.insides`, the only module that knows vLLM's internals).
2. *Placed before compilation.* Our worker puts hooks on those modules as soon as the model is
   loaded (`bridge.engine.worker`): tables of edits, a row number per token, a capture buffer. They
   are part of the compiled graph.
3. *Tables, not functions.* The operations of a request become rows (`bridge.engine.tables`). Before
   a pass every token gets its row number, by its request and position; in the pass all tokens are
   edited at once. The results do not depend on the other requests of the pass, on chunked prefill,
   on several samples or on recomputation.
4. *Proved at start.* The values and the effect of an edit at each hook point are compared once with
   the plain model (`bridge.engine.proof`); the result is cached like an inferred declaration.
5. *Prefix caching.* Keys and values after an edit carry a salt derived from it, so only requests
   with the same edit share them. A request with captures is computed from its first token on.
6. *Adapters and dependent requests.* A request may have a LoRA adapter (proved like hook points).
   Its interventions may depend on the answers to other requests of the call (`FromAnswers`).

Rejected with an error that names the hook point: points inside a forward (experts), computed
points, operations that no row can hold, functions, points whose columns are sharded across
processes, and untested features of vLLM (`insides`). vLLM's scheduling is not known here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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
from adapters.views import Deferred, View
from adapters.views.basis import InBasis, dense
from adapters.views.views import NO_CALL
from bridge.arguments import check_positive
from bridge.bridge import TransformerBridge
from bridge.engine import insides
from bridge.engine.proof import MOST_LIKELY, EngineProof, engine_point, rows_like, seen_in_order
from bridge.engine.readings import (
    EngineReading,
    LensTop,
    LikelyTokens,
    Readable,
    engine_reading,
    results_of,
    unsent,
)
from bridge.engine.tables import EngineEdit, EnginePlace, base_of, fit, lower, packed
from bridge.generation.batch import Prompts, prompts_of
from bridge.generation.options import decode
from bridge.hooks.names import NamesFilter, WhenAsked
from bridge.interventions import Interventions, ProbeReading
from bridge.run.inputs import HookSpec
from bridge.taps.attention_call import AttentionCall, DeferredAttention
from bridge.version import built

#: The keys of sites inside attention that are computed from queries and keys.
_COMPUTED = ("scores", "pattern")
#: The outputs of a router: the chosen experts and their weights.
_CHOICE = ("mlp.hook_topk_weights", "mlp.hook_expert_indices")
#: The version of the proof file format.
_FORM = 4


# --------------------------------------------------------------------------------------------------
# What requests give and take.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineAnswer:
    """A continuation of a prompt: its tokens and text, and the activations captured for it.

    Attributes:
        index: the index of its prompt.
        sample: which of several continuations of the prompt.
        tokens: the new tokens ``[new]``.
        text: the decoded tokens; None if the model has no tokenizer.
        likely: for each new token, the requested log-probabilities, by token.
        activations: the captured activations by canonical name, for every processed token (all but
            the last): ``[pos ...]``; scores and patterns ``[head pos key_pos]``, computed on
            access.
        ended: whether the answer is complete; otherwise it is partial and has no activations or
            readings.
        readings: the `ProbeReading` of each requested probe, by name, of every processed token.
        lens: the `LikelyTokens` of each requested lens, by name.
    """

    index: int
    sample: int
    tokens: Tensor
    text: str | None
    likely: list[dict[int, float]]
    activations: Mapping[str, Tensor]
    ended: bool = True
    readings: Mapping[str, ProbeReading] = field(default_factory=dict)
    lens: Mapping[str, LikelyTokens] = field(default_factory=dict)


@dataclass(frozen=True)
class FromAnswers:
    """Interventions of a request that depend on the answers to other requests of the same call.

    Args:
        requests: the indices of those requests among the prompts of the call.
        make: a function from their answers, in that order, to the interventions.

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


#: The interventions of each prompt, or a `FromAnswers`.
Each = Sequence[Sequence[HookSpec] | FromAnswers | None]


# --------------------------------------------------------------------------------------------------
# The engine.
# --------------------------------------------------------------------------------------------------


class Engine:
    """A model in vLLM, with interventions and captures at hook points for each request.

    The engine starts in a process of its own: guard a script with ``if __name__ == "__main__"``.

    Args:
        model: a folder or hub name of a causal language model.
        points: the hook points that can be edited or captured, as `TransformerBridge.select_hooks`
            takes them.
        dtype: the dtype of weights and activations; None: the one in the model's configuration.
        rows: the number of table rows per site; if requests' edits need more, the requests run in
            several groups.
        rank: the number of directions that an edit may project out at one place.
        probes: the number of probes of a request; conditions test their readings.
        adapters: the folders of LoRA adapters, as PEFT saves them, by name.
        options: further arguments of ``vllm.LLM``.

    Attributes:
        bridge: a bridge of the model without weights: names, axes, sizes, tokenizer.
        adapters: the folders of its LoRA adapters, by name.
        refused: why a requested hook point is not offered, by name.

    Raises:
        VersionError: vLLM is not installed, or has an unsupported version.
        UnknownHookError: a name that no hook point has.
        TypeError, ValueError: unsupported options.

    Example:
        >>> from bridge.engine import Engine  # doctest: +SKIP
        >>> engine = Engine(
        ...     "folder/of/a/model", points=["blocks.1.hook_resid_post"]
        ... )  # doctest: +SKIP
        >>> engine.generate(["Mary and", "When John"], 4, capture=engine.offered())[
        ...     0
        ... ].text  # doctest: +SKIP
        ' John went to the'
    """

    def __init__(
        self,
        model: str | PathLike[str],
        points: NamesFilter,
        *,
        dtype: torch.dtype | None = None,
        rows: int = 64,
        rank: int = 1,
        probes: int = 0,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        **options: Any,
    ) -> None:
        insides.check_vllm()
        insides.check_options(options)
        check_positive("rows", rows)
        self._rows = rows
        self._rank = rank
        self._probes = probes
        self._is_running = False
        self._numbers = count()
        self._sent: set[str] = set()
        self._places: dict[str, EnginePlace] = {}
        self._kernels: dict[str, Mapping[str, Any]] = {}
        self.adapters = {key: fspath(folder) for key, folder in (adapters or {}).items()}
        self.refused: dict[str, str] = {}
        name = fspath(model)
        config = AutoConfig.from_pretrained(name)
        dtype = dtype or config.get_text_config().dtype or torch.float32
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.bridge = TransformerBridge(skeleton, _tokenizer(name))
        self._hooks = {hook.name: hook for hook in self.bridge.select_hooks(points)}
        self._start(name, dtype, options)

    def _start(self, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        """Start vLLM with the hook points that it has places for, and verify them, or read the
        cached proof.

        Args:
            name, dtype, options: as for `Engine`.
        """
        texts = {key: str(value) for key, value in options.items()}
        file = self._proof_file(name, [str(dtype), self._rank, self._probes, texts])
        proof = _read(file)
        plain = None
        if proof is None:
            plain = _plain_bridge(name)
            proof = self._described(plain)
        self._order: list[str] = proof["order"]
        config = self._worker_config(proof["points"])
        options |= insides.adapter_options(self.adapters)
        #: The model, the dtype and the worker's configuration.
        self.started_with = (name, str(dtype).removeprefix("torch."), config, options)
        self._vllm = insides.started(*self.started_with)
        try:
            self._read_places()
            if plain is not None:
                proof["found"] = self._differences(plain, dtype)
                _write(file, proof)
        except BaseException:
            self.close()  # safe: no engine has started yet, so no other thread uses it
            raise
        self.refused |= {name: why for name, why in proof["found"].items() if why}

    def _proof_file(self, name: str, arguments: Sequence[object]) -> Path | None:
        """Return the file that caches the engine's proof; None if caching is off.

        Args:
            name: the model's name.
            arguments: the engine's other arguments.
        """
        if (where := kept.folder()) is None:
            return None
        folder = Path(name)
        if not folder.is_dir():
            folder = Path(str(cached_file(name, CONFIG_NAME))).parent
        adapters = {name: _files(Path(adapter)) for name, adapter in self.adapters.items()}
        identity = [
            _files(folder),
            (folder / CONFIG_NAME).read_text(),
            built(),
            insides.vllm_version(),
            transformers.__version__,
            torch.__version__,
            _FORM,
            list(self._hooks),
            *arguments,
            adapters,
        ]
        return where / f"engine-{kept.digest(json.dumps(identity))}.json"

    def _described(self, plain: TransformerBridge) -> dict[str, Any]:
        """Return a description of each hook point for the worker, or the reason why it is refused,
        and the forward order of the points.
        """
        hooks = list(self._hooks.values())
        model = plain.original_model
        rows = rows_like(plain, hooks)
        points = {hook.name: engine_point(hook, model, rows.get(hook.name)) for hook in hooks}
        offered = [name for name, point in points.items() if not isinstance(point, str)]
        return {"points": points, "order": seen_in_order(plain, offered)}

    def _worker_config(self, points: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's configuration; note which points are refused.

        Args:
            points: by name, each hook point's description, or the reason why it is refused.
        """
        placed: dict[str, Any] = {}
        computed: dict[str, Any] = {}
        for name, point in points.items():
            if isinstance(point, str):
                self.refused[name] = point
            elif point["key"] in _COMPUTED:
                computed |= {f"{name} {key}": {**point, "key": key} for key in "qk"}
            else:
                placed[name] = point
        return {
            "rows": self._rows,
            "rank": self._rank,
            "probes": self._probes,
            "routers": any(name.endswith(_CHOICE) for name in placed),
            "points": placed | computed,
        }

    def _read_places(self) -> None:
        """Read from the worker where the hook points are placed, or why they are not."""
        for name, place in self._vllm.collective_rpc("bridge_places")[0].items():
            point = name.split(" ")[0]
            if "refused" in place:
                self.refused[point] = place["refused"]
                continue
            kernel = place.pop("kernel")
            self._places[name] = EnginePlace(**place)
            if point != name:
                self._kernels[point] = kernel

    def _differences(self, plain: TransformerBridge, dtype: torch.dtype) -> dict[str, str]:
        """Run the requests of a proof and compare the answers; the requests with adapters run in
        the same passes.
        """
        placed = [*self._places, *self._kernels]
        hooks = [hook for name, hook in self._hooks.items() if name in placed]
        order = self._order if self._probes else ()
        proof = EngineProof(plain, hooks, self._places, dtype, self._rank, order)
        requests: list[_Request] = []
        for request in proof.requests:
            edit = self.edit(request.edits)
            for adapter in (None, *self.adapters):
                index = len(requests)
                capture = request.capture
                requests.append(
                    _Request(index, request.prompt, request.new, edit, capture, adapter)
                )
        answers = list(self._answers(requests, False, logprobs=MOST_LIKELY))
        answers.sort(key=lambda answer: answer.index)
        runs = 1 + len(self.adapters)
        differences = proof.differences(answers[::runs])
        hf: Any = plain.original_model
        for run, (adapter, folder) in enumerate(self.adapters.items(), 1):
            hf.load_adapter(folder, adapter_name=adapter)
            hf.set_adapter(adapter)
            proof.bridge = TransformerBridge(hf, None)
            for point, why in proof.differences(answers[run::runs]).items():
                if why and not differences[point]:
                    differences[point] = f"with adapter {adapter} {why}"
        return differences

    def close(self) -> None:
        """Stop the engine's process."""
        insides.shut(self._vllm)

    def weights(self) -> str:
        """Return a hash of the weights, as the engine holds them."""
        return "".join(self._vllm.collective_rpc("bridge_weights"))

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens in a prompt."""
        return insides.longest_of(self._vllm) - 1  # leave space for one generated token

    @property
    def device(self) -> str:
        """Return the kind of device that the engine computes on."""
        return insides.device_of(self._vllm)

    def offered(self) -> list[str]:
        """Return the hook points that passed the proof; `refused` explains the others."""
        return [name for name in self._hooks if name not in self.refused]

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        each: Each | None = None,
        capture: NamesFilter = (),
        *,
        readings: Sequence[Readable] = (),
        adapter_names: Sequence[str | None] | None = None,
        stop_at_eos: bool = True,
        prepend_bos: bool | None = None,
        verbose: bool = False,
        **sampling: Any,
    ) -> list[EngineAnswer]:
        """Continue prompts, each under its own interventions; `stream` yields answers as they are
        produced.

        Args:
            prompts: texts, or tokens.
            max_new_tokens: the largest number of new tokens per prompt.
            each: for each prompt its interventions, a `FromAnswers`, or None.
            capture: the hook points to capture, at prompt tokens and new tokens.
            readings: probes (`FittedProbe`) and lenses (`LensTop`) that the worker computes at
                these tokens; activations do not leave it.
            adapter_names: for each prompt the name of its LoRA adapter, or None.
            stop_at_eos: whether to stop at the end-of-sequence token.
            prepend_bos: whether to prepend BOS to texts; None: the model's default.
            verbose: show a progress bar.
            sampling: further arguments of ``vllm.SamplingParams`` (``n``, ``temperature``,
                ``seed``, ``logprobs``); greedy by default.

        Returns:
            The answers in the order of the prompts; several answers to one prompt by sample.

        Raises:
            ValueError: a hook point that is not offered (the message gives the reason); an
                unsupported operation; an unknown adapter; requests that wait for each other.
            TypeError: a function in place of an operation; `steps`, which only `stream` takes.
            IndexError: a position that the prompt does not have.
        """
        if "steps" in sampling:
            raise TypeError("generate gives whole answers: steps is an argument of stream")
        answers = self.stream(
            prompts,
            max_new_tokens,
            each,
            capture,
            readings=readings,
            adapter_names=adapter_names,
            stop_at_eos=stop_at_eos,
            prepend_bos=prepend_bos,
            **sampling,
        )
        total = len(prompts) * int(sampling.get("n", 1))
        shown = tqdm(answers, total=total, disable=not verbose)
        return sorted(shown, key=lambda answer: (answer.index, answer.sample))

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        each: Each | None = None,
        capture: NamesFilter = (),
        *,
        readings: Sequence[Readable] = (),
        adapter_names: Sequence[str | None] | None = None,
        steps: bool = False,
        stop_at_eos: bool = True,
        prepend_bos: bool | None = None,
        **sampling: Any,
    ) -> Iterator[EngineAnswer]:
        """Yield the answers of `generate` as they are produced. Leaving the loop aborts the
        remaining requests.

        Args:
            prompts, max_new_tokens, each, capture, readings, adapter_names, stop_at_eos,
                prepend_bos, sampling: as for `generate`.
            steps: also yield the partial answers after each step (`ended` is False).

        Raises:
            ValueError, TypeError, IndexError: as for `generate`, before anything runs; the result
                of a `FromAnswers` is checked when it is computed.
        """
        requests = self.requests(
            prompts, max_new_tokens, each, capture, adapter_names, prepend_bos, readings
        )
        if not any(request.made_from for request in requests):
            return self._answers(requests, stop_at_eos, steps, **sampling)
        if sampling.get("n", 1) != 1:
            raise ValueError(
                "interventions that are made from answers need one answer of each prompt: n=1"
            )
        _check_dependencies(requests)
        order = TopologicalSorter({request.index: request.needs for request in requests})
        try:
            order.prepare()
        except CycleError as error:
            raise ValueError(f"requests {error.args[1]} wait for each other's answers") from None
        return self._in_order(requests, order, stop_at_eos, steps, **sampling)

    def requests(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        each: Each | None = None,
        capture: NamesFilter = (),
        adapter_names: Sequence[str | None] | None = None,
        prepend_bos: bool | None = None,
        readings: Sequence[Readable] = (),
    ) -> list[_Request]:
        """Check requests and turn them into table rows; `generate` and `stream` call this.

        Args:
            prompts, max_new_tokens, each, capture, adapter_names, prepend_bos, readings: as for
                `generate`.

        Raises:
            ValueError, TypeError, IndexError: as for `generate`.
        """
        check_positive("max_new_tokens", max_new_tokens)
        rows = prompts_of(self.bridge, prompts, prepend_bos)
        for name, values in (("each", each), ("adapter_names", adapter_names)):
            if values is not None and len(values) != len(rows):
                raise ValueError(
                    f"{name} has {len(values)} entries, and there are {len(rows)} prompts"
                )
        none = isinstance(capture, Sequence) and not isinstance(capture, str) and not capture
        names = () if none else tuple(hook.name for hook in self.bridge.select_hooks(capture))
        self._check_offered(names)
        read = self.read(readings)
        nothing = [None] * len(rows)
        entries = zip(rows, each or nothing, adapter_names or nothing, strict=True)
        requests: list[_Request] = []
        edits: dict[int, EngineEdit] = {}  # interventions that requests share are lowered once
        for index, (row, specs, adapter) in enumerate(entries):
            self._check_adapter(adapter)
            request = _Request(index, row, max_new_tokens, _NOTHING, names, adapter, readings=read)
            if isinstance(specs, FromAnswers):
                requests.append(replace(request, made_from=specs))
                continue
            if id(specs) not in edits:
                edits[id(specs)] = self.edit(specs or ())
            requests.append(self._with_edit(request, specs or (), edits[id(specs)]))
        return requests

    def _with_edit(
        self, request: _Request, specs: Sequence[HookSpec], edit: EngineEdit
    ) -> _Request:
        """Return a request with its edit.

        Raises:
            ValueError, IndexError: as for `generate`.
        """
        edit.check_prompt(len(request.prompt))
        read = [reading.point for reading in request.readings]
        self._check_captured(specs, [*request.capture, *read])
        return replace(request, edit=edit)

    def _in_order(
        self,
        requests: Sequence[_Request],
        order: TopologicalSorter[int],
        stop_at_eos: bool,
        steps: bool,
        **sampling: Any,
    ) -> Iterator[EngineAnswer]:
        """Run each request after the requests whose answers it needs."""
        needed = {number for request in requests for number in request.needs}
        answers: dict[int, EngineAnswer] = {}
        while order.is_active():
            ready = order.get_ready()
            wave = [self._with_answers(requests[number], answers) for number in sorted(ready)]
            with closing(self._answers(wave, stop_at_eos, steps, **sampling)) as running:
                for answer in running:
                    if answer.ended and answer.index in needed:
                        answers[answer.index] = answer
                    yield answer
            order.done(*ready)

    def _with_answers(self, request: _Request, answers: Mapping[int, EngineAnswer]) -> _Request:
        """Return a request with its interventions, now that the answers that it needs are known."""
        if request.made_from is None:
            return request
        specs = request.made_from.make(*[answers[number] for number in request.needs])
        return self._with_edit(request, specs, self.edit(specs))

    def read(self, sources: Sequence[Readable]) -> tuple[EngineReading, ...]:
        """Check probes and lenses, and return them as the worker receives them.

        Raises:
            TypeError: one is neither.
            ValueError: two have the same name; a hook point that is not offered, or that a reading
                does not fit; a lens in an engine with adapters or several processes.
        """
        readings = tuple([engine_reading(source, self.bridge) for source in sources])
        names = [reading.label for reading in readings]
        if len(set(names)) < len(names):
            raise ValueError(f"readings are named {', '.join(names)}: give each its own name")
        self._check_offered([reading.point for reading in readings])
        for reading in readings:
            if base_of(self.bridge.hook_dict[reading.point]) != reading.point:
                raise ValueError(
                    f"{reading.point} is in a basis, whose features an engine computes when a pass"
                    " is over: read the activation itself"
                )
            several = self.started_with[3].get("tensor_parallel_size", 1) > 1
            if isinstance(reading.source, LensTop) and (self.adapters or several):
                raise ValueError(
                    "lenses were not tried in an engine with adapters or with several processes:"
                    " use bridge.lens"
                )
        return readings

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in self.adapters:
            has = ", ".join(self.adapters) or "none"
            raise ValueError(
                f"there is no adapter {name!r} in this engine, which has {has}: Engine(adapters=)"
            )

    def check(self, each: Sequence[HookSpec] = (), capture: Sequence[str] = ()) -> None:
        """Check that the engine supports a request; `generate` calls this.

        Args:
            each: the interventions.
            capture: the names of the hook points to capture.

        Raises:
            ValueError: a hook point that is not offered, or an unsupported operation.
            TypeError: a function in place of an operation.
        """
        self._check_offered(capture)
        self.edit(each)
        self._check_captured(each, capture)

    def _check_captured(self, specs: Sequence[HookSpec], capture: Sequence[str]) -> None:
        """Reject capturing an activation whose features are edited: an engine has one value there,
        a run has two.
        """
        hooks = [hook for names, _ in specs for hook in self.bridge.select_hooks(names)]
        changed = {base_of(hook): hook.name for hook in hooks if isinstance(hook.view, InBasis)}
        for name in capture:
            if (base := base_of(self.bridge.hook_dict[name])) in changed:
                raise ValueError(
                    f"{name} cannot be captured in an engine from a request that changes"
                    f" {changed[base]}: a run shows {base} as it was before and features as they"
                    " were set, and an engine's pass has what came of both. Capture it in a"
                    " request without that change, or use bridge.generate_batch"
                )

    def _check_offered(self, names: Sequence[str]) -> None:
        for shown in names:
            hook = self.bridge.hook_dict[shown]
            name = base_of(hook)
            if isinstance(hook.view, InBasis) and (hook.view.reads or name in self._kernels):
                raise ValueError(
                    f"{shown} is not a basis of a single hook point's own activation, so it is not"
                    " offered in this engine"
                )
            if name in self.refused:
                raise ValueError(f"{name} is not offered in this engine: {self.refused[name]}")
            if name not in self._hooks:
                raise ValueError(
                    f"{name} is not among the points that this engine was started with:"
                    " Engine(points=)"
                )

    def edit(self, specs: Sequence[HookSpec]) -> EngineEdit:
        """Turn interventions into table rows.

        Args:
            specs: the interventions of one prompt, as for `generate`.

        Raises:
            ValueError, TypeError: as for `generate`.
        """
        pairs = [(hook, fn) for names, fn in specs for hook in self.bridge.select_hooks(names)]
        self._check_offered([hook.name for hook, _ in pairs])
        for hook, _ in pairs:
            if hook.name in self._kernels:
                raise ValueError(
                    f"{hook.name} is computed from queries and keys when an engine is done, so it"
                    " can be captured here and not changed: use bridge.generate_batch"
                )
            if self._places[base_of(hook)].counts:
                raise ValueError(
                    f"{hook.name} holds the numbers of the experts that were chosen, which an"
                    " engine shows and does not change: change hook_topk_weights, or use"
                    " bridge.generate_batch"
                )
        checked = Interventions([(hook.name, fn) for hook, fn in pairs], self.bridge)
        lowered = [(hook, fn) for (hook, _), (_, fn) in zip(pairs, checked, strict=True)]
        edit = lower(lowered, self._places, self._rank, self._order, self._probes)
        if not fit([edit], self._rows):
            raise ValueError(
                f"one request needs more rows than there are ({self._rows}): Engine(rows=)"
            )
        return edit

    def _answers(
        self, requests: Sequence[_Request], stop_at_eos: bool, steps: bool = False, **sampling: Any
    ) -> Generator[EngineAnswer]:
        """Run requests, as many at a time as the tables have rows for.

        Raises:
            ValueError: other requests are running.
        """
        if self._is_running:
            raise ValueError(
                "another stream of this engine is under way: take all its answers, or leave its"
                " loop"
            )
        self._is_running = True
        engine = self._vllm.llm_engine
        running: dict[str, _Request] = {}
        try:
            for group in self._groups(requests):
                edits = {request.edit.key: request.edit for request in group if request.edit.sites}
                self._vllm.collective_rpc("bridge_edit", args=packed(list(edits.values())))
                self._send([x for request in group for x in request.readings])
                for request in group:
                    number = next(self._numbers)
                    prompt, ticket = self.asked(request, number)
                    params = insides.sampling(request.new, stop_at_eos, steps, ticket, sampling)
                    adapter = self.adapter(request.adapter)
                    running[str(number)] = request
                    engine.add_request(str(number), prompt, params, lora_request=adapter)
                yield from self._finished(running)
        finally:
            self._is_running = False
            engine.abort_request(list(running))
            self._take(running)  # the caller has left the loop

    def _send(self, readings: Sequence[EngineReading]) -> None:
        """Send readings to the worker, each once."""
        if (new := unsent(readings, self._sent)) is not None:
            self._vllm.collective_rpc("bridge_read", args=new)
            self._sent |= {reading.key for reading in readings}

    def _finished(self, running: dict[str, _Request]) -> Iterator[EngineAnswer]:
        """Run the engine until all requests have ended; yield their answers.

        Args:
            running: the requests, by name; a request is removed when it has ended.
        """
        engine = self._vllm.llm_engine
        samples: dict[str, dict[int, Any]] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for out in outputs:
                latest = {sample.index: sample for sample in out.outputs}
                samples.setdefault(out.request_id, {}).update(latest)
            for out in outputs:
                name = out.request_id
                if not out.finished:
                    yield from self.made(running[name], list(samples[name].values()), name, None)
            ended = [out.request_id for out in outputs if out.finished]
            captured = self._take({name: running[name] for name in ended})
            for name in ended:
                request = running.pop(name)
                yield from self.made(request, list(samples.pop(name).values()), name, captured)

    def _take(self, requests: Mapping[str, _Request]) -> dict[str, Tensor]:
        """Take the captured activations and the readings of requests out of the worker."""
        numbers = [int(name) for name, request in requests.items() if request.is_captured]
        if not numbers:
            return {}
        return tensors_of(self._vllm.collective_rpc("bridge_take", args=(numbers,))[0])

    def asked(self, request: _Request, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return vLLM's arguments for a request, and the worker's data about it.

        Args:
            request: the request.
            number: the request's number in the names of its captures.
        """
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt}
        ticket: dict[str, Any] = {"number": number, "capture": self._kept_for(request.capture)}
        ticket["read"] = [reading.key for reading in request.readings]
        if request.edit.sites:
            prompt["cache_salt"] = ticket["edit"] = request.edit.key
        return prompt, ticket

    def adapter(self, name: str | None) -> Any:
        """Return vLLM's `LoRARequest` for an adapter."""
        if name is None:
            return None
        number = list(self.adapters).index(name) + 1
        return insides.lora(name, number, self.adapters[name])

    def _groups(self, requests: Sequence[_Request]) -> Iterator[list[_Request]]:
        """Group requests so that the edits of each group fit into the tables together."""
        group: list[_Request] = []
        edits: dict[str, EngineEdit] = {}
        for request in requests:
            edit = request.edit
            if edit.key not in edits and not fit([*edits.values(), edit], self._rows):
                yield group
                group = []
                edits = {}
            edits[edit.key] = edit
            group.append(request)
        yield group

    def made(
        self,
        request: _Request,
        outputs: Sequence[Any],
        number: str,
        captured: Mapping[str, Tensor] | None,
    ) -> Iterator[EngineAnswer]:
        """Build the answers to one request.

        Args:
            request: the request.
            outputs: vLLM's outputs.
            number: the request's number in the names of its captures.
            captured: the captured activations; None if the request has not ended.
        """
        for out in outputs:
            activations: dict[str, Tensor | Deferred] = {}
            results: dict[str, Any] = {}
            if captured is not None:
                length = len(request.prompt) + len(out.token_ids) - 1
                prefix = f"{number}/{out.index}/"
                values: dict[str, Tensor] = {}
                for name in self._kept_for(request.capture):
                    x = captured[prefix + name][:length]
                    values[name] = x.reshape(len(x), *self._places[name].shape)
                activations = {name: self._shown(name, values) for name in request.capture}
                results = results_of(request.readings, captured, prefix, length)
            likely = [
                {token: float(entry.logprob) for token, entry in entries.items()}
                for entries in out.logprobs or ()
            ]
            text = None if self.bridge.tokenizer is None else decode(self.bridge, out.token_ids)
            yield EngineAnswer(
                request.index,
                out.index,
                torch.tensor(list(out.token_ids)),
                text,
                likely,
                WhenAsked(activations, _computed_now),
                captured is not None,
                {name: x for name, x in results.items() if isinstance(x, ProbeReading)},
                {name: x for name, x in results.items() if isinstance(x, LikelyTokens)},
            )

    def _kept_for(self, names: Sequence[str]) -> list[str]:
        """Return the names of the hook points to capture in order to compute the requested ones."""
        kept: list[str] = []
        for name in names:
            base = base_of(self.bridge.hook_dict[name])
            kept += [f"{base} q", f"{base} k"] if base in self._kernels else [base]
        return list(dict.fromkeys(kept))

    def _shown(self, name: str, captured: Mapping[str, Tensor]) -> Tensor | Deferred:
        """Return a hook point's activation from the captures: the tensor itself, its features, or a
        derived value.
        """
        hook = self.bridge.hook_dict[name]
        if isinstance(hook.view, InBasis):
            # A view of captures, which have already passed the site
            features = InBasis(name, View(), hook.view.basis)
            return Deferred(features, captured[base_of(hook)][None], NO_CALL)
        return self._computed(name, captured) if name in self._kernels else captured[name]

    def _computed(self, name: str, captured: Mapping[str, Tensor]) -> Deferred:
        """Return scores or a pattern, computed when they are read, as in a run."""
        kernel = self._kernels[name]
        point = self._hooks[name].point
        query, key = (captured[f"{name} {x}"].float().transpose(0, 1)[None] for x in "qk")
        options = {"softcap": kernel["softcap"], "sliding_window": kernel["sliding_window"]}
        attention = AttentionCall(
            query,
            key,
            key,
            None,
            query.shape[1],
            scale=kernel["scale"],
            kernel=insides.ATTENTION,
            options=options,
        )
        return DeferredAttention(
            point.view, attention, str(point.site.key), NO_CALL, attention.versions(), True
        )


def _computed_now(name: str, activation: Tensor | Deferred) -> Tensor:
    return dense(activation.value(name))[0] if isinstance(activation, Deferred) else activation


# --------------------------------------------------------------------------------------------------
# Requests, and the file that caches a proof.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """A request: its prompt as tokens, its edit, its captures, its adapter, the requests that its
    edit depends on, and its readings.
    """

    index: int
    prompt: list[int]
    new: int
    edit: EngineEdit
    capture: tuple[str, ...]
    adapter: str | None = None
    made_from: FromAnswers | None = None
    readings: tuple[EngineReading, ...] = ()

    @property
    def is_captured(self) -> bool:
        """Tell whether the worker keeps something for it."""
        return bool(self.capture or self.readings)

    @property
    def needs(self) -> Sequence[int]:
        """Return the indices of the requests whose answers it needs."""
        return () if self.made_from is None else self.made_from.requests


#: The edit of a request without interventions, or whose interventions are not known yet.
_NOTHING = lower((), {}, 0)


def _check_dependencies(requests: Sequence[_Request]) -> None:
    """Check that requests need answers of existing requests.

    Raises:
        ValueError: there is no request with such an index.
    """
    total = len(requests)
    for request in requests:
        for number in request.needs:
            if type(number) is not int or not 0 <= number < total:
                raise ValueError(
                    f"each[{request.index}] is made from request {number!r}, and there are {total}:"
                    f" 0 to {total - 1}"
                )


def _tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; None if its folder has none."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(name)


def _plain_bridge(name: str) -> TransformerBridge:
    """Return a bridge of the plain model in float32, with eager attention.

    Eager attention supports everything; torch's kernel has no soft cap (Gemma 2), and vLLM's does.
    """
    hf = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="eager"
    )
    return TransformerBridge(hf.eval(), None)


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return the names, sizes and modification times of a folder's files."""
    return [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(folder.iterdir())
    ]


def _read(file: Path | None) -> dict[str, Any] | None:
    """Return a cached proof; None if there is none or it cannot be read."""
    if file is None or not file.is_file():
        return None
    try:
        return unsealed(file.read_text())
    except (ValueError, OSError):
        return None


def _write(file: Path | None, proof: Mapping[str, Any]) -> None:
    """Write the proof to a temporary file and rename it, so that concurrent processes cannot
    collide.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{uuid.uuid4().hex}")
        temporary.write_text(sealed(proof))
        temporary.replace(file)
