"""How a model is spread over processes, as the model itself says, and where that cuts a hook point's site.

Under tensor parallelism (`tp_plan` of transformers) some linear layers hold a part of their columns or rows on each
process. What they pass to each other is then a part too: some heads, some neurons. The plan names the layers and says
how each is cut, their parameters are `DTensor`. Everything else, the residual stream first of all, is whole and equal
on all processes. Under FSDP2 and data parallelism every process computes whole activations, of rows of its own.
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
from adapters.points import Point, Site, core_path, is_inside, module_at, module_path
from adapters.views import View
from adapters.views.attention import HeadsFirst
from adapters.views.views import Composed

# ----------------------------------------------------------------------------------------------------------------------
# Whether processes that share a model do the same.
# ----------------------------------------------------------------------------------------------------------------------


class DifferentEditsError(RuntimeError):
    """Processes did not do the same on all processes that share a model."""


@dataclass(frozen=True)
class Peers:
    """The processes that share a model, and how they ask each other.

    Attributes:
        group: they, as the model's own tensors are sent.
        side: a group of the same ones for questions alone: one that is asked in vain does not take part in what the
            model sends.
        compares: what hooks make is compared.
        patience: how many seconds a process that looks into a pass waits for the others.
    """

    group: dist.ProcessGroup
    side: dist.ProcessGroup
    compares: bool = True
    patience: float = 60.0

    def agreed(self, make: Callable[[], Tensor], name: str) -> Tensor:
        """What hooks make of an activation, if they make the same on all processes.

        Args:
            make: runs the hooks.
            name: of the hook point.

        Raises:
            DifferentEditsError: on all processes, where they differ; on the others, where a hook failed on one; where
                the others do not come.
        """
        if not self.compares:
            return make()
        try:
            made = make()
        except BaseException:
            self._compared(0, self.side.rank() + 1, name)
            raise
        self._check_same(_checksum(made), name, (
            f"what hooks made of {name} differs between the {self.side.size()} processes that share this model: "
            "seed random numbers alike, and do the same on all"
        ))  # fmt: skip
        return made

    def meet(self, name: str) -> None:
        """Waits until all processes look at a hook point, before anything of it is sent.

        Args:
            name: of the hook point.

        Raises:
            DifferentEditsError: the others look at another one, or at none.
        """
        self._check_same(zlib.crc32(name.encode()), name, (
            f"{name} is asked for here, and another hook point on other processes that share this model: do the same "
            "on all"
        ))  # fmt: skip

    def _check_same(self, number: int, name: str, otherwise: str) -> None:
        """Refuses that a number is another one on other processes, or that a hook failed on one."""
        same, failed = self._compared(number, 0, name)
        if failed:
            otherwise = f"a hook at {name} failed on process {failed - 1} of {self.side.size()}, which says why"
        if failed or not same:
            raise DifferentEditsError(otherwise)

    def agree(self, numbers: list[int]) -> Callable[[], list[bool]]:
        """Asks whether each of some numbers is the same on all processes, all of which have to; the answer waits."""
        answer = largest(self.side, [*numbers, *(-number for number in numbers)])

        def same() -> list[bool]:
            found = answer()
            return [high == -low for high, low in zip(found, found[len(numbers) :], strict=False)]

        return same

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers; all have to ask."""
        return -largest(self.side, [-number])()[0]

    def _compared(self, number: int, failed: int, name: str) -> tuple[bool, int]:
        try:
            highest, lowest, failed = largest(self.side, [number, -number, failed], self.patience)()
        except RuntimeError as error:  # gloo's of a process that is late, or gone
            raise DifferentEditsError(
                f"hooks are called at {name} here, and other processes that share this model did not come there in "
                f"{self.patience:g} seconds, or ended ({error}): make each call on all, with the same hooks"
            ) from error
        return highest == -lowest, failed


def largest(side: dist.ProcessGroup, numbers: list[int], seconds: float | None = None) -> Callable[[], list[int]]:
    """Asks for the largest of the processes' numbers at each place; the answer waits.

    Args:
        side: the processes, all of which have to ask.
        numbers: of this process.
        seconds: how long the answer waits for the others; None: as long as the group says.
    """
    found = torch.tensor(numbers, dtype=torch.int64)
    work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=side, async_op=True)
    assert work is not None

    def answer() -> list[int]:
        work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        return cast(list[int], found.tolist())

    return answer


class Turns:
    """The passes of processes that have rows of their own, where a pass needs all of them (for parameters).

    Each pass is made by all at the same time. A process that has none left, or another one, makes one of nothing.

    Args:
        side: the processes, all of which have to take turns until they end.
        join: makes a pass of nothing, of a number.
    """

    def __init__(self, side: dist.ProcessGroup, join: Callable[[int], object]) -> None:
        self._side, self._join = side, join
        #: A pass that was begun is not over: where it broke off, the others wait in it for good.
        self.under_way = False

    def take(self, number: int) -> None:
        """Waits until this process's pass is the next, and makes those of the others until then.

        Args:
            number: of what the pass does, above 0. Larger ones are the first.

        Raises:
            RuntimeError: the pass before broke off.
        """
        if self.under_way:
            raise RuntimeError("a pass broke off, and the other processes wait in it: end all of them")
        while (now := largest(self._side, [number])()[0]) > number:
            self._join(now)
        self.under_way = number > 0

    def end(self) -> None:
        """Takes part in the passes of the others until nobody has one left."""
        if not self.under_way:
            self.take(0)


def number_of(given: object) -> int:
    """A number that says which tensors, arrays, texts and numbers these are; other objects do not count.

    Of a cache of keys and values, of which each process may have a part, it is the length.

    Args:
        given: one of them, or a list or mapping of them.

    Example:
        >>> import torch
        >>> from adapters.spread import number_of
        >>> number_of({"input": torch.tensor([1, 2])}) == number_of({"input": torch.tensor([1, 3])})
        False
    """
    if isinstance(given, Tensor):
        data = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy().tobytes(), zlib.crc32(repr(given.shape).encode()))
    if isinstance(given, np.ndarray):
        return number_of(torch.as_tensor(given))
    if isinstance(given, Cache):
        return number_of(given.get_seq_length())
    if isinstance(given, Mapping):
        return number_of(list(given.values()))
    if isinstance(given, list | tuple):
        return zlib.crc32(repr([number_of(each) for each in given]).encode())
    return zlib.crc32(repr(given).encode()) if isinstance(given, str | int | float) else 0


def _checksum(x: Tensor) -> int:
    """A number that another tensor of this shape has by accident only: of its bits, each with a factor of its place."""
    size = x.element_size()
    bits = x.detach().contiguous().flatten()
    bits = torch.view_as_real(bits).flatten() if bits.is_complex() else bits
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = bits.view(integers[bits.element_size()]).long()
    words = words ^ (words >> 32)  # the upper bits, signs among them, count where they are not cut off
    places = torch.arange(1, len(words) + 1, device=x.device) * 2_654_435_761 + 1
    return int((words * places).sum()) % (2**61) + size


# ----------------------------------------------------------------------------------------------------------------------
# A tensor of which each process holds a part: put together, and cut again. Each undoes the other for gradients too.
# ----------------------------------------------------------------------------------------------------------------------


#: What puts a tensor together, or cuts it.
Turn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cut:
    """How a tensor is spread over the processes that share a model.

    Attributes:
        group: the processes.
        axis: along which it is cut, into equal parts in the order of the processes; None: it is not.
        peers: they, where hooks are shown it.
        sums: what is a sum of what the processes have: the ``tensor`` (what is written is held by the first, others
            have 0), or the ``gradient`` of a tensor that all have. None: neither.
    """

    group: dist.ProcessGroup
    axis: int | None = None
    peers: Peers | None = None
    sums: Literal["tensor", "gradient"] | None = None

    @property
    def is_whole(self) -> bool:
        """All processes have it."""
        return self.axis is None and self.sums is None

    @property
    def parts(self) -> int:
        """How many there are."""
        return 1 if self.axis is None else self.group.size()

    def whole(self, part: Tensor) -> Tensor:
        """All parts, one after the other, or their sum. All processes have to ask for it."""
        return self._turned(part, self.joined, self.own)

    def part(self, whole: Tensor) -> Tensor:
        """This process's part."""
        return self._turned(whole, self.own, self.joined)

    def _turned(self, x: Tensor, there: Turn, back: Turn) -> Tensor:
        if self.is_whole:
            return x
        there, back = _same if self.sums == "gradient" else there, _same if self.sums == "tensor" else back
        return cast(Tensor, Turned.apply(x, there, back))

    def joined(self, part: Tensor) -> Tensor:
        """As `whole`, without a gradient."""
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

    def own(self, whole: Tensor) -> Tensor:
        """As `part`, without a gradient."""
        if self.axis is None:
            return whole.clone() if self.group.rank() == 0 else torch.zeros_like(whole)
        size = whole.shape[self.axis] // self.parts
        return whole.narrow(self.axis, self.group.rank() * size, size).contiguous()


def _same(x: Tensor) -> Tensor:
    return x.clone()


#: Layers of these styles give a part of their columns to what follows.
_GIVES_PART = "colwise"
#: Layers of these styles are given a part of their columns.
_TAKES_PART = "rowwise"
#: A norm of each head alone, between the two.
_OF_HEADS = "replicated_with_grad_allreduce"
#: A layer that every process has whole, before the two: a latent, and a part of keys that goes straight to attention.
_LATENT = "mla_kv_a_proj"
#: A module that every process has whole, and is given whole.
_WHOLE = "replicate"
#: An attention module that has parameters of its own, an entry for each head (sinks), of which it sees a part.
_OWN_PARAMETERS = "local_params"
#: How a mixture's experts are cut: each process has some neurons of all of them.
_EXPERTS = {"moe_tp_experts", "packed_colwise", _TAKES_PART}
#: Or each process has all neurons of some of them.
_WHOLE_EXPERTS = {"ep_dispatch_experts", "grouped_gemm"}
#: Layers of these styles are cut inside, and are given and give whole tensors.
_WHOLE_OUTSIDE = (
    "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "embedding_rowwise",
    "embedding_colwise", _WHOLE, "moe_tp_experts", _OWN_PARAMETERS, _LATENT,
    *_WHOLE_EXPERTS,
)  # fmt: skip

#: Layers that make keys, alone or with others, as transformers' own `get_kv_heads_per_rank` knows them.
_KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value")


class SpreadModelError(TypeError):
    """A model is spread over processes in a way in which hook points would show parts."""


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes.

    Attributes:
        said: in words.
        peers: the processes that share each layer; None where none is shared.
        styles: how each module is cut, by its path from the wrapped model.
        sizes: over how many columns, of modules that give or take a part.
        heads_first: the norms of heads that are given heads before positions.
        bare: the modules without parameters.
        rows_of: the processes that have rows of their own, by their global numbers; none where that is not known.
    """

    said: str
    peers: Peers | None = None
    styles: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    heads_first: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    rows_of: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self  # a copy of the model is spread over the same processes

    def cut(self, site: Site) -> Cut | None:
        """How a site's tensor is spread over processes; None where each has rows of its own.

        Raises:
            SpreadModelError: it is a part, and which is not known.
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
        """A tensor that is cut along an axis; None: it is whole."""
        assert self.peers is not None
        return Cut(self.peers.group, axis, self.peers)

    def of(self, points: Sequence[Point], norms_of_heads: Iterable[str] = ()) -> Layout:
        """The same, of a model with these hook points, whose views and axes say what some modules are given.

        Args:
            points: the hook points.
            norms_of_heads: the paths of norms of each head's queries, keys or values.
        """
        first = (module_path(point.site.path) for point in points if _sees_heads_first(point.view))
        latents = (module_path(point.site.path) for point in points if point.axes.endswith("_latent"))
        # Of what has no plan: a latent, which the cut layers behind it are given whole, and norms without weights.
        unplanned = dict.fromkeys(latents, _WHOLE) | dict.fromkeys(self.bare.intersection(norms_of_heads), _OF_HEADS)
        styles = {path: style for path, style in unplanned.items() if self._region(path)}
        return replace(self, heads_first=frozenset(first), styles={**styles, **self.styles})

    def asking(self, compares: bool, patience: float) -> Layout:
        """The same, whose processes ask each other in this way; see `Peers`."""
        peers = None if self.peers is None else replace(self.peers, compares=compares, patience=patience)
        return replace(self, peers=peers)

    def not_shown(self, points: Iterable[Point]) -> dict[str, str]:
        """The hook points that would show a part that cannot be put together, with the reason."""
        found = {}
        for point in points:
            try:
                for site in (point.site, *point.sources):
                    self.cut(site)
                if point.view.contextual and module_path(point.site.path) in self.styles:
                    self.cut(Site(point.site.path, "input"))
            except SpreadModelError as error:
                found[point.name] = f"{error}: {self.said}"
        return found

    def check_in_place(self, path: str, module: nn.Module) -> None:
        """Looks whether what stands at a path is cut as it was when the bridge was made.

        Raises:
            SpreadModelError: it is another module, of which this process has all.
        """
        cut = self._layers(module_path(path))
        if cut and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise SpreadModelError(
                f"the module at {path!r} was replaced by one that is not cut, and the bridge was made of one that is: "
                "make another bridge"
            )

    def _axis(self, path: str, kind: str) -> int | None:
        """Along which axis what enters or leaves a module is cut."""
        style = self.styles.get(path)
        if style in _WHOLE_OUTSIDE or (style, kind) in ((_GIVES_PART, "input"), (_TAKES_PART, "output")):
            return None
        if style in (_GIVES_PART, _TAKES_PART):
            self._check_even(path)
            return -1
        region = self._region(path)
        if style is None and region is None:
            return None
        if style == _OF_HEADS and region is not None and self._axis_of_heads(region) is not None:
            return 1 if path in self.heads_first else -2
        raise SpreadModelError(f"each process computes a part of {path} ({style or f'inside {region}'})")

    def _axis_of_heads(self, path: str) -> int | None:
        """Along which axis heads are cut inside an attention module."""
        styles = self._styles_in(path)
        if styles <= set(_WHOLE_OUTSIDE) - {_OWN_PARAMETERS, "moe_tp_experts", *_WHOLE_EXPERTS}:
            return None
        if not styles <= {_GIVES_PART, _TAKES_PART, _OF_HEADS, _LATENT, _OWN_PARAMETERS, _WHOLE}:
            raise SpreadModelError(f"each process computes some of the heads of {path} ({', '.join(sorted(styles))})")
        for other in self._layers(path):
            self._check_even(other)
        return 1

    def _cut_of_expert(self, path: str, part: str) -> Cut:
        """How what is inside of an expert is cut: its neurons; what it returns is a sum over them."""
        assert self.peers is not None
        self._check_even(f"{path}.down_proj")
        if part in ("in", "out"):
            return Cut(self.peers.group, None, self.peers, "gradient" if part == "in" else "tensor")
        return self._along(-1)

    def _layers(self, region: str) -> list[str]:
        """The layers in a module that give or take parts."""
        return [path for path, style in self.styles.items() if is_inside(path, region) and path in self.sizes]

    def _styles_in(self, region: str) -> set[str]:
        return {style for path, style in self.styles.items() if is_inside(path, region)}

    def _region(self, path: str) -> str | None:
        """The innermost module around another in which layers pass parts to each other."""
        regions = {other.rpartition(".")[0] for other, style in self.styles.items() if style not in _WHOLE_OUTSIDE}
        while path := path.rpartition(".")[0]:
            if path in regions:
                return path
        return None

    def _check_even(self, path: str) -> None:
        assert self.peers is not None
        if path not in self.sizes:
            raise SpreadModelError(f"{path} is cut, and its weight does not say how (a quantised layer)")
        if self.sizes[path] % self.peers.group.size():
            raise SpreadModelError(f"the {self.sizes[path]} columns of {path} are cut into unequal parts")


def _sees_heads_first(view: View) -> bool:
    if isinstance(view, Composed):
        return _sees_heads_first(view.inner) or _sees_heads_first(view.outer)
    return isinstance(view, HeadsFirst)


def refuse_context_parallel() -> None:
    """Refuses to run where torch's `context_parallel` gives each process a part of the positions.

    Raises:
        SpreadModelError: it does.
    """
    attention = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if torch.nn.functional.scaled_dot_product_attention in getattr(attention, "_replaced_functions", ()):
        raise SpreadModelError(
            "the model is context parallel (torch's context_parallel is open): a hook would be shown some of the "
            "positions. Run it outside of that"
        )


def layout_of(model: nn.Module) -> Layout | None:
    """How a model is spread over processes; None where this process holds all of it, alone.

    Args:
        model: a Hugging Face model, with what wraps it.

    Raises:
        SpreadModelError: hook points would show parts, or nothing says what they would show.
        VersionError: it is tensor parallel, and transformers is older than 5.16.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from adapters.spread import layout_of
        >>> layout_of(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10))) is None
        True
    """
    path = core_path(model)
    core = model.get_submodule(path)
    said: list[str] = []
    rows_of: tuple[int, ...] = ()
    if isinstance(model, DistributedDataParallel):
        rows_of = tuple(dist.get_process_group_ranks(model.process_group))
        said.append(f"data parallel over {model.process_group.size()} processes, each with rows of its own")
    config = getattr(getattr(core, "config", None), "distributed_config", None)
    _refuse_stages(config)
    spread = {name: each for name, each in core.named_parameters() if isinstance(each, DTensor)}
    sharded = {name for name, module in core.named_modules() if isinstance(module, FSDPModule)}
    if sharded:
        said.append("parameters sharded by FSDP2, each process with rows of its own")
        rows_of = tuple(sorted({rank for each in spread.values() for rank in each.device_mesh.mesh.flatten().tolist()}))
    plan = _plan(core, config) if (getattr(core, "_tp_size", None) or 1) > 1 else {}
    if not plan:
        if spread and not sharded:
            name, parameter = next(iter(spread.items()))
            raise SpreadModelError(
                f"{name} is spread over processes ({parameter.placements}), and the model has no plan that says how: "
                'load it with from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))'
            )
        return Layout("; ".join(said), rows_of=rows_of) if said else None
    check_tensor_parallel()
    if sharded:
        raise SpreadModelError("the model is tensor parallel and sharded by FSDP2 at once: take one of them")
    refuse_adapters(core)
    return _by_plan(path, core, plan, spread, said)


def refuse_adapters(core: nn.Module) -> None:
    """Refuses a model over processes with adapters of PEFT, which each process would make of a part by itself.

    Args:
        core: the Hugging Face model.

    Raises:
        SpreadModelError: it has some.
    """
    adapted = next((name for name, module in core.named_modules() if hasattr(module, "base_layer")), None)
    if adapted is not None:
        raise SpreadModelError(
            f"{adapted} has an adapter of PEFT over a layer that is cut over processes, and nothing says how the "
            "adapter is: merge it in one process (merge_and_unload), save the model, and load that over processes"
        )


def _refuse_stages(config: Any) -> None:
    sizes = {name: getattr(config, f"{name}_size", None) or 1 for name in ("pp", "ep", "tp")}
    instead = "Load it with distributed_config=DistributedConfig(tp_plan='auto'), or in one process"
    if sizes["pp"] > 1:
        raise SpreadModelError(
            f"the model is pipeline parallel over {sizes['pp']} processes: each holds some of the layers, and passes "
            f"no others. {instead}"
        )
    if sizes["ep"] > 1 and sizes["ep"] != sizes["tp"]:
        raise SpreadModelError(
            f"the model is expert parallel over {sizes['ep']} processes of which each {sizes['tp']} are given the "
            "same: an expert's rows come from inputs that the others do not have. Load it with tp_size as large as "
            "ep_size"
        )
    if getattr(config, "enable_sequence_parallel", False):
        raise SpreadModelError("the model is sequence parallel: a hook would be shown some of the positions")


def _plan(core: nn.Module, config: Any) -> dict[str, str]:
    """How each module and parameter that the plans name is cut. A plan for experts goes before the other."""
    found = _named(core, "_tp_plan")
    if (getattr(config, "ep_size", None) or 1) > 1:
        experts = _named(core, "_ep_plan")
        found = {path: style for path, style in found.items() if not is_inside(path, *experts)}
        found |= experts
    return found


def _named(core: nn.Module, name: str) -> dict[str, str]:
    plan: Mapping[str, str] = getattr(core, name, None) or {}
    paths = [path for path, _ in (*core.named_modules(), *core.named_parameters())]
    found = {path: plan.get(path) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)) for path in paths}
    return {path: style for path, style in found.items() if style is not None}


def _by_plan(
    path: str, core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor], said: list[str]
) -> Layout:
    mesh = _mesh(core, plan, spread)
    inside = f"{path}." if path else ""
    sizes = {inside + name: size for name, size in _whole_sizes(core, plan, spread).items()}
    kinds = {"expert" if style in _WHOLE_EXPERTS else "tensor" for style in plan.values()}
    said.append(f"{' and '.join(sorted(kinds, reverse=True))} parallel over {mesh.size()} processes")
    styles = {inside + name: style for name, style in plan.items()}
    bare = frozenset(inside + name for name, module in core.named_modules() if next(module.parameters(), None) is None)
    group = mesh.get_group()
    side = side_of(tuple(dist.get_process_group_ranks(group)))
    return Layout("; ".join(said), Peers(group, side), styles, sizes, bare=bare)


def _mesh(core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor]) -> DeviceMesh:
    """The processes that a model is cut for.

    Raises:
        SpreadModelError: it is cut in a way of which it is not known what each process has.
    """
    if "sequence_parallel" in plan.values():
        raise SpreadModelError("the model is sequence parallel: a hook would be shown some of the positions")
    if not spread:
        raise SpreadModelError(
            f"the model was loaded to be tensor parallel, and no parameter says that it is cut. The plan names "
            f"{', '.join(sorted(plan))[:200]}: if nothing of that is cut (a tied output layer alone), load it without "
            "distributed_config. transformers before 5.23 cuts unseen, and any version quantised layers: load "
            "it with 5.23, and not quantised"
        )
    mesh = next(iter(spread.values())).device_mesh
    same = [parameter.device_mesh.mesh.tolist() == mesh.mesh.tolist() for parameter in spread.values()]
    if mesh.ndim > 1 or not all(same):
        raise SpreadModelError(f"the model is spread over a grid of processes ({mesh}): one axis is known to be right")
    _refuse_cut_heads(core, plan, mesh.size())
    output = core.get_output_embeddings() if isinstance(core, PreTrainedModel) else None
    if output is not None and any(
        plan.get(name) == _GIVES_PART for name, module in core.named_modules() if module is output
    ):
        raise SpreadModelError(
            "the plan gives each process the logits of a part of the vocabulary: let it say colwise_gather_output of "
            "the output layer"
        )
    return mesh


def _whole_sizes(core: nn.Module, plan: Mapping[str, str], spread: Mapping[str, DTensor]) -> dict[str, int]:
    """How wide the whole is of which a process has a part, by the names in the plan."""
    sizes = {}
    for name, style in plan.items():
        module = module_at(core, name) if f"{name}.weight" in spread else None
        if module is not None and style in (_GIVES_PART, _TAKES_PART):
            sizes[name] = int(getattr(module, "out_features" if style == _GIVES_PART else "in_features"))
        elif name in spread and style == _TAKES_PART:
            sizes[name] = spread[name].shape[-1]
    return sizes


def _refuse_cut_heads(core: nn.Module, plan: Mapping[str, str], processes: int) -> None:
    """The model's own forward fails where a process has a part of a head of keys."""
    config: Any = core.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    cut = any(style == _GIVES_PART and name.rpartition(".")[2] in _KEY_LAYERS for name, style in plan.items())
    if cut and isinstance(heads, int) and heads % processes:
        raise SpreadModelError(
            f"{heads} heads of keys cannot be cut for {processes} processes, and transformers does not copy them: take "
            f"as many processes as divide {heads}"
        )


@lru_cache(maxsize=4)
def side_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of processes for questions, on their processors. All of them have to ask.

    Args:
        ranks: their global numbers.
    """
    return dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
