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
    """Tell whether a part is named like an MLP."""
    return isinstance(part, MLP | MoE) or (isinstance(part, Mixer) and part.plays == "mlp")


MixElement = Literal["read", "write", "keep", ""]


@dataclass(frozen=True)
class Mix:
    """The mixing of several streams around a part (hyper-connections, Zhu et al. 2024): each stream
    becomes ``sum_j keep[j, i] * stream_j + write[i] * result``, and the part reads another weighted
    sum of them.

    Attributes:
        path: the module that receives the streams, relative to the block.
        returns: the elements of its output, in order: ``read``, the input of the part's norm,
            ``[batch, pos, d_model]``; ``write``, the weights of the result, ``[batch, pos,
            n_streams]``; ``keep``, the weights of the streams, ``[batch, pos, n_streams,
            n_streams]`` (without it, the streams are unchanged); "", anything else. Without
            ``read``, the block itself mixes the streams, once (AltUp, Baykal et al. 2023), and the
            module only computes weights. The first step's module returns ``keep``, the mixing
            weights; all steps then work on the first stream. The last step's module returns
            ``write``, the weights with which the result is added to all streams but the first.
    """

    path: str
    returns: tuple[MixElement, ...]

    @property
    def by_block(self) -> bool:
        """Tell whether the block itself mixes the streams, once per block."""
        return "read" not in self.returns

    @property
    def read(self) -> int:
        """Return the index of the part's input in the module's output."""
        return self.returns.index("read")

    @property
    def write(self) -> int:
        """Return the index of the result's weights in the module's output."""
        return self.returns.index("write")

    @property
    def keep(self) -> int | None:
        """Return the index of the streams' weights in the module's output; None without any."""
        return self.returns.index("keep") if "keep" in self.returns else None

    def of(self, streams: Tensor, result: Tensor, write: Tensor, keep: Tensor | None) -> Tensor:
        """Compute the streams after the part.

        Args:
            streams: the streams before the part, ``[batch, pos, n_streams, d_model]``.
            result: the part's output, ``[batch, pos, d_model]``.
            write, keep: the weights.
        """
        if keep is not None:
            streams = self.kept(streams, keep)
        weights = write.to(streams.dtype).unsqueeze(-1)
        return streams + weights * result.unsqueeze(-2)

    @staticmethod
    def kept(streams: Tensor, keep: Tensor) -> Tensor:
        """Mix the streams: each becomes a weighted sum of all."""
        return keep.to(streams.dtype).transpose(-1, -2) @ streams

    @staticmethod
    def corrected(streams: Tensor, first: Tensor, result: Tensor, write: Tensor) -> Tensor:
        """Compute the streams after a block that mixes them itself.

        Args:
            streams: the streams as mixed by its first step, ``[batch, pos, n_streams, d_model]``.
            first: the first stream after the block's steps, ``[batch, pos, d_model]``.
            result: the output of its last part.
            write: the weights.
        """
        change = first.unsqueeze(-2) - streams[..., :1, :]
        weights = write.to(streams.dtype).unsqueeze(-1)
        active, others = (streams + weights * change).tensor_split([1], dim=-2)
        return torch.cat([active, others + result.unsqueeze(-2)], dim=-2)


@dataclass(frozen=True)
class Step:
    """A residual step: ``residual_transform(stream) + result_chain(part(pre(stream)))``, and then
    `stream_norm` of that.

    Attributes:
        part: the attention, MLP, mixture or mixer inside.
        pre: the norm of its input (None: it reads the stream directly).
        result_chain: the transforms of its result before it is added, in order: a norm (`post`; if
            no module outputs the result, the step's `out` is this norm's path too), a constant
            (`times`), and parameters of the block, such as a bias that is added after the part
            (GPT-NeoX Japanese).
        residual_transform: the transform of the stream before the result is added to it; among
            parallel steps, the first declares it.
        residual_sum_module: the module that outputs the sum, where there is one (None: the block
            computes it itself).
        stream_norm: a norm of the stream itself, after the sum (BERT).
        parallel_to: the number of an earlier step in the block that reads the same stream; both
            results are added together. Usually these are a parallel attention and MLP. In LongCat,
            experts read the same stream as the first MLP, and their result is added after the
            second MLP. None: it reads the stream after all earlier steps. Steps that read the same
            stream through the same norm share that norm.
        mix: the mixing between the streams and the part, where the block carries several.
        out: the module, relative to the block, whose output is added to the stream, if that is not
            the part's own module.
        out_element: the index of that output, where the module returns a tuple.
        entry: the module, relative to the block, that receives the part's input, if that is not the
            part's own module and no module surrounds the part. "" if it is unknown.

    Raises:
        ValueError: the result is multiplied by zero, so that nothing would be added; a norm is not
            first in `result_chain`; there are norms both before the part and on the stream, which
            would have the same name; or a step with a `residual_transform` is not the first to read
            its stream.
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
            raise ValueError(
                f"result_chain of the step of {self.part} has a norm that is not its first link"
            )
        if self.output_transform and constant_of(self.output_transform) == 0:
            raise ValueError(
                f"result_chain of the step of {self.part} multiplies with 0: nothing would be added"
            )
        if self.pre and self.stream_norm:
            raise ValueError(
                f"the step of {self.part} has both pre and stream_norm: one step has one of them"
            )
        if self.parallel and self.residual_transform:
            raise ValueError(
                f"the step of {self.part} is parallel and has residual_transform: the first of"
                " parallel steps says it"
            )

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Return the norms before the part, after it and on the stream."""
        return tuple(norm for norm in (self.pre, self.post, self.stream_norm) if norm)

    @property
    def post(self) -> Norm | None:
        """Return the norm of the part's result before it is added."""
        first = self.result_chain[0] if self.result_chain else None
        return first if isinstance(first, Norm) else None

    @property
    def output_transform(self) -> Chain:
        """Return the constants and block parameters that transform the result after `post`."""
        return tuple(link for link in self.result_chain if isinstance(link, Affine))

    @property
    def parallel(self) -> bool:
        """Tell whether its result is added together with the step before it."""
        return self.parallel_to is not None

    @property
    def last_factor(self) -> float | None:
        """Return the constant that multiplies the last matrix's result, if no norm is between; None
        if parameters multiply it.
        """
        return constant_of(self.behind_last) if self.behind_last else 1.0

    @property
    def behind_last(self) -> Chain:
        """Return the transforms applied to the last matrix's result; empty if a norm is between."""
        return () if self.post else self.output_transform

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the paths of the modules that read its input, relative to the block, where no
        module surrounds its part.
        """
        part = self.part
        paths: list[str] = []
        if isinstance(part, Attention):
            projections = part.projections.values()
            paths = [projection.path for projection in projections if projection.latent is None]
        elif isinstance(part, MLP):
            paths = [projection.path for projection in (part.up, part.gate) if projection]
        return () if part.path else tuple(dict.fromkeys(paths))

    def added(self, result: Tensor, block: nn.Module) -> Tensor:
        """Compute the term added to the stream from the output of the part, or of the norm after
        it.

        Args:
            result: ``[..., d_model]``.
            block: the block, whose parameters `output_transform` names.
        """
        return transformed(self.output_transform, result, block)

    @property
    def changes_its_result(self) -> bool:
        """Tell whether the part's output and the term added to the stream differ, for
        decompositions too.

        A factor and a bias after the part do not count: HookedTransformer has them in the last
        matrix and bias. (Each still has a hook point.)
        """
        return self.post is not None or self.last_factor is None


@dataclass(frozen=True)
class NamedStep:
    """A step with its place in the block, in HookedTransformer's names.

    Attributes:
        step: the declaration.
        name: its part's name: ``attn``, ``cross_attn``, ``mlp``, ``mixer``.
        norm: the name of its input's norm, or of the norm on the stream after it: ``ln1``, ``ln2``,
            ``ln3``.
        before: the hook point of its input: ``hook_resid_pre``, ``hook_resid_mid``, or the norm on
            the stream, ``ln1.hook_out``.
        onto: the stream that the result is added to: the same as `before`, unless the step reads an
            earlier stream.
        after: the stream after its result, or the results of all its parallel steps, are added:
            ``hook_resid_mid``, ``hook_resid_mid_cross``, ``hook_resid_post``.
        first: whether it is the first step that reads this stream.
        shared: the other steps that read this stream through the same norm, by name.
        leads: whether it is the first of the steps that share the norm.
        through_one: whether a single module reads that norm for all of them (PaLM's fused
            projection of queries and neurons).
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
        """Return the attention of the step; for a mixer, its inner attentions, as steps called
        ``attn`` that add nothing.
        """
        part = self.step.part
        if isinstance(part, Attention):
            return ((self, part),)
        name = self.name.replace("mixer", "attn")
        inner = []
        for number, attention in enumerate(part.attentions if isinstance(part, Mixer) else (), 1):
            own = name if number == 1 else f"{name}_{number}"
            inner.append((replace(self, step=Step(attention), name=own), attention))
        return tuple(inner)


@dataclass(frozen=True)
class Block:
    """One layer: a step for each addition to the residual stream.

    Attributes:
        steps: in the order in which the layer computes them.
        ends: where the block is not a module, the modules that the stream enters first and leaves
            last (XLM); its path is then that of their parent.
        norm: a norm on the stream itself before the first step, ``ln0`` (MiniMax).

    Raises:
        ValueError: a step is declared parallel to one that is not before it.
    """

    steps: tuple[Step, ...]
    ends: tuple[str, str] | None = None
    norm: Norm | None = None

    def __post_init__(self) -> None:
        for index, step in enumerate(self.steps):
            if step.parallel_to is not None and not 0 <= step.parallel_to < index:
                raise ValueError(
                    f"step {index} of a block has parallel_to={step.parallel_to}: none of the"
                    f" {index} before it"
                )

    @property
    def attn(self) -> Attention | None:
        """Return the first self-attention."""
        for attention in self.attentions:
            if not attention.cross:
                return attention
        return None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return all attentions."""
        return tuple(step.part for step in self.steps if isinstance(step.part, Attention))

    @property
    def mlp(self) -> MLP | MoE | None:
        """Return the first MLP or mixture of experts."""
        for step in self.steps:
            if isinstance(step.part, MLP | MoE):
                return step.part
        return None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Return the norms of all steps, not the norms of queries and keys."""
        norms = [norm for step in self.steps for norm in step.norms]
        return (self.norm, *norms) if self.norm else tuple(norms)

    @property
    def is_sum(self) -> bool:
        """Tell whether the outgoing stream is the incoming one plus the outputs of the steps, with
        no other step between.
        """
        changed = any(step.residual_transform or step.mix for step in self.steps)
        return self.norm is None and not changed

    @property
    def has_parallel_mlp(self) -> bool:
        """Tell whether an MLP reads the same stream as the step before it."""
        return any(
            named.step.parallel and named.before == named.onto and feeds_forward(named.step.part)
            for named in self.named
        )

    @property
    def adds_late(self) -> bool:
        """Tell whether a step reads an earlier stream than the one that it is added to."""
        return any(named.before != named.onto for named in self.named)

    @property
    def module_paths(self) -> dict[str, str]:
        """Return the modules that have a single role, by its name: ``ln1``, ``attn``, ``mlp``."""
        norms: dict[str, str] = {}
        parts: dict[str, str] = {}
        for named in self.named:
            step = named.step
            norm = step.pre or step.stream_norm
            if norm and named.leads:
                norms[named.norm] = norm.path
            if step.part.path:
                parts[named.name] = step.part.path
        return norms | parts

    @cached_property
    def named(self) -> tuple[NamedStep, ...]:
        """Return the named steps. Hook points, weights and weight processing are all derived from
        them.
        """
        groups: list[list[Step]] = []
        for step in self.steps:
            if step.parallel:
                groups[-1].append(step)
            else:
                groups.append([step])
        steps: list[NamedStep] = []
        stream = "ln0.hook_out" if self.norm else "hook_resid_pre"
        for index, group in enumerate(groups):
            after = "hook_resid_post" if index == len(groups) - 1 else _between(index, group)
            first = len(steps)
            for step in group:
                name, norm = self._names(step, steps, first)
                before = stream
                if step.parallel_to is not None:
                    before = steps[step.parallel_to].before
                is_first = step is group[0]
                steps.append(NamedStep(step, name, norm, before, stream, after, is_first, (), True))
            stream = f"{norm}.hook_out" if step.stream_norm else after
        return tuple(self._sharing(named, steps) for named in steps)

    @staticmethod
    def _sharing(named: NamedStep, steps: Sequence[NamedStep]) -> NamedStep:
        """Fill in the other steps that read the same stream through the same norm as this one."""
        norm = named.step.pre
        if not norm:
            return replace(named, leads=True, through_one=False)
        read = norm, named.before
        alike = [other for other in steps if (other.step.pre, other.before) == read]
        names = tuple(other.name for other in alike if other is not named)
        readers = {other.step.readers for other in alike}
        through_one = len(readers) == 1 and len(readers.pop()) == 1
        leads = alike[0] is named
        return replace(named, shared=names, leads=leads, through_one=through_one)

    def _names(self, step: Step, steps: Sequence[NamedStep], first: int) -> tuple[str, str]:
        """Return the names of a step's part and norm.

        Args:
            step: the step.
            steps: the earlier steps, whose names are taken.
            first: the number of steps before its group of parallel steps.
        """
        part = step.part
        taken = {name for named in steps for name in (named.name, named.norm)}
        crossed = any(named.name.startswith("cross_attn") for named in steps[:first])
        name = "mlp"
        norm = "ln3" if crossed else "ln2"
        if isinstance(part, Attention):
            name, norm = ("cross_attn", "ln2") if part.cross else ("attn", "ln1")
        elif isinstance(part, Mixer) and part.plays != "mlp":
            name = part.plays
            norm = "ln1"
        elif isinstance(part, Mixer):
            # It only resembles an MLP (Laurel), and is named after the actual MLPs.
            known = sum(isinstance(other.part, MLP | MoE) for other in self.steps)
            if known:
                taken |= {"mlp", "ln2", *(f"mlp_{n}" for n in range(2, known + 1))}
        name = _free(name, taken)
        return name, norm if norm not in taken else _free(f"{norm}_{name}", taken)


def _free(name: str, taken: set[str]) -> str:
    """Return the name, or the name followed by the first free number."""
    free = name
    number = 2
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _between(index: int, group: Sequence[Step]) -> str:
    """Return the name of the stream after steps that are not the last of their block."""
    if index == 0:
        return "hook_resid_mid"
    crosses = any(isinstance(step.part, Attention) and step.part.cross for step in group)
    return "hook_resid_mid_cross" if crosses else f"hook_resid_mid_{index + 1}"
