"""The distribution of a model over processes, and the hook points whose tensors it shards.

Under tensor parallelism (`tp_plan` of transformers) some linear layers hold a shard of their
columns or rows on each process. The activations between them are then sharded too: some heads, some
neurons. The plan names the layers and their styles; their parameters are `DTensor`. Everything
else, the residual stream first of all, is whole and equal on all processes. Under FSDP2 and data
parallelism every process computes whole activations, of its own rows.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Cache, PreTrainedModel

from adapters.imports import check_tensor_parallel
from adapters.linear import Turned
from adapters.points import Point, Site, core_path, is_inside, join, module_at, module_path
from adapters.views import View
from adapters.views.heads import HeadsFirst
from adapters.views.views import Composed

# --------------------------------------------------------------------------------------------------
# Whether processes that share a model run the same edits.
# --------------------------------------------------------------------------------------------------


class DifferentEditsError(RuntimeError):
    """An error for processes that share a model but run different edits."""


@dataclass(frozen=True)
class Peers:
    """The processes that share a model, and their communication.

    Attributes:
        group: the processes, in the group that the model's own tensors use.
        side: a group of the same processes only for control messages, so that an unanswered message
            does not disturb the model's communication.
        compares: whether the results of hooks are compared.
        patience: how many seconds a process that reads an activation in a pass waits for the
            others.
    """

    group: dist.ProcessGroup
    side: dist.ProcessGroup
    compares: bool = True
    patience: float = 60.0

    def agreed(self, make: Callable[[], Tensor], name: str) -> Tensor:
        """Run hooks on an activation, and check that the result is the same on all processes.

        Args:
            make: runs the hooks.
            name: of the hook point.

        Raises:
            DifferentEditsError: on all processes, if the results differ; on the other processes, if
                a hook failed on one process or some processes do not arrive.
        """
        if not self.compares:
            return make()
        try:
            result = make()
        except BaseException:
            self._compared(0, self.side.rank() + 1, name)
            raise
        self._check_same(
            _checksum(result),
            name,
            f"what hooks made of {name} differs between the {self.side.size()} processes that share"
            " this model: seed random numbers alike, and do the same on all",
        )
        return result

    def meet(self, name: str) -> None:
        """Wait until all processes read the same hook point, before any of it is sent.

        Args:
            name: of the hook point.

        Raises:
            DifferentEditsError: the other processes read a different hook point, or none.
        """
        self._check_same(
            zlib.crc32(name.encode()),
            name,
            f"{name} is asked for here, and another hook point on other processes that share this"
            " model: do the same on all",
        )

    def _check_same(self, number: int, name: str, otherwise: str) -> None:
        """Raise an error if a number differs between processes, or if a hook failed on one."""
        same, failed = self._compared(number, 0, name)
        if failed:
            otherwise = (
                f"a hook at {name} failed on process {failed - 1} of {self.side.size()}, which"
                " says why"
            )
        if failed or not same:
            raise DifferentEditsError(otherwise)

    def agree(self, numbers: list[int]) -> Callable[[], list[bool]]:
        """Start to check that each number is equal on all processes, all of which have to call
        this; return a function that waits for the answer.
        """
        answer = largest(self.side, [*numbers, *(-number for number in numbers)])

        def same() -> list[bool]:
            extremes = answer()
            lowest = extremes[len(numbers) :]
            return [high == -low for high, low in zip(extremes, lowest, strict=False)]

        return same

    def least(self, number: int) -> int:
        """Return the smallest of the processes' numbers; all processes have to call this."""
        return -largest(self.side, [-number])()[0]

    def _compared(self, number: int, failed: int, name: str) -> tuple[bool, int]:
        try:
            highest, lowest, failed = largest(self.side, [number, -number, failed], self.patience)()
        except RuntimeError as error:  # gloo's error for a process that is late or gone
            raise DifferentEditsError(
                f"hooks are called at {name} here, and other processes that share this model did"
                f" not come there in {self.patience:g} seconds, or ended ({error}): make each call"
                " on all, with the same hooks"
            ) from error
        return highest == -lowest, failed


def largest(
    side: dist.ProcessGroup, numbers: list[int], seconds: float | None = None
) -> Callable[[], list[int]]:
    """Start to compute, at each place, the largest of the processes' numbers; return a function
    that waits for the result.

    Args:
        side: the processes, all of which have to call it.
        numbers: this process's numbers.
        seconds: how long to wait for the others; None: the group's timeout.
    """
    highest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    work = dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=side, async_op=True)
    assert work is not None
    options = () if seconds is None else (timedelta(seconds=seconds),)

    def answer() -> list[int]:
        work.wait(*options)
        return highest.tolist()

    return answer


class Turns:
    """The passes of processes that have different rows but need each other for a pass (to gather
    parameters). All processes run each pass at the same time. A process that has nothing to run
    joins with an empty batch.

    Args:
        side: the processes, all of which have to take turns until they end.
        join: runs a pass without rows; takes the number of the kind of pass.
    """

    def __init__(self, side: dist.ProcessGroup, join: Callable[[int], object]) -> None:
        self._side = side
        self._join = join
        #: True while a pass is unfinished: if it was aborted, the other processes wait in it
        #: forever.
        self.under_way = False

    def take(self, number: int) -> None:
        """Wait until this process's pass is next, and join the other processes' passes until then.

        Args:
            number: a positive number that identifies the kind of pass. Passes with larger numbers
                come first.

        Raises:
            RuntimeError: the previous pass was aborted.
        """
        if self.under_way:
            raise RuntimeError(
                "a pass broke off, and the other processes wait in it: end all of them"
            )
        while (now := largest(self._side, [number])()[0]) > number:
            self._join(now)
        self.under_way = number > 0

    def end(self) -> None:
        """Join the other processes' passes until none of them has any left."""
        if not self.under_way:
            self.take(0)


def number_of(value: object) -> int:
    """Return a checksum of tensors, arrays, texts and numbers; other objects do not count.

    For a cache of keys and values, of which each process may have a shard, only the length counts.

    Args:
        value: one such object, or a list or mapping of them.

    Example:
        >>> import torch
        >>> from adapters.spread import number_of
        >>> number_of({"input": torch.tensor([1, 2])}) == number_of({"input": torch.tensor([1, 3])})
        False
    """
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy().tobytes(), _number_of_text(value.shape))
    if isinstance(value, np.ndarray):
        return number_of(torch.as_tensor(value))
    if isinstance(value, Cache):
        return number_of(value.get_seq_length())
    if isinstance(value, Mapping):
        return number_of(list(value.values()))
    if isinstance(value, list | tuple):
        return _number_of_text([number_of(entry) for entry in value])
    return _number_of_text(value) if isinstance(value, str | int | float) else 0


def _number_of_text(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _checksum(x: Tensor) -> int:
    """Return a checksum of a tensor's bits, weighted by position, so that a collision is
    unlikely."""
    size = x.element_size()
    bits = x.detach().contiguous().flatten()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = bits.view(integers[bits.element_size()]).long()
    # The upper bits, signs among them, count only if they are not cut off.
    words = words ^ (words >> 32)
    places = torch.arange(1, len(words) + 1, device=x.device) * 2_654_435_761 + 1
    return int((words * places).sum()) % (2**61) + size


# --------------------------------------------------------------------------------------------------
# A tensor sharded over processes: gathering and sharding. Each is the inverse of the other, for
# gradients too.
# --------------------------------------------------------------------------------------------------


#: Parameters that are spread over processes, by name.
Parameters = Mapping[str, DTensor]
#: A function that gathers or shards a tensor.
Turn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cut:
    """The sharding of a tensor over the processes that share a model.

    Attributes:
        group: the processes.
        axis: the sharded axis, in equal parts in the order of the processes; None: it is not
            sharded.
        peers: the processes, if hooks see the tensor.
        sums: what has to be summed over the processes: the ``tensor`` (the first process stores an
            edit, the others store 0), or the ``gradient`` of a tensor that all hold. None: neither.
    """

    group: dist.ProcessGroup
    axis: int | None = None
    peers: Peers | None = None
    sums: Literal["tensor", "gradient"] | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether all processes hold the whole tensor."""
        return self.axis is None and self.sums is None

    @property
    def parts(self) -> int:
        """Return the number of shards."""
        return 1 if self.axis is None else self.group.size()

    def whole(self, part: Tensor) -> Tensor:
        """Return all shards joined, or their sum. All processes have to call this."""
        return self._turned(part, self.joined, self.own)

    def part(self, x: Tensor) -> Tensor:
        """Return this process's shard."""
        return self._turned(x, self.own, self.joined)

    def _turned(self, x: Tensor, turn: Turn, back: Turn) -> Tensor:
        if self.is_whole:
            return x
        if self.sums == "gradient":
            turn = torch.clone
        if self.sums == "tensor":
            back = torch.clone
        return cast(Tensor, Turned.apply(x, turn, back))

    def joined(self, part: Tensor) -> Tensor:
        """Gather as `whole` does, without a gradient."""
        if self.is_whole:
            return part
        part = part.contiguous()
        if self.axis is None:
            total = part.clone()
            dist.all_reduce(total, group=self.group)
            return total
        parts = [torch.empty_like(part) for _ in range(self.parts)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, self.axis)

    def own(self, x: Tensor) -> Tensor:
        """Shard as `part` does, without a gradient."""
        rank = self.group.rank()
        if self.axis is None:
            return x.clone() if rank == 0 else torch.zeros_like(x)
        size = x.shape[self.axis] // self.parts
        return x.narrow(self.axis, rank * size, size).contiguous()


#: Styles of layers that output a shard of their columns.
_GIVES_PART = "colwise"
#: Styles of layers that receive a shard of their columns.
_TAKES_PART = "rowwise"
#: The style of a norm of each head alone, between the two.
_OF_HEADS = "replicated_with_grad_allreduce"
#: The style of a layer that every process holds whole, before the two: a latent, and a part of keys
#: that goes straight to attention.
_LATENT = "mla_kv_a_proj"
#: The style of a module that every process holds whole, with whole inputs.
_WHOLE = "replicate"
#: The style of an attention module with parameters of its own, an entry for each head (sinks), of
#: which it sees a shard.
_OWN_PARAMETERS = "local_params"
#: The styles of a mixture's experts: each process has some neurons of all of them.
_EXPERTS = {"moe_tp_experts", "packed_colwise", _TAKES_PART}
#: Or each process has all neurons of some of them.
_WHOLE_EXPERTS = {"ep_dispatch_experts", "grouped_gemm"}
#: Styles of layers that are sharded inside, with whole inputs and outputs.
_WHOLE_OUTSIDE = (
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "embedding_rowwise",
    "embedding_colwise",
    _WHOLE,
    "moe_tp_experts",
    _OWN_PARAMETERS,
    _LATENT,
    *_WHOLE_EXPERTS,
)

#: Layers that make keys, alone or with others, as in transformers' own `get_kv_heads_per_rank`.
_KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value")


#: The style of each module and parameter, by its path.
Styles = Mapping[str, str]


class SpreadModelError(TypeError):
    """An error for a model that is spread over processes in such a way that hook points would show
    shards.
    """


@dataclass(frozen=True)
class Layout:
    """The distribution of a model over processes.

    Attributes:
        description: a description in words.
        peers: the processes that share each layer; None if no layer is shared.
        styles: the tensor-parallel style of each module, by its path from the wrapped model.
        sizes: the total number of columns of modules with sharded inputs or outputs.
        heads_first: the norms of heads whose inputs have heads before positions.
        bare: the modules without parameters.
        rows_of: the processes that have different rows, by their global ranks; empty if that is
            unknown.
    """

    description: str
    peers: Peers | None = None
    styles: Styles = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    heads_first: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    rows_of: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self  # a copy of the model is spread over the same processes

    def cut(self, site: Site) -> Cut | None:
        """Return the sharding of a site's tensor; None if each process has different rows.

        Raises:
            SpreadModelError: it is a shard, but it is unknown which one.
        """
        if self.peers is None:
            return None
        path = module_path(site.path)
        if site.kind in ("input", "output"):
            return self._along(self._axis(path, site.kind))
        if site.kind in ("attention", "softmax"):
            return self._along(self._axis_of_heads(path))
        styles = self._styles_in(path)
        if site.kind == "experts" and styles == _EXPERTS:
            return self._cut_of_expert(path, str(site.key).partition(".")[2])
        if styles and not (site.kind == "experts" and styles == _WHOLE_EXPERTS):
            raise SpreadModelError(f"{path} is cut inside ({', '.join(sorted(styles))})")
        return self._along(None)

    def _along(self, axis: int | None) -> Cut:
        """Return the sharding along an axis; None: the tensor is whole."""
        assert self.peers is not None
        return Cut(self.peers.group, axis, self.peers)

    def of(self, points: Sequence[Point], norms_of_heads: Iterable[str] = ()) -> Layout:
        """Return a copy of the layout for a model with these hook points, whose views and axes tell
        what the inputs of some modules are.

        Args:
            points: the hook points.
            norms_of_heads: the paths of norms of each head's queries, keys or values.
        """
        heads_first = set()
        # Modules without a plan: a latent, which the sharded layers after it receive whole, and
        # norms without weights.
        unplanned = {}
        for point in points:
            path = module_path(point.site.path)
            if _sees_heads_first(point.view):
                heads_first.add(path)
            if point.axes.endswith("_latent"):
                unplanned[path] = _WHOLE
        unplanned |= dict.fromkeys(self.bare.intersection(norms_of_heads), _OF_HEADS)
        styles = {path: style for path, style in unplanned.items() if self._region(path)}
        return replace(self, heads_first=frozenset(heads_first), styles={**styles, **self.styles})

    def asking(self, compares: bool, patience: float) -> Layout:
        """Return a copy with these settings for communication; see `Peers`."""
        if self.peers is None:
            return self
        peers = replace(self.peers, compares=compares, patience=patience)
        return replace(self, peers=peers)

    def not_shown(self, points: Iterable[Point]) -> dict[str, str]:
        """Return the hook points that would show a shard that cannot be gathered, with the
        reason.
        """
        reasons = {}
        for point in points:
            try:
                for site in (point.site, *point.sources):
                    self.cut(site)
                if point.view.contextual and module_path(point.site.path) in self.styles:
                    self.cut(Site(point.site.path, "input"))
            except SpreadModelError as error:
                reasons[point.name] = f"{error}: {self.description}"
        return reasons

    def check_in_place(self, path: str, module: nn.Module) -> None:
        """Check that the module at a path is sharded as it was when the bridge was made.

        Raises:
            SpreadModelError: it was replaced by a module that is not sharded.
        """
        cut = self._layers(module_path(path))
        if cut and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise SpreadModelError(
                f"the module at {path!r} was replaced by one that is not cut, and the bridge was"
                " made of one that is: make another bridge"
            )

    def _axis(self, path: str, kind: str) -> int | None:
        """Return the axis along which a module's input or output is sharded."""
        style = self.styles.get(path)
        whole_borders = ((_GIVES_PART, "input"), (_TAKES_PART, "output"))
        if style in _WHOLE_OUTSIDE or (style, kind) in whole_borders:
            return None
        if style in (_GIVES_PART, _TAKES_PART):
            self._check_even(path)
            return -1
        region = self._region(path)
        if style is None and region is None:
            return None
        if style == _OF_HEADS and region is not None and self._axis_of_heads(region) is not None:
            return 1 if path in self.heads_first else -2
        raise SpreadModelError(
            f"each process computes a part of {path} ({style or f'inside {region}'})"
        )

    def _axis_of_heads(self, path: str) -> int | None:
        """Return the axis along which heads are sharded inside an attention module."""
        styles = self._styles_in(path)
        if styles <= set(_WHOLE_OUTSIDE) - {_OWN_PARAMETERS, "moe_tp_experts", *_WHOLE_EXPERTS}:
            return None
        if not styles <= {_GIVES_PART, _TAKES_PART, _OF_HEADS, _LATENT, _OWN_PARAMETERS, _WHOLE}:
            raise SpreadModelError(
                f"each process computes some of the heads of {path} ({', '.join(sorted(styles))})"
            )
        for other in self._layers(path):
            self._check_even(other)
        return 1

    def _cut_of_expert(self, path: str, part: str) -> Cut:
        """Return the sharding of activations inside an expert: of its neurons; its output is a sum
        over them.
        """
        self._check_even(f"{path}.down_proj")
        if part == "in":
            return replace(self._along(None), sums="gradient")
        if part == "out":
            return replace(self._along(None), sums="tensor")
        return self._along(-1)

    def _layers(self, region: str) -> list[str]:
        """Return the layers in a module that have sharded inputs or outputs."""
        return [
            path
            for path, style in self.styles.items()
            if is_inside(path, region) and path in self.sizes
        ]

    def _styles_in(self, region: str) -> set[str]:
        return {style for path, style in self.styles.items() if is_inside(path, region)}

    def _region(self, path: str) -> str | None:
        """Return the innermost module around another in which layers pass shards to each other."""
        regions = {
            other.rpartition(".")[0]
            for other, style in self.styles.items()
            if style not in _WHOLE_OUTSIDE
        }
        while path := path.rpartition(".")[0]:
            if path in regions:
                return path
        return None

    def _check_even(self, path: str) -> None:
        assert self.peers is not None
        if path not in self.sizes:
            raise SpreadModelError(
                f"{path} is cut, and its weight does not say how (a quantised layer)"
            )
        if self.sizes[path] % self.peers.group.size():
            raise SpreadModelError(
                f"the {self.sizes[path]} columns of {path} are cut into unequal parts"
            )


def _sees_heads_first(view: View) -> bool:
    if isinstance(view, Composed):
        return _sees_heads_first(view.inner) or _sees_heads_first(view.outer)
    return isinstance(view, HeadsFirst)


def refuse_context_parallel() -> None:
    """Raise an error if torch's `context_parallel` gives each process only some of the positions.

    Raises:
        SpreadModelError: it does.
    """
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    replaced = getattr(sys.modules.get(name), "_replaced_functions", ())
    if torch.nn.functional.scaled_dot_product_attention in replaced:
        raise SpreadModelError(
            "the model is context parallel (torch's context_parallel is open): a hook would be"
            " shown some of the positions. Run it outside of that"
        )


def layout_of(model: nn.Module) -> Layout | None:
    """Return the distribution of a model over processes; None if this process alone holds all of
    it.

    Args:
        model: a Hugging Face model, with its wrappers.

    Raises:
        SpreadModelError: hook points would show shards, or it is unknown what they would show.
        VersionError: it is tensor parallel, and transformers is older than 5.16.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters.spread import layout_of
        >>> layout_of(
        ...     GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10))
        ... ) is None
        True
    """
    path = core_path(model)
    core = model.get_submodule(path)
    descriptions: list[str] = []
    rows_of: tuple[int, ...] = ()
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        rows_of = tuple(dist.get_process_group_ranks(group))
        descriptions.append(
            f"data parallel over {group.size()} processes, each with rows of its own"
        )
    config = getattr(getattr(core, "config", None), "distributed_config", None)
    _refuse_stages(config)
    spread = {name: x for name, x in core.named_parameters() if isinstance(x, DTensor)}
    is_sharded = any(isinstance(module, FSDPModule) for module in core.modules())
    if is_sharded:
        descriptions.append("parameters sharded by FSDP2, each process with rows of its own")
        rows_of = _ranks(spread)
    plan = _plan(core, config) if (getattr(core, "_tp_size", None) or 1) > 1 else {}
    if plan:
        check_tensor_parallel()
        if is_sharded:
            raise SpreadModelError(
                "the model is tensor parallel and sharded by FSDP2 at once: take one of them"
            )
        refuse_adapters(core)
        return _by_plan(path, core, plan, spread, descriptions)
    if spread and not is_sharded:
        name, parameter = next(iter(spread.items()))
        raise SpreadModelError(
            f"{name} is spread over processes ({parameter.placements}), and the model has no"
            " plan that says how: load it with from_pretrained(...,"
            ' distributed_config=DistributedConfig(tp_plan="auto"))'
        )
    return Layout("; ".join(descriptions), rows_of=rows_of) if descriptions else None


def _ranks(spread: Parameters) -> tuple[int, ...]:
    """Return the global ranks of the processes that hold shards of parameters."""
    ranks: set[int] = set()
    for parameter in spread.values():
        ranks.update(parameter.device_mesh.mesh.flatten().tolist())
    return tuple(sorted(ranks))


def refuse_adapters(core: nn.Module) -> None:
    """Raise an error for a sharded model with PEFT adapters: each process would create its own
    adapter for its shard.

    Args:
        core: the Hugging Face model.

    Raises:
        SpreadModelError: it has such adapters.
    """
    for name, module in core.named_modules():
        if hasattr(module, "base_layer"):
            raise SpreadModelError(
                f"{name} has an adapter of PEFT over a layer that is cut over processes, and"
                " nothing says how the adapter is: merge it in one process (merge_and_unload), save"
                " the model, and load that over processes"
            )


def _refuse_stages(config: Any) -> None:
    sizes = {name: getattr(config, f"{name}_size", None) or 1 for name in ("pp", "ep", "tp")}
    instead = "Load it with distributed_config=DistributedConfig(tp_plan='auto'), or in one process"
    if sizes["pp"] > 1:
        raise SpreadModelError(
            f"the model is pipeline parallel over {sizes['pp']} processes: each holds some of the"
            f" layers, and passes no others. {instead}"
        )
    if sizes["ep"] > 1 and sizes["ep"] != sizes["tp"]:
        raise SpreadModelError(
            f"the model is expert parallel over {sizes['ep']} processes of which each {sizes['tp']}"
            " are given the same: an expert's rows come from inputs that the others do not have."
            " Load it with tp_size as large as ep_size"
        )
    if getattr(config, "enable_sequence_parallel", False):
        raise SpreadModelError(
            "the model is sequence parallel: a hook would be shown some of the positions"
        )


def _plan(core: nn.Module, config: Any) -> Styles:
    """Return the style of each module and parameter that the plans name. A plan for experts takes
    precedence.
    """
    plan = _planned(core, "_tp_plan")
    if (getattr(config, "ep_size", None) or 1) == 1:
        return plan
    experts = _planned(core, "_ep_plan")
    others = {path: style for path, style in plan.items() if not is_inside(path, *experts)}
    return others | experts


def _planned(core: nn.Module, name: str) -> dict[str, str]:
    """Return the styles that one plan names; names may contain ``*`` for a layer's number."""
    plan: Styles = getattr(core, name, None) or {}
    styles = {}
    for path, _ in (*core.named_modules(), *core.named_parameters()):
        style = plan.get(path) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path))
        if style is not None:
            styles[path] = style
    return styles


def _by_plan(
    path: str, core: nn.Module, plan: Styles, spread: Parameters, descriptions: list[str]
) -> Layout:
    mesh = _mesh(core, plan, spread)
    kinds = {"expert" if style in _WHOLE_EXPERTS else "tensor" for style in plan.values()}
    named = " and ".join(sorted(kinds, reverse=True))
    descriptions.append(f"{named} parallel over {mesh.size()} processes")
    styles = {join(path, name): style for name, style in plan.items()}
    sizes = {join(path, name): size for name, size in _whole_sizes(core, plan, spread).items()}
    bare = set()
    for name, module in core.named_modules():
        if next(module.parameters(), None) is None:
            bare.add(join(path, name))
    group = mesh.get_group()
    peers = Peers(group, side_of(tuple(dist.get_process_group_ranks(group))))
    return Layout("; ".join(descriptions), peers, styles, sizes, bare=frozenset(bare))


def _mesh(core: nn.Module, plan: Styles, spread: Parameters) -> DeviceMesh:
    """Return the processes that a model is sharded over.

    Raises:
        SpreadModelError: it is sharded in a way for which each process's shard is unknown.
    """
    if "sequence_parallel" in plan.values():
        raise SpreadModelError(
            "the model is sequence parallel: a hook would be shown some of the positions"
        )
    if not spread:
        raise SpreadModelError(
            "the model was loaded to be tensor parallel, and no parameter says that it is cut. The"
            f" plan names {', '.join(sorted(plan))[:200]}: if nothing of that is cut (a tied output"
            " layer alone), load it without distributed_config. transformers before 5.23 cuts"
            " unseen, and any version quantised layers: load it with 5.23, and not quantised"
        )
    meshes = [parameter.device_mesh for parameter in spread.values()]
    mesh = meshes[0]
    ranks = mesh.mesh.tolist()
    if mesh.ndim > 1 or any(other.mesh.tolist() != ranks for other in meshes):
        raise SpreadModelError(
            f"the model is spread over a grid of processes ({mesh}): one axis is known to be right"
        )
    _refuse_cut_heads(core, plan, mesh.size())
    output = core.get_output_embeddings() if isinstance(core, PreTrainedModel) else None
    for name, module in core.named_modules():
        if module is output and plan.get(name) == _GIVES_PART:
            raise SpreadModelError(
                "the plan gives each process the logits of a part of the vocabulary: let it say"
                " colwise_gather_output of the output layer"
            )
    return mesh


def _whole_sizes(core: nn.Module, plan: Styles, spread: Parameters) -> dict[str, int]:
    """Return the total width of each sharded module, by the names in the plan."""
    sizes = {}
    sharded = {_GIVES_PART: "out_features", _TAKES_PART: "in_features"}
    for name, style in plan.items():
        if f"{name}.weight" in spread and style in sharded:
            sizes[name] = int(getattr(module_at(core, name), sharded[style]))
        elif name in spread and style == _TAKES_PART:
            sizes[name] = spread[name].shape[-1]
    return sizes


def _refuse_cut_heads(core: nn.Module, plan: Styles, processes: int) -> None:
    """Raise an error if a process has only part of a key head, because the model's own forward
    fails then.
    """
    config: Any = core.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    columns = (name.rpartition(".")[2] for name, style in plan.items() if style == _GIVES_PART)
    are_cut = any(layer in _KEY_LAYERS for layer in columns)
    if are_cut and isinstance(heads, int) and heads % processes:
        raise SpreadModelError(
            f"{heads} heads of keys cannot be cut for {processes} processes, and transformers does"
            f" not copy them: take as many processes as divide {heads}"
        )


@lru_cache(maxsize=4)
def side_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a group of processes for control messages, on their CPUs. All of them have to call
    this.

    Args:
        ranks: their global ranks.
    """
    return dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
