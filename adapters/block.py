"""One layer: an ordered list of residual steps, with HookedTransformer's names for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.attention import Attention
from adapters.feed_forward import MLP, MoE
from adapters.mixers import Mixer
from adapters.norms import Norm
from adapters.views import Affine, Chain, constant_of, transformed

Part = Attention | MLP | MoE | Mixer


def feeds_forward(part: Part) -> bool:
    """Whether a part has the names of an MLP."""
    return isinstance(part, MLP | MoE) or (isinstance(part, Mixer) and part.plays == "mlp")


MixElement = Literal["read", "write", "keep", ""]


@dataclass(frozen=True)
class Mix:
    """What stands between several streams and a part (hyper-connections, Zhu et al. 2024): each stream becomes
    ``sum_j keep[j, i] * stream_j + write[i] * result``, and the part reads another sum of them.

    Attributes:
        path: the module, relative to the block, that is given the streams.
        returns: what the elements of its output are, in order: ``read``, what the part reads, through its norm,
            ``[batch, pos, d_model]``; ``write``, the weights of the result, ``[batch, pos, n_streams]``; ``keep``,
            those of the streams, ``[batch, pos, n_streams, n_streams]``: without it, they go on as they are; "",
            another. Without ``read`` the block itself mixes them, once (AltUp, Baykal et al. 2023), and the module is a
            layer that makes weights: at the first step ``keep``, of what each stream becomes, and this step and those
            behind it work on the first; at the last ``write``, of how much of what they have made of that each gets.
            The result of the last is added to all streams but the first.
    """

    path: str
    returns: tuple[MixElement, ...]

    @property
    def by_block(self) -> bool:
        """The block itself mixes the streams, once."""
        return "read" not in self.returns

    @property
    def read(self) -> int:
        """The place of what the part reads."""
        return self.returns.index("read")

    @property
    def write(self) -> int:
        """The place of the weights of the result."""
        return self.returns.index("write")

    @property
    def keep(self) -> int | None:
        """The place of the weights of the streams; None without any."""
        return self.returns.index("keep") if "keep" in self.returns else None

    def of(self, streams: Tensor, result: Tensor, write: Tensor, keep: Tensor | None) -> Tensor:
        """The streams behind the part.

        Args:
            streams: those before it, ``[batch, pos, n_streams, d_model]``.
            result: what it puts out, ``[batch, pos, d_model]``.
            write, keep: the weights.
        """
        streams = streams if keep is None else self.kept(streams, keep)
        return streams + write.to(streams.dtype).unsqueeze(-1) * result.unsqueeze(-2)

    @staticmethod
    def kept(streams: Tensor, keep: Tensor) -> Tensor:
        """The streams as sums of all."""
        return keep.to(streams.dtype).transpose(-1, -2) @ streams

    @staticmethod
    def corrected(streams: Tensor, made: Tensor, result: Tensor, write: Tensor) -> Tensor:
        """The streams behind a block that mixes them itself.

        Args:
            streams: those that its first step has made, ``[batch, pos, n_streams, d_model]``.
            made: what its steps have made of the first, ``[batch, pos, d_model]``.
            result: what its last part puts out.
            write: the weights.
        """
        changed = made.unsqueeze(-2) - streams[..., :1, :]
        first, others = (streams + write.to(streams.dtype).unsqueeze(-1) * changed).tensor_split([1], dim=-2)
        return torch.cat([first, others + result.unsqueeze(-2)], dim=-2)


@dataclass(frozen=True)
class Step:
    """One residual step: ``residual_transform(stream) + result_chain(part(pre(stream)))``, and then
    `stream_norm` of that.

    Attributes:
        part: what is inside.
        pre: the norm that it reads the stream through (None: it reads the stream as it is).
        result_chain: what its result goes through before it is added, in order: a norm first (`post`; where no module
            puts that result out, the step's `out` is the path of this norm, too); a constant (`times`); parameters of
            the block, such as a bias that is added behind the part (GPT-NeoX Japanese).
        residual_transform: what the stream goes through before the result is added to it; of parallel steps, the first
            says it.
        residual_sum_module: the module that puts out the sum, where there is one (None: the block computes it itself).
        stream_norm: a norm that stands on the stream itself, behind the sum (BERT).
        parallel_to: the step, by its number in the block, whose stream it reads, too; what it writes is added to the
            stream with what the step before it writes. Mostly that is one: attention and MLP side by side. In LongCat,
            experts read what the first MLP reads, and write behind the second. None: it reads what the steps before it
            make. Steps that read the same stream through the same norm share it.
        mix: what stands between the streams and the part, where the block carries several.
        out: the module, relative to the block, whose output is added to the stream, where that is not the part's own.
        out_element: which element of that output it is, where the module returns a tuple.
        entry: the module, relative to the block, that is given what the part reads, where that is not the part's own,
            and no module stands around it all. "" where that is not known.

    Raises:
        ValueError: the result is multiplied with zero: nothing would be added. Or a norm is not the first link of its
            chain. Or there are norms before the part and on the stream, which would have one name. Or a step says
            `residual_transform` that is not the first to read its stream.
    """

    part: Part
    pre: Norm | None = None
    result_chain: tuple[Norm | Affine, ...] = ()
    stream_norm: Norm | None = None
    parallel_to: int | None = None
    residual_transform: Chain = ()
    residual_sum_module: str | None = None
    mix: Mix | None = None
    out: str | None = None
    out_element: int = 0
    entry: str | None = None

    def __post_init__(self) -> None:
        if any(isinstance(link, Norm) for link in self.result_chain[1:]):
            raise ValueError(f"result_chain of the step of {self.part} has a norm that is not its first link")
        if self.output_transform and constant_of(self.output_transform) == 0:
            raise ValueError(f"result_chain of the step of {self.part} multiplies with 0: nothing would be added")
        if self.pre and self.stream_norm:
            raise ValueError(f"the step of {self.part} has both pre and stream_norm: one step has one of them")
        if self.parallel and self.residual_transform:
            raise ValueError(
                f"the step of {self.part} is parallel and has residual_transform: the first of parallel steps says it"
            )

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those before the part, behind it and on the stream."""
        return tuple(norm for norm in (self.pre, self.post, self.stream_norm) if norm)

    @property
    def post(self) -> Norm | None:
        """The norm that its result goes through before it is added."""
        return next((link for link in self.result_chain if isinstance(link, Norm)), None)

    @property
    def output_transform(self) -> Chain:
        """What its result goes through behind `post`: constants, and parameters of the block."""
        return tuple(link for link in self.result_chain if isinstance(link, Affine))

    @property
    def parallel(self) -> bool:
        """It is added together with the step before it."""
        return self.parallel_to is not None

    @property
    def last_factor(self) -> float | None:
        """What the result of its last matrix is multiplied with, where no norm stands between; None: by parameters."""
        return constant_of(self.behind_last) if self.behind_last else 1.0

    @property
    def behind_last(self) -> Chain:
        """What the result of its last matrix goes through: nothing, where a norm stands between."""
        return () if self.post else self.output_transform

    @property
    def readers(self) -> tuple[str, ...]:
        """The modules that read its input, relative to the block, where no module stands around its part."""
        part = self.part
        if isinstance(part, Attention):
            made = tuple(each for each in part.projections.values() if each.latent is None)
        elif isinstance(part, MLP):
            made = tuple(each for each in (part.up, part.gate) if each)
        else:
            made = ()
        return () if part.path else tuple(dict.fromkeys(each.path for each in made))

    def added(self, result: Tensor, block: nn.Module) -> Tensor:
        """What is added to the stream where this is what the part, or the norm behind it, puts out.

        Args:
            result: ``[..., d_model]``.
            block: the block, whose parameters `output_transform` names.
        """
        return transformed(self.output_transform, result, block)

    @property
    def changes_its_result(self) -> bool:
        """Whether what the part puts out and what is added to the stream are two things for decompositions, too.

        A factor and a bias behind the part are no such change: HookedTransformer has them in the last matrix and bias.
        (They have a hook point each all the same.)
        """
        return self.post is not None or self.last_factor is None


@dataclass(frozen=True)
class NamedStep:
    """A step with its place in the block, in HookedTransformer's names.

    Attributes:
        step: the declaration.
        name: of its part: ``attn``, ``cross_attn``, ``mlp``, ``mixer``.
        norm: of the norm that it reads through, or that stands on the stream behind it: ``ln1``, ``ln2``, ``ln3``.
        before: what it reads: ``hook_resid_pre``, ``hook_resid_mid``, or the norm on the stream, ``ln1.hook_out``.
        onto: what the result is added to: the same, unless the step reads an earlier stream.
        after: the sum that it, or the last of the parallel steps that it is one of, makes: ``hook_resid_mid``,
            ``hook_resid_mid_cross``, ``hook_resid_post``.
        first: it is the first of the steps that read this stream.
        shared: the others that read this stream through the same norm, by name.
        leads: it is the first of those.
        through_one: one module reads that norm for all of them (PaLM's, which makes queries and neurons at once).
    """

    step: Step
    name: str
    norm: str
    before: str
    onto: str
    after: str
    first: bool
    shared: tuple[str, ...]
    leads: bool
    through_one: bool = False

    @property
    def attentions(self) -> tuple[tuple[NamedStep, Attention], ...]:
        """The attention that it is; or those inside of a mixer, as steps called ``attn`` that add nothing."""
        part, name = self.step.part, self.name.replace("mixer", "attn")
        if isinstance(part, Attention):
            return ((self, part),)
        inside = part.attentions if isinstance(part, Mixer) else ()
        names = (name if i == 0 else f"{name}_{i + 1}" for i in range(len(inside)))
        return tuple((replace(self, step=Step(each), name=own), each) for own, each in zip(names, inside, strict=True))


@dataclass(frozen=True)
class Block:
    """One layer: a step for each addition to the residual stream.

    Attributes:
        steps: in the order in which the layer computes them.
        ends: where the block is no module, its modules that the stream enters first and leaves last (XLM); its path is
            then that of what holds them.
        norm: a norm on the stream itself before the first step, ``ln0`` (MiniMax).

    Raises:
        ValueError: a step is called parallel to one that is not before it.
    """

    steps: tuple[Step, ...]
    ends: tuple[str, str] | None = None
    norm: Norm | None = None

    def __post_init__(self) -> None:
        for index, step in enumerate(self.steps):
            if step.parallel_to is not None and not 0 <= step.parallel_to < index:
                raise ValueError(
                    f"step {index} of a block has parallel_to={step.parallel_to}: none of the {index} before it"
                )

    @property
    def attn(self) -> Attention | None:
        """Its first self-attention."""
        return next((s.part for s in self.steps if isinstance(s.part, Attention) and not s.part.cross), None)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """All its attentions."""
        return tuple(step.part for step in self.steps if isinstance(step.part, Attention))

    @property
    def mlp(self) -> MLP | MoE | None:
        """Its first MLP or mixture."""
        return next((s.part for s in self.steps if isinstance(s.part, MLP | MoE)), None)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of all its steps, not those of queries and keys."""
        own = (self.norm,) if self.norm else ()
        return (*own, *(norm for step in self.steps for norm in step.norms))

    @property
    def is_sum(self) -> bool:
        """The stream that leaves it is the one that enters and what its steps put out, and no other step is between."""
        return self.norm is None and not any(step.residual_transform or step.mix for step in self.steps)

    @property
    def has_parallel_mlp(self) -> bool:
        """An MLP reads the stream that the step before it reads."""
        return any(
            named.step.parallel and named.before == named.onto and feeds_forward(named.step.part)
            for named in self.named
        )

    @property
    def adds_late(self) -> bool:
        """A step reads an earlier stream than the one that it is added to."""
        return any(named.before != named.onto for named in self.named)

    @property
    def module_paths(self) -> dict[str, str]:
        """The modules that play a part alone, by its name: ``ln1``, ``attn``, ``mlp``."""
        found: dict[str, str] = {}
        for named in self.named:
            norm = named.step.pre or named.step.stream_norm
            if norm and named.leads:
                found[named.norm] = norm.path
        return found | {named.name: named.step.part.path for named in self.named if named.step.part.path}

    @cached_property
    def named(self) -> tuple[NamedStep, ...]:
        """The steps with their names: the one walk that hook points, weights and weight processing are made from."""
        groups: list[list[Step]] = []
        for step in self.steps:
            if step.parallel:
                groups[-1].append(step)
            else:
                groups.append([step])
        found: list[NamedStep] = []
        streams = ["ln0.hook_out" if self.norm else "hook_resid_pre"]
        for index, group in enumerate(groups):
            after = "hook_resid_post" if index == len(groups) - 1 else _between(index, group)
            for step, (name, norm) in zip(group, self._names(group, found), strict=True):
                before = streams[-1] if step.parallel_to is None else found[step.parallel_to].before
                found.append(NamedStep(step, name, norm, before, streams[-1], after, step is group[0], (), True))
            streams.append(f"{found[-1].norm}.hook_out" if group[-1].stream_norm else after)
        return tuple(self._sharing(named, found) for named in found)

    @staticmethod
    def _sharing(named: NamedStep, steps: Sequence[NamedStep]) -> NamedStep:
        """The same, with the steps that read the same stream through the same norm."""
        alike = [
            each for each in steps if named.step.pre and (each.step.pre, each.before) == (named.step.pre, named.before)
        ]
        names = tuple(each.name for each in alike if each is not named)
        readers = {each.step.readers for each in alike}
        through_one = len(readers) == 1 and len(readers.pop()) == 1
        return replace(named, shared=names, leads=not alike or alike[0] is named, through_one=through_one)

    def _names(self, group: Sequence[Step], before: Sequence[NamedStep]) -> list[tuple[str, str]]:
        """The names of the parts and norms of steps, which those before them do not have."""
        taken = {name for named in before for name in (named.name, named.norm)}
        known = sum(isinstance(step.part, MLP | MoE) for step in self.steps)
        # What is only like an MLP (Laurel) is named behind all that are one.
        kept = {"mlp", "ln2", *(f"mlp_{n}" for n in range(2, known + 1))} if known else set()
        crossed = any(named.name.startswith("cross_attn") for named in before)
        found = []
        for step in group:
            if isinstance(step.part, Attention):
                name, norm = ("cross_attn", "ln2") if step.part.cross else ("attn", "ln1")
            elif isinstance(step.part, Mixer) and step.part.plays != "mlp":
                name, norm = step.part.plays, "ln1"
            else:
                name, norm = "mlp", "ln3" if crossed else "ln2"
            others = taken | kept if isinstance(step.part, Mixer) and step.part.plays == "mlp" else taken
            name = _free(name, others)
            norm = norm if norm not in others else _free(f"{norm}_{name}", others)
            taken |= {name, norm}
            found.append((name, norm))
        return found


def _free(name: str, taken: set[str]) -> str:
    """The name, or with the first number behind it that is not taken."""
    return name if name not in taken else next(f"{name}_{n}" for n in range(2, 99) if f"{name}_{n}" not in taken)


def _between(index: int, group: Sequence[Step]) -> str:
    """The name of the stream behind steps that are not the last of their block."""
    if index == 0:
        return "hook_resid_mid"
    crosses = any(isinstance(step.part, Attention) and step.part.cross for step in group)
    return "hook_resid_mid_cross" if crosses else f"hook_resid_mid_{index + 1}"
